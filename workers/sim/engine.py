"""The running engine: steps on a clock, and answers as they come.

One task plans a step, waits until it is over and hands out its tokens; when there is nothing to do it sleeps without
a timer. Every delay is a GPU's seconds divided by the time scale.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from workers.sim.cache import PrefixCache
from workers.sim.exposition import Gauges, Meters
from workers.sim.scheduler import Limits, Scheduler, Sequence
from workers.sim.speed import Speed
from workers.sim.text import Answer, Prompt

_LONGEST_LAG_SECONDS = 0.05
"""How far the steps' own timeline may lie behind the clock before lost time is given up: timers wake up late by a
millisecond or so, which would otherwise slow every scaled step down."""


class Clock(Protocol):
    """Time as the engine sees it, in seconds."""

    def now(self) -> float:
        """Returns a time that never goes back."""

    async def sleep(self, seconds: float) -> None:
        """Waits; with zero, only lets others run."""


class WallClock:
    """The clock on the wall."""

    def now(self) -> float:
        """Returns the monotonic time."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Waits on the event loop."""
        await asyncio.sleep(seconds)


@dataclass(frozen=True, slots=True)
class Draft:
    """A request as the wire hands it in; `root` separates caches by model and salt."""

    root: bytes
    prompt: Prompt
    answer: Answer
    limits: Limits


@dataclass(slots=True, eq=False)
class Generation:
    """A reader's end of one request."""

    sequence: Sequence
    changed: asyncio.Event

    async def batches(self) -> AsyncIterator[list[str]]:
        """Yields the texts of new tokens until the request ends; several at once when the reader was slow."""
        sequence = self.sequence
        while True:
            await self.changed.wait()
            self.changed.clear()
            finished = sequence.finish_reason is not None
            if sequence.outbox or finished:
                batch, sequence.outbox = sequence.outbox, []
                yield batch
            if finished:
                return


class Engine:
    """Computes requests, one step after another."""

    def __init__(
        self, scheduler: Scheduler, cache: PrefixCache, meters: Meters, clock: Clock, time_scale: float
    ) -> None:
        self._scheduler = scheduler
        self._meters = meters
        self._clock = clock
        self._time_scale = time_scale
        self._work = asyncio.Event()
        meters.watch(Gauges(self._count_running, self._count_waiting, lambda: cache.used / cache.num_blocks))

    def submit(self, draft: Draft) -> Generation:
        """Queues a request: ready after the host's own work on it."""
        now = self._clock.now()
        changed = asyncio.Event()
        sequence = Sequence(
            root=draft.root,
            prompt=draft.prompt,
            limits=draft.limits,
            answer=draft.answer,
            arrived_at=now,
            ready_at=now + Speed.base_seconds / self._time_scale,
            on_change=changed.set,
        )
        self._scheduler.submit(sequence)
        self._work.set()
        return Generation(sequence, changed)

    def abort(self, generation: Generation) -> None:
        """Ends a request whose client has gone; its blocks are free at once."""
        self._scheduler.abort(generation.sequence)

    def shut_down(self) -> None:
        """Ends every request with `abort`, as vLLM does when it is told to stop."""
        for sequence in (*self._scheduler.running, *self._scheduler.waiting):
            self._scheduler.abort(sequence)

    async def run(self) -> None:
        """Computes until cancelled."""
        moment = self._clock.now()
        while True:
            moment = max(moment, self._clock.now() - _LONGEST_LAG_SECONDS)
            step = self._scheduler.plan(moment)
            if step is None:
                moment = await self._rest()
                continue
            for sequence in step.admitted:
                self._meters.note_admitted(sequence)
            self._meters.note_preempted(step.preempted)
            moment += step.seconds / self._time_scale
            await self._clock.sleep(max(moment - self._clock.now(), 0.0))
            self._hand_out(self._scheduler.settle(step, moment), moment)

    async def _rest(self) -> float:
        """Waits for work; returns the moment at which it is there."""
        waiting = self._scheduler.waiting
        if not waiting:
            self._work.clear()
            await self._work.wait()
            return self._clock.now()
        ready_at = waiting[0].ready_at
        await self._clock.sleep(max(ready_at - self._clock.now(), 0.0))
        return ready_at

    def _hand_out(self, served: list[Sequence], now: float) -> None:
        """Counts what a step yielded; the readers have been woken by the scheduler."""
        self._meters.note_served(len(served))
        for sequence in served:
            if sequence.emitted == 1:
                self._meters.note_first_token(sequence, now)
            if sequence.finish_reason is not None:
                self._meters.note_finished(sequence, now)

    def _count_running(self) -> int:
        """Counts requests that wait for nobody: also those the host still works on."""
        return len(self._scheduler.running) + len(self._scheduler.waiting) - self._count_waiting()

    def _count_waiting(self) -> int:
        now = self._clock.now()
        return sum(sequence.ready_at <= now for sequence in self._scheduler.waiting)
