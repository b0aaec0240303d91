"""The live set of workers: who they are, what state they are in, and what is booked on them.

Everything is in this process's memory and nothing awaits. Gives out immutable snapshots and leases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from ..core.lifecycle import Event, State, step
from ..core.speed import SpeedCurve, curve_of
from ..core.types import Snapshot, WorkerView


class Source(StrEnum):
    """How a worker came to be known."""

    STATIC = "static"  # named on the command line
    REGISTERED = "registered"  # registered itself, here or at another proxy of the same store


@dataclass(frozen=True, slots=True)
class Facts:
    """What an engine reports about itself; None where it does not."""

    version: str | None = None
    models: tuple[dict[str, object], ...] = ()
    block_tokens: int | None = None
    capacity_tokens: int | None = None
    prefix_caching: bool | None = None
    kv_cache_dtype: str | None = None
    # The names that a request may use.
    model_ids: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        """Derives the names once: every placement asks for them."""
        ids = (model.get("id") for model in self.models)
        object.__setattr__(self, "model_ids", frozenset(name for name in ids if isinstance(name, str)))


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The engine's own gauges at the last probe; None where it does not report one."""

    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None


class Verified(Protocol):
    """What a verification showed; see `verify.Verification`."""

    @property
    def incarnation(self) -> str:
        """Which life of the engine was probed."""

    @property
    def passed(self) -> bool:
        """It may serve."""

    @property
    def trust(self) -> str:
        """`inferred` or `blind`."""

    def report(self) -> dict[str, object]:
        """Renders it."""


@dataclass(slots=True)
class Worker:
    """One worker, as this process knows it."""

    id: str
    url: str
    incarnation: str
    source: Source
    identity: Mapping[str, object] = field(default_factory=dict)
    facts: Facts = field(default_factory=Facts)
    state: State = State.JOINING
    lease_until: float | None = None
    load: EngineLoad = field(default_factory=EngineLoad)
    failures: int = 0
    inflight: int = 0
    pending_tokens: int = 0
    pending_seconds: float = 0.0
    verification: Verified | None = None

    @property
    def is_verified(self) -> bool:
        """This life of the engine has passed verification."""
        verification = self.verification
        return verification is not None and verification.passed and verification.incarnation == self.incarnation

    @property
    def hardware(self) -> str | None:
        """Edition name of the hardware ledger; None when not known."""
        name = self.identity.get("name")
        return name if isinstance(name, str) else None

    @property
    def speed(self) -> SpeedCurve:
        """The curve that the identity stands for."""
        return curve_of(self.hardware)

    def view(self) -> WorkerView:
        """Returns the worker as a choice sees it."""
        return WorkerView(
            id=self.id,
            incarnation=self.incarnation,
            models=self.facts.model_ids,
            speed=self.speed,
            pending_tokens=self.pending_tokens,
            pending_seconds=self.pending_seconds,
            inflight=self.inflight,
            engine_waiting=self.load.waiting,
            block_tokens=self.facts.block_tokens,
            capacity_tokens=self.facts.capacity_tokens,
            hardware=self.hardware,
        )

    def report(self) -> dict[str, object]:
        """Renders the worker for `GET /workers`."""
        return {
            "id": self.id,
            "state": self.state.value,
            "url": self.url,
            "source": self.source.value,
            "incarnation": self.incarnation,
            "identity": dict(self.identity),
            "engine": {
                "version": self.facts.version,
                "models": sorted(self.facts.model_ids),
                "block_size": self.facts.block_tokens,
                "capacity_tokens": self.facts.capacity_tokens,
                "prefix_caching": self.facts.prefix_caching,
                "kv_cache_dtype": self.facts.kv_cache_dtype,
                "running": self.load.running,
                "waiting": self.load.waiting,
                "kv_usage": self.load.kv_usage,
            },
            "inflight": self.inflight,
            "pending_tokens": self.pending_tokens,
            "verification": None if self.verification is None else self.verification.report(),
            "speed": {"base": self.speed.base, "linear": self.speed.linear, "quadratic": self.speed.quadratic},
        }


