"""The composition root: settings in, ASGI application out. The only file that knows every room."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import random
import re
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import httpx
import redis.asyncio as redis_client
from redis.backoff import NoBackoff
from redis.retry import Retry
from xxhash import xxh3_64_hexdigest

from .core.lifecycle import Event, State
from .edge.admin import WORKER_ID, Access, Registration, make_admin
from .edge.api import Api
from .edge.director import Director, Rooms
from .edge.door import make_protocol
from .edge.guard import Guard
from .edge.networks import PRIVATE, read_url
from .edge.ports import Outcome
from .edge.upstream.limits import Limits
from .edge.upstream.wire import WireTransport
from .errors import HomingError, StartError
from .fleet.membership import Membership
from .fleet.probes import Prober
from .fleet.registry import Registry, Source, Worker
from .fleet.store import FleetStore
from .fleet.verify import Verifier
from .index.shared import SharedIndex
from .telemetry.logs import RequestLog
from .telemetry.metrics import Gauge, Metrics

if TYPE_CHECKING:
    from fastapi import FastAPI
    from redis.asyncio import Redis

    from .edge.asgi import App
    from .settings import Settings

LOG = logging.getLogger("homing")

# No command to the store may hang: what waits longer than this counts as away.
STORE_SECONDS = 2.0
WARM_SECONDS = 5.0
# What a background task has for its last words, before it is told again to end.
END_SECONDS = 0.5


class Homing:
    """One proxy: the rooms, wired. Also the desk of the control plane.

    Args:
        settings: all of them.
        store_url: where Redis is, resolved (never `embedded`).
    """

    def __init__(self, settings: Settings, store_url: str) -> None:
        clock = time.monotonic
        self.redis = connect(store_url)
        seed = None if settings.fleet_seed is None else int(settings.fleet_seed.get_secret_value())
        self.registry = Registry()
        self.index = SharedIndex(self.redis, time.time, clock)
        self.store = FleetStore(self.registry, self.redis, clock, seed)
        self.client = httpx.AsyncClient(timeout=5.0, trust_env=False)
        self.prober = Prober(
            self.registry,
            self.client,
            clock,
            self._warm,
            Verifier(self.client, clock).verify if settings.verify else None,
        )
        self.membership = Membership(self.registry, self.store, self.prober.is_alive, clock)
        self.transport = WireTransport(
            Limits(settings.connect_timeout, settings.first_byte_timeout, settings.idle_timeout)
        )
        self.exporter = Metrics()
        self.request_log = RequestLog(settings.log_format, settings.log_level)
        self.exporter.watch(self._gauges)
        self.registry.listen(self._on_event)
        self.store.on_emptied = self.index.rewrite_all
        self.store.on_reseeded = self._on_reseeded
        self._static = static_workers(settings.worker)
        rooms = Rooms(self.registry, self.index, self.transport, self)
        self.director = Director(rooms, clock, random.Random(), lambda: self.store.seed)
        self.protocol = make_protocol(self.director, clock, settings.max_body_bytes)
        self.application: App = Guard(
            Api(self.director, make_admin(self, access_of(settings), self.lifespan), settings.max_body_bytes),
            clock,
        )

    @asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        """Starts the background tasks, and ends them in the order in which nothing is lost."""
        for worker in self._static:
            self.registry.upsert(worker)
        if await self.store.try_sync():
            await self.index.load_ratios()
        tasks = [asyncio.create_task(job()) for job in (self.store.run, self.index.run, self.prober.run)]
        for task in tasks:
            task.add_done_callback(report_crash)
        try:
            yield
        finally:
            await end_all(tasks)
            await self.transport.close()
            await self.client.aclose()
            await self.redis.aclose()
            self.request_log.flush()

    async def _warm(self, worker: Worker) -> None:
        try:
            async with asyncio.timeout(WARM_SECONDS):
                entries = await self.index.load(worker.id)
        except TimeoutError:
            LOG.warning("worker %s: the store was too slow to say what it holds; it starts cold here", worker.id)
        else:
            if entries:
                LOG.info("worker %s: warm, %d blocks known", worker.id, entries)

    def _on_event(self, worker: Worker, event: Event) -> None:
        if event is Event.REMOVED:
            self.index.forget(worker.id)
        elif event is Event.LAPSED:
            self.index.suspend(worker.id)
        elif event in (Event.RESTARTED, Event.PROBED):
            self.index.begin(worker.id, worker.incarnation, worker.facts.capacity_tokens)
        if event is Event.RESTARTED:
            self.prober.hurry(worker.id)

    def _on_reseeded(self) -> None:
        for worker in self.registry:
            self.index.suspend(worker.id)
            self.registry.restarted(worker, worker.incarnation)

    def observe(self, outcome: Outcome) -> None:
        """Takes in one settled request: the metrics, then the log line."""
        self.exporter.observe(outcome)
        self.request_log.observe(outcome)

    async def register(self, registration: Registration) -> dict[str, object]:
        """See Membership."""
        return await self.membership.register(registration)

    def heartbeat(self, worker_id: str, incarnation: str) -> dict[str, object]:
        """See Membership."""
        return self.membership.heartbeat(worker_id, incarnation)

    def drain(self, worker_id: str, incarnation: str) -> dict[str, object]:
        """See Membership."""
        return self.membership.drain(worker_id, incarnation)

    def operate(self, worker_id: str, event: Event) -> dict[str, object]:
        """See Membership."""
        return self.membership.operate(worker_id, event)

    async def expel(self, worker_id: str) -> None:
        """See Membership."""
        await self.membership.expel(worker_id)

    async def remove(self, worker_id: str, incarnation: str) -> None:
        """See Membership."""
        await self.membership.remove(worker_id, incarnation)

    def workers(self) -> list[dict[str, object]]:
        """Renders the fleet, with what each worker is believed to hold."""
        held = self.index.shelf_sizes()
        rows = []
        for worker in self.registry:
            blocks, tokens = held.get(worker.id, (0, 0))
            rows.append(worker.report() | {"view": {"blocks": blocks, "tokens": tokens}})
        return rows

    def models(self) -> list[dict[str, object]]:
        """Returns each model once, as the first ready worker that serves it describes it."""
        union: dict[str, dict[str, object]] = {}
        for worker in self.registry:
            if worker.state is State.READY:
                for model in worker.facts.models:
                    union.setdefault(str(model.get("id")), model)
        return list(union.values())

    def readiness(self) -> dict[str, object]:
        """Tells whether requests can be placed, and why not; a store that is away is named but does not matter."""
        states = [worker.state.value for worker in self.registry]
        ready = states.count(State.READY.value)
        reasons = [] if ready else [f"no worker is ready ({', '.join(sorted(states)) or 'none has joined'})"]
        store = "degraded" if self.store.is_degraded or self.index.is_degraded else "ok"
        return {"ready": bool(ready), "reasons": reasons, "workers_ready": ready, "store": store}

    def metrics(self) -> tuple[bytes, str]:
        """Renders the exposition."""
        return self.exporter.render()

    def _gauges(self) -> Iterator[Gauge]:
        workers = list(self.registry)
        states = [worker.state for worker in workers]
        held = self.index.shelf_sizes()
        yield Gauge(
            "homing_inflight_requests",
            "Requests leased to a worker and not yet settled.",
            ("worker",),
            tuple(((worker.id,), worker.inflight) for worker in workers),
        )
        yield Gauge(
            "homing_pending_tokens",
            "Uncached prompt tokens booked on a worker and not yet prefilled.",
            ("worker",),
            tuple(((worker.id,), worker.pending_tokens) for worker in workers),
        )
        yield Gauge(
            "homing_workers",
            "Workers by state.",
            ("state",),
            tuple(((state.value,), states.count(state)) for state in State if state is not State.GONE),
        )
        yield Gauge(
            "homing_index_blocks",
            "Blocks that a worker is believed to hold.",
            ("worker",),
            tuple(((worker,), blocks) for worker, (blocks, _) in held.items()),
        )
        degraded = float(self.store.is_degraded or self.index.is_degraded)
        yield Gauge("homing_store_degraded", "1 while the store does not answer.", (), (((), degraded),))


def connect(store_url: str) -> Redis:
    """Builds the client of the store; no connection is made yet.

    Raises:
        StartError: the URL cannot be read.
    """
    try:
        return redis_client.from_url(
            store_url,
            socket_timeout=STORE_SECONDS,
            socket_connect_timeout=STORE_SECONDS,
            retry=Retry(NoBackoff(), 0),
        )
    except ValueError as problem:
        raise StartError(f"--store-url: {problem}; give redis://HOST:PORT/DB, rediss://… or unix://PATH", 2) from None


def static_workers(named: tuple[str, ...]) -> list[Worker]:
    """Builds the workers of the command line: URL, or NAME=URL.

    Without a name the id is made from the URL's hash: headers and labels show ids, and an address is nobody's business.

    Raises:
        StartError: one is not a base URL, or has no fit name of its own.
    """
    workers: dict[str, Worker] = {}
    for item in named:
        name, separator, url = item.partition("=")
        if not separator or "/" in name:
            name, url = "", item
        try:
            url = read_url(url)
        except HomingError as problem:
            raise StartError(f"--worker {item!r}: {problem.message}", 2) from None
        worker_id = name or f"w-{xxh3_64_hexdigest(url.encode())[:8]}"
        if not re.fullmatch(WORKER_ID, worker_id):
            raise StartError(f"--worker {item!r}: a name has 1 to 64 letters, digits, dots, dashes or underscores", 2)
        if worker_id in workers:
            raise StartError(f"--worker {item!r}: this {'name' if name else 'URL'} is given twice", 2)
        # Until the first probe tells when the engine began, its life has no name that outlasts this process.
        workers[worker_id] = Worker(worker_id, url, f"unprobed-{random.getrandbits(64):016x}", Source.STATIC)
    return list(workers.values())


def access_of(settings: Settings) -> Access:
    """Takes the secrets and networks out of the settings."""
    token, key = settings.join_token, settings.admin_key
    networks = [ipaddress.ip_network(item) for item in settings.worker_network]
    return Access(
        None if token is None else token.get_secret_value(),
        None if key is None else key.get_secret_value(),
        (*PRIVATE, *networks),
    )


async def end_all(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancels tasks until they have ended: Python 3.11 can lose one in `asyncio.wait_for`, which redis uses."""
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=END_SECONDS)


def report_crash(task: asyncio.Task[None]) -> None:
    """Says so when a background task ends by itself: it never should."""
    if not task.cancelled() and task.exception() is not None:
        LOG.error("a background task has stopped", exc_info=task.exception())
