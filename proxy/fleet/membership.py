"""What workers may ask of the fleet: register, heartbeat, drain, leave."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from ..core.lifecycle import Event
from ..errors import BadRequest, Conflict, NotFound
from .registry import Registry, Source, Worker
from .store import LEASE_SECONDS, FleetStore, facts_from_json

LOG = logging.getLogger("homing.fleet")

# A lease outlives two lost heartbeats.
HEARTBEAT_SECONDS = LEASE_SECONDS / 3


class Registration(Protocol):
    """A checked registration."""

    id: str
    url: str
    incarnation: str
    identity: dict[str, Any]
    engine: dict[str, Any]


class Membership:
    """Lets workers in and out.

    Args:
        registry: the live set.
        store: where members are kept for other proxies and for a restart.
        is_alive: asks whether the engine of a worker answers.
        clock: a steady clock, seconds.
    """

    def __init__(
        self,
        registry: Registry,
        store: FleetStore,
        is_alive: Callable[[Worker], Awaitable[bool]],
        clock: Callable[[], float],
    ) -> None:
        self._registry = registry
        self._store = store
        self._is_alive = is_alive
        self._clock = clock

    async def register(self, registration: Registration) -> dict[str, object]:
        """Takes a worker in.

        Raises:
            BadRequest: the engine's part cannot be read.
            Conflict: a living worker has the id already, at another address.
        """
        try:
            facts = facts_from_json(registration.engine)
        except ValueError as problem:
            raise BadRequest(str(problem), param="engine") from None
        known = self._registry.get(registration.id)
        if known is not None and (known.url != registration.url or known.source is Source.STATIC):
            await self._check_free(known)
        worker = self._registry.upsert(
            Worker(
                id=registration.id,
                url=registration.url,
                incarnation=registration.incarnation,
                source=Source.REGISTERED,
                identity=registration.identity,
                facts=facts,
                lease_until=self._clock() + LEASE_SECONDS,
            )
        )
        self._store.vouch(worker)
        LOG.info("worker %s registered: %s", worker.id, worker.hardware or "hardware unknown")
        return {"id": worker.id, "heartbeat_seconds": HEARTBEAT_SECONDS, "lease_seconds": LEASE_SECONDS}

    async def _check_free(self, known: Worker) -> None:
        if known.source is Source.STATIC or await self._is_alive(known):
            raise Conflict(
                f"the id {known.id!r} belongs to another worker that is alive; register under another id",
                param="id",
            )

    def heartbeat(self, worker_id: str, incarnation: str) -> dict[str, object]:
        """Prolongs a worker's lease."""
        worker = self._find(worker_id, incarnation)
        worker.lease_until = self._clock() + LEASE_SECONDS
        self._store.vouch(worker)
        return {"lease_seconds": LEASE_SECONDS, "state": worker.state.value}

    def drain(self, worker_id: str, incarnation: str) -> dict[str, object]:
        """Ends placements on a worker and says what is still running there."""
        return self._move(self._find(worker_id, incarnation), Event.DRAIN)

    async def remove(self, worker_id: str, incarnation: str) -> None:
        """Forgets a worker and all it held."""
        await self._remove(self._find(worker_id, incarnation))

    def operate(self, worker_id: str, event: Event) -> dict[str, object]:
        """Does an operator's will with a worker of either kind: cordon, uncordon or drain it."""
        return self._move(self._any(worker_id), event)

    async def expel(self, worker_id: str) -> None:
        """Removes a worker by an operator's will. One that goes on registering comes back."""
        await self._remove(self._any(worker_id))

    def _move(self, worker: Worker, event: Event) -> dict[str, object]:
        before = worker.state
        self._registry.apply(worker, event)
        if worker.state is not before:
            self._store.vouch(worker)
            LOG.info("worker %s: %s, %d in flight", worker.id, worker.state.value, worker.inflight)
        return {"id": worker.id, "state": worker.state.value, "inflight": worker.inflight}

    async def _remove(self, worker: Worker) -> None:
        self._registry.apply(worker, Event.REMOVED)
        await self._store.remove(worker.id)
        LOG.info("worker %s left", worker.id)

    def _any(self, worker_id: str) -> Worker:
        worker = self._registry.get(worker_id)
        if worker is None:
            raise NotFound(f"there is no worker {worker_id!r}; GET /workers lists the fleet")
        return worker

    def _find(self, worker_id: str, incarnation: str) -> Worker:
        worker = self._registry.get(worker_id)
        if worker is None or worker.source is Source.STATIC:
            raise NotFound(f"there is no registered worker {worker_id!r}; register it with POST /workers")
        if worker.incarnation != incarnation:
            raise Conflict(f"worker {worker_id!r} is in another incarnation by now; register again")
        return worker
