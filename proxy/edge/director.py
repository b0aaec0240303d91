"""Walks a request along its one-way path: prompt → blocks → snapshot → overlap → placement → lease → worker → settle.

One loop only: nothing was sent to the client and the failure says that another try is safe → place again without the
worker that failed. `settle` runs on every exit and is the only place that records anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NoReturn, TypeVar

from ..core.blocks import Blocks
from ..core.placement import place
from ..core.prompt import Dialect, Prompt, read_prompt
from ..core.types import Ask, Placement, Refusal, RefusalReason, Rng, Usage, WorkerView
from ..errors import (
    ClientFault,
    ConnectFailed,
    HomingError,
    InternalError,
    NoWorker,
    Refused,
    ReuseFailed,
    UnknownModel,
)
from .asgi import Headers, Send, answer_error
from .headers import to_worker
from .ports import Answer, Booking, Call, Fleet, History, Index, Outcome, Telemetry, Transport
from .relay import Relay

# Tries for one request, the first included; each further one goes to another worker.
MOST_ATTEMPTS = 3
# Engines answer this while their queue is full or they shut down: before any work, so another worker may be asked.
REFUSED_BEFORE_WORK = 503

A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request as it came in. `received` is on the director's clock, in seconds."""

    request_id: str
    dialect: Dialect
    path: str
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes
    received: float


@dataclass(frozen=True, slots=True)
class Rooms(Generic[A]):
    """The rooms that the director works with."""

    fleet: Fleet
    index: Index[A]
    history: History
    transport: Transport
    telemetry: Telemetry


class Director(Generic[A]):
    """Serves inference requests.

    Args:
        rooms: fleet, index, history, transport, telemetry.
        clock: a steady clock, in seconds.
        rng: breaks ties between equal workers.
        seed: returns the fleet's secret hash seed.
    """

    def __init__(self, rooms: Rooms[A], clock: Callable[[], float], rng: Rng, seed: Callable[[], int]) -> None:
        self.rooms = rooms
        self.clock = clock
        self.rng = rng
        self.seed = seed

    async def serve(self, arrival: Arrival, send: Send) -> None:
        """Answers one request. A cancellation means that the client has gone: the worker's call is closed with it."""
        await Journey(self, arrival, send).run()


