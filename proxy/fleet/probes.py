"""Asks every engine, again and again: are you there, what do you serve, how busy are you.

A probe is two GETs: `/v1/models` (alive, and which models) and `/metrics` (load, cache shape, start time). An answer
makes a worker ready; a refused connection, or several silent probes in a row, make it suspect.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

import httpx

from ..core.lifecycle import Event, State
from .exposition import EnginePage, read_page
from .registry import EngineLoad, Facts, Registry, Source, Worker
from .verify import Verification

LOG = logging.getLogger("homing.fleet")
T = TypeVar("T")

READY_SECONDS, WAITING_SECONDS = 2.0, 0.5  # between probes of a ready worker, and of one that is not
TICK_SECONDS = 0.25
TIMEOUT_SECONDS = 5.0
# A busy engine may answer late; this many silent probes in a row are no longer lateness.
SILENT_PROBES = 3
# Seconds until a worker that failed its verification is tried again; doubled each time.
FIRST_PAUSE, LONGEST_PAUSE = 2.0, 60.0


class Prober:
    """Probes the registry's workers until cancelled.

    Args:
        registry: the live set.
        client: for the probes.
        clock: a steady clock, seconds.
        warm: called before a joining worker becomes ready, to load what it is known to hold.
        verify: judges a joining worker after that; None takes every one that answers.
    """

    def __init__(
        self,
        registry: Registry,
        client: httpx.AsyncClient,
        clock: Callable[[], float],
        warm: Callable[[Worker], Awaitable[None]],
        verify: Callable[[Worker], Awaitable[Verification]] | None = None,
    ) -> None:
        self._registry = registry
        self._client = client
        self._clock = clock
        self._warm = warm
        self._verify = verify
        self._held_until: dict[str, float] = {}
        self._pauses: dict[str, float] = {}
        self._due: dict[str, float] = {}
        self._silent: dict[str, int] = {}
        self._running: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Starts due probes; one that hangs delays no other. Ends leases that have run out."""
        try:
            while True:
                now = self._clock()
                for worker in self._registry.expire(now):
                    LOG.warning("worker %s: its lease ran out; it left the fleet", worker.id)
                for worker in self._registry:
                    if worker.id not in self._running and self._due.get(worker.id, 0.0) <= now:
                        task = asyncio.create_task(self.probe(worker))
                        self._running[worker.id] = task
                        task.add_done_callback(partial(self._ended, worker.id))
                await asyncio.sleep(TICK_SECONDS)
        finally:
            for task in list(self._running.values()):
                task.cancel()

    def _ended(self, worker_id: str, task: asyncio.Task[None]) -> None:
        self._running.pop(worker_id, None)
        if not task.cancelled() and task.exception() is not None:
            LOG.error("worker %s: its probe failed in an unforeseen way", worker_id, exc_info=task.exception())
            self._due[worker_id] = self._clock() + READY_SECONDS

    def hurry(self, worker_id: str) -> None:
        """Makes the next probe of a worker due at once, and its verification too: another life is another chance."""
        for notes in (self._due, self._held_until, self._pauses):
            notes.pop(worker_id, None)

    async def probe(self, worker: Worker) -> None:
        """Probes one worker and moves it along its life."""
        incarnation = worker.incarnation
        try:
            facts, page = await self._ask(worker)
        except (httpx.HTTPError, ValueError) as problem:
            self._missed(worker, problem)
        else:
            if self._registry.get(worker.id) is worker and worker.incarnation == incarnation:
                await self._answered(worker, facts, page)
        pause = READY_SECONDS if worker.state is State.READY else WAITING_SECONDS
        self._due[worker.id] = self._clock() + pause

    async def is_alive(self, worker: Worker) -> bool:
        """Asks one worker whether it answers at all."""
        try:
            return (await self._client.get(f"{worker.url}/v1/models")).is_success
        except httpx.HTTPError:
            return False

    async def _ask(self, worker: Worker) -> tuple[Facts, EnginePage]:
        answer = await self._client.get(f"{worker.url}/v1/models")
        answer.raise_for_status()
        models = models_of(answer.json())
        page = await self._client.get(f"{worker.url}/metrics")
        read = read_page(page.text if page.is_success else "")
        version = worker.facts.version
        if version is None:
            version = version_of(await self._client.get(f"{worker.url}/version"))
        known = worker.facts
        facts = Facts(
            version=version,
            models=models,
            block_tokens=first_known(read.block_tokens, known.block_tokens),
            capacity_tokens=first_known(read.capacity_tokens, known.capacity_tokens),
            prefix_caching=first_known(read.prefix_caching, known.prefix_caching),
            kv_cache_dtype=first_known(read.kv_cache_dtype, known.kv_cache_dtype),
        )
        return facts, read

    async def _answered(self, worker: Worker, facts: Facts, page: EnginePage) -> None:
        self._silent.pop(worker.id, None)
        before = worker.state
        if worker.source is Source.STATIC and page.started is not None and page.started != worker.incarnation:
            self._registry.restarted(worker, page.started)
        worker.load = page.load
        self._registry.learned(worker, facts)
        incarnation = worker.incarnation
        if facts.model_ids:
            if worker.state is State.JOINING:
                await self._warm(worker)
                if not await self._is_fit(worker):
                    return
            if worker.incarnation == incarnation:  # warming takes a while: it was this life that answered
                self._registry.apply(worker, Event.PROBED)
        if worker.state is not before:
            LOG.info(
                "worker %s: %s, serves %s",
                worker.id,
                worker.state,
                ", ".join(sorted(facts.model_ids)) or "nothing",
            )

    async def _is_fit(self, worker: Worker) -> bool:
        """Verifies a life of a worker that has not been, now and then while it fails."""
        if self._verify is None or worker.is_verified:
            return True
        if self._clock() < self._held_until.get(worker.id, 0.0):
            return False
        verification = await self._verify(worker)
        if verification.incarnation != worker.incarnation:
            return False  # it was another life that was probed
        worker.verification = verification
        if verification.passed:
            self._pauses.pop(worker.id, None)
            return True
        pause = self._pauses[worker.id] = min(self._pauses.get(worker.id, FIRST_PAUSE / 2) * 2, LONGEST_PAUSE)
        self._held_until[worker.id] = self._clock() + pause
        LOG.warning("worker %s is held out: %s; next try in %g s", worker.id, verification.reason, pause)
        return False

    def _missed(self, worker: Worker, problem: Exception) -> None:
        silent = self._silent[worker.id] = self._silent.get(worker.id, 0) + 1
        worker.load = EngineLoad()
        if isinstance(problem, httpx.ConnectError) or silent >= SILENT_PROBES:
            if worker.state is State.READY:
                LOG.warning("worker %s: no answer to its probe (%r); nothing more is placed on it", worker.id, problem)
            self._registry.apply(worker, Event.FAILED)


def models_of(answer: object) -> tuple[dict[str, object], ...]:
    """Reads the answer of `/v1/models`.

    Raises:
        ValueError: it is not of that form.
    """
    data = answer.get("data") if isinstance(answer, dict) else None
    if isinstance(data, list):
        return tuple(model for model in data if isinstance(model, dict))
    raise ValueError("/v1/models did not answer with a list of models")


def version_of(answer: httpx.Response) -> str | None:
    """Reads the answer of `/version`; None when it does not say, which is no fault."""
    try:
        told = answer.json() if answer.is_success else None
    except ValueError:
        return None
    version = told.get("version") if isinstance(told, dict) else None
    return version if isinstance(version, str) else None


def first_known(told: T | None, known: T | None) -> T | None:
    """Returns what was told just then, else what was known."""
    return known if told is None else told