class Lease:
    """A share of a worker, booked for one attempt; `release` gives it back, once."""

    __slots__ = ("_is_open", "_seconds", "_tokens", "worker")

    def __init__(self, worker: Worker, tokens: int, seconds: float) -> None:
        self.worker = worker
        self._tokens = tokens
        self._seconds = seconds
        self._is_open = True
        worker.inflight += 1
        worker.pending_tokens += tokens
        worker.pending_seconds += seconds

    def release(self) -> None:
        """Gives the share back; harmless when called again."""
        if self._is_open:
            self._is_open = False
            self.prefilled()
            self.worker.inflight -= 1

    def prefilled(self) -> None:
        """The first token has come: the prompt is no longer pending. Harmless when called again."""
        self.worker.pending_tokens -= self._tokens
        left = max(self.worker.pending_seconds - self._seconds, 0.0)
        # Sums of floats leave dust; an idle worker has none.
        self.worker.pending_seconds = left if self.worker.pending_tokens else 0.0
        self._tokens, self._seconds = 0, 0.0


# Told about (worker, event that changed it); the composition root listens to open and close shelves of the index.
Listener = Callable[[Worker, Event], None]


class Registry:
    """The fleet, in this process."""

    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}
        self._listeners: list[Listener] = []
        self._models_seen: set[str] = set()

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._workers.values()))

    def __len__(self) -> int:
        return len(self._workers)

    def listen(self, listener: Listener) -> None:
        """Calls `listener` after every event that concerns a worker."""
        self._listeners.append(listener)

    def get(self, worker_id: str) -> Worker | None:
        """Returns a worker by its id."""
        return self._workers.get(worker_id)

    def snapshot(self) -> Snapshot:
        """Returns the ready workers as they are at this moment."""
        ready = tuple(worker.view() for worker in self._workers.values() if worker.state is State.READY)
        return Snapshot(ready, frozenset(self._models_seen))

    def lease(self, worker_id: str, tokens: int, seconds: float) -> Lease:
        """Books `tokens` uncached prompt tokens that will take `seconds` to prefill.

        Raises:
            KeyError: the worker has left since the snapshot.
        """
        return Lease(self._workers[worker_id], tokens, seconds)

    def address(self, worker_id: str) -> str:
        """Returns a worker's base URL, or raises KeyError when it has left since the snapshot."""
        return self._workers[worker_id].url

    def upsert(self, worker: Worker) -> Worker:
        """Takes in a registration. Another incarnation replaces the old one; the same one keeps state and leases."""
        known = self._workers.get(worker.id)
        if known is None:
            self._workers[worker.id] = worker
            self._note_models(worker)
            self._tell(worker, Event.RESTARTED)
            return worker
        restarted = known.incarnation != worker.incarnation
        known.url, known.source = worker.url, worker.source
        known.identity, known.facts = worker.identity, worker.facts
        known.lease_until = worker.lease_until
        known.verification = worker.verification or known.verification
        if restarted:
            self.restarted(known, worker.incarnation)
        elif known.state is State.DRAINING:
            known.state = State.JOINING  # it asks to be in again
        self._note_models(known)
        return known

    def restarted(self, worker: Worker, incarnation: str) -> None:
        """Another life of the engine stands at this worker's place."""
        worker.incarnation = incarnation
        self.apply(worker, Event.RESTARTED)

    def learned(self, worker: Worker, facts: Facts) -> None:
        """Takes in what a probe read."""
        changed = facts.capacity_tokens != worker.facts.capacity_tokens
        worker.facts = facts
        self._note_models(worker)
        if changed:
            self._tell(worker, Event.PROBED)

    def apply(self, worker: Worker, event: Event) -> None:
        """Moves a worker along its life and tells the listeners."""
        if self._workers.get(worker.id) is not worker:
            return  # it has left, and a late probe must not touch who has its id by then
        worker.state = step(worker.state, event)
        if event is Event.PROBED:
            worker.failures = 0
            self._note_models(worker)
        elif event is Event.FAILED:
            worker.failures += 1
        if worker.state is State.GONE:
            self._workers.pop(worker.id, None)
            if event is Event.REMOVED:
                others = (left.facts.model_ids for left in self._workers.values())
                self._models_seen -= worker.facts.model_ids.difference(*others)
        self._tell(worker, event)

    def failed(self, worker_id: str) -> None:
        """A request could not reach the worker: nothing more is placed on it until a probe gets through."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            self.apply(worker, Event.FAILED)

    def expire(self, now: float) -> list[Worker]:
        """Ends every lease that has run out. Returns the workers that went."""
        lapsed = [w for w in self._workers.values() if w.lease_until is not None and w.lease_until <= now]
        for worker in lapsed:
            self.apply(worker, Event.LAPSED)
        return lapsed

    def _note_models(self, worker: Worker) -> None:
        self._models_seen |= worker.facts.model_ids

    def _tell(self, worker: Worker, event: Event) -> None:
        for listener in self._listeners:
            listener(worker, event)
