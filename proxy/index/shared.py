"""The memory index with a copy in Redis: one hash per incarnation of a worker, one field per run.

Answers come from memory alone: nothing here waits for Redis but the copying task and the warm start. Changes are
coalesced by run and sent in batches; when Redis was away, everything is sent again from memory after it is back. A hash
may be written by several proxies, so a write adds and removes runs, and never replaces what another one wrote.
Schema: docs/reference/store.md.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from redis.exceptions import RedisError

from .memory import Assumption, MemoryIndex, Shelf
from .records import Record, pack_key, unpack
from .tree import Run

if TYPE_CHECKING:
    from redis.asyncio import Redis

LOG = logging.getLogger("homing.index")

# How often the copy follows, seconds. A crash loses at most this much of the view.
FLUSH_SECONDS = 0.2
# A hash outlives its last write by a day: long enough for any restart, short enough that nothing stays for ever.
SET_SECONDS = 86_400
# Runs waiting to be copied before the queue is dropped in favour of writing everything again.
PENDING_RUNS = 100_000
BATCH_RUNS = 1_000

RATIOS_KEY = "homing:v1:ratios"


def set_key(worker: str, incarnation: str) -> str:
    """The key of one incarnation's prefix set; the braces keep a worker's keys in one cluster slot."""
    return f"homing:v1:{{{worker}}}:prefixes:{incarnation}"


class SharedIndex(MemoryIndex):
    """A memory index that survives its process."""

    def __init__(self, redis: Redis, wall_clock: Callable[[], float], clock: Callable[[], float]) -> None:
        super().__init__()
        self._redis = redis
        self._wall_clock = wall_clock
        self._clock = clock
        # By worker: runs to be written, and names of runs to be removed.
        self._changed: dict[str, dict[Run, None]] = {}
        self._removed: dict[str, set[int]] = {}
        self._stored: dict[str, set[int]] = {}
        self._rewrite: set[str] = set()
        self._ended: set[str] = set()
        self.is_degraded = False

    def forget(self, worker: str) -> None:
        """Drops a worker's set, here and in Redis."""
        shelf = self._shelves.get(worker)
        if shelf is not None:
            self._ended.add(set_key(worker, shelf.incarnation))
        super().forget(worker)

    def suspend(self, worker: str) -> None:
        """Closes a worker's shelf; what is in Redis stays."""
        super().suspend(worker)
        for notes in (self._changed, self._removed, self._stored):
            notes.pop(worker, None)
        self._rewrite.discard(worker)

    def confirm(
        self, assumption: Assumption, prompt_tokens: int | None, delivered_tokens: int | None, turn: int
    ) -> int:
        """Corrects the view, and queues the settled prompt for the copy."""
        gone = super().confirm(assumption, prompt_tokens, delivered_tokens, turn)
        shelf = assumption.shelf
        if self._is_live(shelf):
            self._queue_path(shelf, assumption.tip)
        return gone

    def _queue_path(self, shelf: Shelf, tip: Run) -> None:
        changed = self._changed.setdefault(shelf.worker, {})
        stored = self._stored.setdefault(shelf.worker, set())
        run: Run | None = tip
        while run is not None and (run is tip or run.key not in stored):
            if run in shelf.used:
                changed[run] = None
                stored.add(run.key)
            run = run.parent
        if len(changed) > PENDING_RUNS:
            changed.clear()
            self._rewrite.add(shelf.worker)

    def _drop(self, shelf: Shelf, run: Run) -> None:
        super()._drop(shelf, run)
        stored = self._stored.get(shelf.worker)
        if stored is not None and run.key in stored:
            stored.discard(run.key)
            self._removed.setdefault(shelf.worker, set()).add(run.key)

    def _was_split(self, head: Run, tail: Run) -> None:
        super()._was_split(head, tail)
        for shelf in self._holders_of(head):
            if tail.key in self._stored.get(shelf.worker, ()):
                self._queue_path(shelf, tail)

    async def load(self, worker: str) -> int:
        """Fills a fresh shelf from Redis. Returns the number of blocks; 0 when Redis has none or is away."""
        shelf = self._shelves.get(worker)
        if shelf is None:
            return 0
        records: list[Record] = []
        with suppress(RedisError, OSError, TimeoutError):
            async for name, value in self._redis.hscan_iter(set_key(worker, shelf.incarnation), count=BATCH_RUNS):
                record = unpack(cast("bytes", name), cast("bytes", value))
                if record is not None:
                    records.append(record)
        return self._take_back(shelf, records) if self._shelves.get(worker) is shelf else 0

    def _take_back(self, shelf: Shelf, records: list[Record]) -> int:
        """Puts stored runs on a shelf, parents before those that continue them. Orphans are left out."""
        waiting: dict[int | None, list[Record]] = {}
        blocks_of = {block: record.key for record in records for block in record.blocks[:-1]}
        names = {record.key for record in records}
        for record in records:
            parent = record.parent
            # Another proxy may have cut a run that this one's record continues in the middle.
            waiting.setdefault(
                parent if parent in names or parent is None else blocks_of.get(parent, parent), []
            ).append(record)
        offset = self._clock() - self._wall_clock()
        before = shelf.held_blocks
        ready = waiting.pop(None, [])
        while ready:
            record = ready.pop()
            parent_run = None if record.parent is None else self.at(record.parent)
            tip = self.graft(parent_run, record.blocks, record.end_bytes, record.end_tokens)
            tip.turn = max(tip.turn, record.turn)
            self._hold_path(shelf, tip, min(record.used + offset, self._clock()))
            ready += waiting.pop(record.key, [])
        self._reorder(shelf)
        self._trim(shelf)
        self._stored[shelf.worker] = {run.key for run in shelf.used}
        return shelf.held_blocks - before

    def _hold_path(self, shelf: Shelf, tip: Run, used: float) -> None:
        path = []
        run: Run | None = tip
        while run is not None and run not in shelf.used:
            path.append(run)
            run = run.parent
        for run in reversed(path):
            self._hold(shelf, run, used)
        while run is not None and shelf.used[run] < used:
            shelf.used[run] = used
            run = run.parent

    async def load_ratios(self) -> None:
        """Takes over the learned bytes per token of each model."""
        with suppress(RedisError, OSError, TimeoutError, ValueError):
            stored = await cast("Awaitable[dict[bytes, bytes]]", self._redis.hgetall(RATIOS_KEY))
            for model, ratio in stored.items():
                self.set_ratio(model.decode(), float(ratio))

    def rewrite_all(self) -> None:
        """Orders that all that is held is written again: the store was found empty, or was away."""
        self._rewrite |= set(self._shelves)

    async def run(self) -> None:
        """Copies changes until cancelled; what is pending then is written once more, if Redis answers."""
        try:
            while True:
                await asyncio.sleep(FLUSH_SECONDS)
                await self._try_flush()
        finally:
            await self._try_flush()

    async def _try_flush(self) -> None:
        try:
            await self.flush()
        except (RedisError, OSError, TimeoutError) as problem:
            if not self.is_degraded:
                LOG.warning(
                    "the store does not take the view (%r); placing from memory, copying when it is back", problem
                )
            self.is_degraded = True
        else:
            if self.is_degraded:
                LOG.info("the store is back; what is held has been written again")
            self.is_degraded = False

    async def flush(self) -> None:
        """Sends what is pending. Raises what Redis raises; what was not sent is written again from memory later."""
        try:
            await self._flush()
        except BaseException:  # a cancellation in the middle, too
            self.rewrite_all()
            raise

    async def _flush(self) -> None:
        for key in list(self._ended):
            await self._redis.unlink(key)
            self._ended.discard(key)
        rewrite, self._rewrite = self._rewrite, set()
        for worker in rewrite:
            shelf = self._shelves.get(worker)
            if shelf is not None:
                self._changed[worker] = dict.fromkeys(shelf.used)
                self._stored[worker] = {run.key for run in shelf.used}
        is_changed = bool(self._changed)
        for worker in {*self._changed, *self._removed}:
            changed, removed = self._changed.pop(worker, {}), self._removed.pop(worker, set())
            shelf = self._shelves.get(worker)
            if shelf is not None:
                await self._write(shelf, changed, removed)
        if is_changed:
            ratios = {model: repr(ratio) for model, ratio in self.ratios().items()}
            if ratios:
                await self._redis.hset(RATIOS_KEY, mapping=cast("dict[Any, Any]", ratios))

    async def _write(self, shelf: Shelf, changed: dict[Run, None], removed: set[int]) -> None:
        key = set_key(shelf.worker, shelf.incarnation)
        offset = self._wall_clock() - self._clock()
        fields: dict[bytes, bytes] = {}
        for run in changed:
            used = shelf.used.get(run)
            if used is not None:
                parent = None if run.parent is None else run.parent.key
                record = Record(parent, used + offset, run.end_bytes, run.end_tokens, run.turn, run.blocks)
                fields[pack_key(run.key)] = record.pack()
        gone = [pack_key(name) for name in removed if pack_key(name) not in fields]
        items = list(fields.items())
        for start in range(0, max(len(items), 1), BATCH_RUNS):
            batch = dict(items[start : start + BATCH_RUNS])
            async with self._redis.pipeline(transaction=False) as pipe:
                if batch:
                    pipe.hset(key, mapping=cast("dict[Any, Any]", batch))
                if gone and not start:
                    pipe.hdel(key, *cast("list[Any]", gone))
                pipe.expire(key, SET_SECONDS)
                await pipe.execute()