class Journey(Generic[A]):
    """One request on its way."""

    def __init__(self, director: Director[A], arrival: Arrival, send: Send) -> None:
        self.rooms = director.rooms
        self.director = director
        self.arrival = arrival
        self.send = send
        self.outcome = Outcome(arrival.request_id, arrival.dialect.value, bytes_in=len(arrival.body))
        self.relay: Relay | None = None
        self.prompt: Prompt | None = None
        self.blocks: Blocks | None = None
        self.assumption: A | None = None

    async def run(self) -> None:
        """Goes all the way; whatever happens, it ends in `settle`."""
        try:
            await self._travel()
        except asyncio.CancelledError:
            self.outcome.result = "client_gone"
            raise
        except HomingError as problem:
            await self._tell(problem)
        except Exception as problem:  # noqa: BLE001 - the last door: the client gets a shaped error, the log the cause
            self.outcome.error = repr(problem)
            await self._tell(InternalError(f"The proxy failed on request {self.arrival.request_id}; please report it."))
        finally:
            self._settle()

    async def _travel(self) -> None:
        started = self.director.clock()
        self.outcome.stages["read"] = started - self.arrival.received
        self.prompt = read_prompt(self.arrival.dialect, self.arrival.body)
        self.outcome.model, self.outcome.stream = self.prompt.model, self.prompt.stream
        started = self._lap("parse", started)
        self.blocks = self.prompt.blocks(self.director.seed())
        self._lap("hash", started)
        self.outcome.turn = self.rooms.history.turn(self.blocks)
        await self._attempt_all(self.prompt, self.blocks)

    async def _attempt_all(self, prompt: Prompt, blocks: Blocks) -> None:
        excluded: set[str] = set()
        fault: HomingError | None = None
        is_reuse_tried = False
        while True:
            placement, view = self._place(prompt, blocks, frozenset(excluded), fault)
            may_retry = self.outcome.attempts < MOST_ATTEMPTS
            try:
                if await self._attempt(blocks, placement, view, may_pass_on=may_retry and placement.candidates > 1):
                    return
            except HomingError as problem:
                fault = problem
                if isinstance(problem, ConnectFailed):
                    self.rooms.fleet.failed(view.id)
                if not (problem.retry_safe and may_retry) or self._has_started():
                    raise
                if isinstance(problem, ReuseFailed) and not is_reuse_tried:
                    is_reuse_tried = True
                    continue  # the worker is fine, the connection was old: the same one again
            excluded.add(view.id)

    def _place(
        self, prompt: Prompt, blocks: Blocks, excluded: frozenset[str], fault: HomingError | None
    ) -> tuple[Placement, WorkerView]:
        started = self.director.clock()
        snapshot = self.rooms.fleet.snapshot()
        ids = [worker.id for worker in snapshot.workers if prompt.model in worker.models]
        overlap = self.rooms.index.overlap(blocks, prompt.model, ids, started)
        tokens = prompt.exact_tokens or self.rooms.history.tokens_at(blocks, len(blocks), prompt.model)
        middle = self._lap("index", started)
        self.outcome.is_known_model = prompt.model in snapshot.known_models
        decision = place(snapshot, overlap, Ask(prompt.model, tokens, excluded), started, self.director.rng)
        self._lap("place", middle)
        if isinstance(decision, Refusal):
            refuse(decision, prompt.model, snapshot.known_models, fault)
        view = next(worker for worker in snapshot.workers if worker.id == decision.winner.worker)
        self.outcome.placement, self.outcome.hardware = decision, view.hardware
        self.outcome.block_tokens = view.block_tokens
        self.outcome.attempts += 1
        return decision, view

    async def _attempt(self, blocks: Blocks, placement: Placement, view: WorkerView, *, may_pass_on: bool) -> bool:
        """Tries one worker. False: it refused before work, and another one is to be asked."""
        model = self.outcome.model or ""
        uncached = placement.prompt_tokens - placement.winner.expected_tokens
        try:
            lease = self.rooms.fleet.lease(view.id, uncached, placement.winner.cost.uncached)
            url = self.rooms.fleet.address(view.id) + self.arrival.path
        except KeyError:
            return False  # it left between snapshot and lease
        call = Call(url, to_worker(self.arrival.headers, self.arrival.request_id), self.arrival.body)
        with lease:
            self.assumption = self.rooms.index.assume(view.id, blocks, model, self.director.clock())
            answer: Answer | None = None
            try:
                answer = await self.rooms.transport.open(view.id, call)
                if answer.status == REFUSED_BEFORE_WORK and may_pass_on:
                    return False
                await self._relay(answer, lease)
                return True
            finally:
                if self.outcome.ttft is None and not self._is_complete():
                    self._withdraw()
                if answer is not None:
                    await answer.close()

    async def _relay(self, answer: Answer, lease: Booking) -> None:
        def on_content() -> None:
            self.outcome.ttft = self.director.clock() - self.arrival.received
            lease.prefilled()

        self.outcome.status = answer.status
        self.relay = Relay(self.send, self._headers(), on_content)
        await self.relay.run(answer)

    def _withdraw(self) -> None:
        if self.assumption is not None and self.blocks is not None:
            self.rooms.index.withdraw(self.assumption, self.blocks)
            self.assumption = None

    async def _tell(self, problem: HomingError) -> None:
        self.outcome.result = result_of(problem)
        self.outcome.error = self.outcome.error or problem.message
        if not self._has_started():
            self.outcome.status = problem.status
            await answer_error(self.send, problem, self._headers())

    def _is_complete(self) -> bool:
        # An answer may be whole without any content, when the model's first token ends it.
        return self.relay is not None and self.relay.relayed.result == "ok"

    def _has_started(self) -> bool:
        return self.relay is not None and self.relay.has_started

    def _headers(self) -> Headers:
        placement = self.outcome.placement
        return receipt(
            self.arrival.request_id,
            worker=self.outcome.worker,
            reason=None if placement is None else placement.reason.value,
            expected=None if placement is None else placement.winner.expected_tokens,
            attempts=self.outcome.attempts,
        )

    def _lap(self, stage: str, started: float) -> float:
        now = self.director.clock()
        self.outcome.stages[stage] = self.outcome.stages.get(stage, 0.0) + now - started
        return now

    def _settle(self) -> None:
        outcome = self.outcome
        outcome.duration = self.director.clock() - self.arrival.received
        if self.relay is not None:
            relayed = self.relay.relayed
            outcome.usage, outcome.bytes_out = relayed.usage, relayed.bytes_out
            if outcome.result == "internal" and outcome.error is None:
                outcome.result, outcome.error = relayed.result, relayed.error
        if self.assumption is not None and self.blocks is not None:
            self._remember(self.assumption, self.blocks, outcome.usage)
        self.rooms.telemetry.observe(outcome)

    def _remember(self, assumption: A, blocks: Blocks, usage: Usage) -> None:
        known = usage.prompt_tokens
        if known is None and self.prompt is not None:
            known = self.prompt.exact_tokens
        self.rooms.history.learn(blocks, self.outcome.model or "", known, self.outcome.turn)
        self.rooms.index.confirm(assumption, blocks, usage.cached_tokens)


def refuse(refusal: Refusal, model: str, known: frozenset[str], fault: HomingError | None) -> NoReturn:
    """Raises what a refusal means to the client: the fault of the last attempt, if there was one, says more."""
    if fault is not None:
        raise fault
    if refusal.reason is RefusalReason.UNKNOWN_MODEL:
        names = ", ".join(sorted(known))
        raise UnknownModel(f"The model `{model}` does not exist. This fleet serves: {names}.", param="model")
    if known:
        raise NoWorker(f"No worker that serves `{model}` is ready at the moment; try again shortly.")
    raise NoWorker("No worker has joined this fleet yet; start one with `homing-worker join`, or try again shortly.")


def receipt(request_id: str, *, worker: str | None, reason: str | None, expected: int | None, attempts: int) -> Headers:
    """Renders the headers that say what was decided. What was not decided is named so, not zero."""
    return [
        (b"x-request-id", request_id.encode("latin-1")),
        (b"x-homing-worker", (worker or "none").encode()),
        (b"x-homing-reason", (reason or "refused").encode()),
        (b"x-homing-expected-tokens", b"unknown" if expected is None else str(expected).encode()),
        (b"x-homing-attempts", str(attempts).encode()),
    ]


def result_of(problem: HomingError) -> str:
    """Names an error in the closed list of results."""
    if isinstance(problem, ClientFault):
        return "client_error"
    if isinstance(problem, Refused):
        return "refused"
    return "worker_error" if problem.blames_worker or problem.retry_safe else "internal"
