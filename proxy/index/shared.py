"""The memory index with a copy in Redis, one sorted set per incarnation of a worker.

Answers come from memory alone: nothing here waits for Redis but the copying task and the warm start. Writes are
coalesced by block and sent in batches; when Redis was away, each set is written anew from memory after it is back.
Schema: docs/reference/store.md.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from redis.exceptions import RedisError

from ..core.blocks import Blocks, span_at
from .history import History
from .marks import from_member, from_score, to_member, to_score
from .memory import Assumption, Entry, MemoryIndex

if TYPE_CHECKING:
    from redis.asyncio import Redis

LOG = logging.getLogger("homing.index")

# How often the copy follows, seconds. A crash loses at most this much of the view.
FLUSH_SECONDS = 0.2
# A set outlives its last write by a day: long enough for any restart, short enough that nothing stays for ever.
SET_SECONDS = 86_400
# Entries kept per set in Redis; at 64-1024 bytes a block this is far more than an engine's cache holds.
SET_ENTRIES = 262_144
# Entries waiting to be copied before the queue is dropped in favour of writing everything anew.
PENDING_ENTRIES = 500_000
BATCH_ENTRIES = 5_000

RATIOS_KEY = "homing:v1:ratios"


def set_key(worker: str, incarnation: str) -> str:
    """The key of one incarnation's prefix set; the braces keep a worker's keys in one cluster slot."""
    return f"homing:v1:{{{worker}}}:prefixes:{incarnation}"


class SharedIndex(MemoryIndex):
    """A memory index that survives its process."""

    def __init__(
        self, history: History, redis: Redis, wall_clock: Callable[[], float], clock: Callable[[], float]
    ) -> None:
        super().__init__(history)
        self._redis = redis
        self._wall_clock = wall_clock
        self._clock = clock
        self._pending: dict[str, dict[int, int]] = {}
        self._rewrite: set[str] = set()
        self._ended: set[str] = set()
        self._pending_entries = 0
        self.is_degraded = False

    def forget(self, worker: str) -> None:
        """Drops a worker's set, here and in Redis."""
        shelf = self._shelves.get(worker)
        if shelf is not None:
            key = set_key(worker, shelf.incarnation)
            self._ended.add(key)
            self._pending_entries -= len(self._pending.pop(key, ()))
            self._rewrite.discard(worker)
        super().forget(worker)

    def confirm(self, assumption: Assumption, blocks: Blocks, delivered_tokens: int | None) -> int:
        """Corrects the view, and queues the settled prompt for the copy."""
        dropped = super().confirm(assumption, blocks, delivered_tokens)
        if self._live(assumption) is not None:
            if dropped:
                self._rewrite.add(assumption.worker)
            self._queue(assumption, blocks)
        return dropped

    def _queue(self, assumption: Assumption, blocks: Blocks) -> None:
        used = self._wall_clock()
        pending = self._pending.setdefault(set_key(assumption.worker, assumption.incarnation), {})
        before = len(pending)
        for block in blocks.hashes:
            mark = self.history.mark(block)
            if mark is not None:
                pending[block] = to_score(used, *mark)
        self._pending_entries += len(pending) - before
        if self._pending_entries > PENDING_ENTRIES:
            self._pending.clear()
            self._pending_entries = 0
            self._rewrite |= set(self._shelves)

    async def load(self, worker: str) -> int:
        """Fills a fresh shelf from Redis. Returns the number of entries; 0 when Redis has none or is away."""
        shelf = self._shelves.get(worker)
        if shelf is None:
            return 0
        key = set_key(worker, shelf.incarnation)
        now, wall_now = self._clock(), self._wall_clock()
        hashes: list[int] = []
        entries: list[Entry] = []
        with suppress(RedisError, OSError, TimeoutError):
            start = 0
            while True:
                rows = await self._redis.zrange(key, start, start + BATCH_ENTRIES - 1, withscores=True)
                for member, score in cast("list[tuple[bytes, float]]", rows):
                    used, tokens, turn = from_score(score)
                    block = from_member(member)
                    self.history.restore(block, tokens, turn)
                    hashes.append(block)
                    entries.append(Entry(self._size_at(tokens), now - max(wall_now - used, 0.0)))
                if len(rows) < BATCH_ENTRIES:
                    break
                start += BATCH_ENTRIES
        if self._shelves.get(worker) is shelf:
            self.restore(worker, hashes, entries)
        return len(hashes)

    def _size_at(self, tokens: int) -> int:
        """Estimates one block's tokens from the tokens that lead up to its end, which is all that is stored."""
        ratios = list(self.history.ratios().values()) or [self.history.bytes_per_token("")]
        ratio = sum(ratios) / len(ratios)
        return max(round(span_at(round(tokens * ratio)) / ratio), 1)

    async def load_ratios(self) -> None:
        """Takes over the learned bytes per token of each model."""
        with suppress(RedisError, OSError, TimeoutError, ValueError):
            stored = await cast("Awaitable[dict[bytes, bytes]]", self._redis.hgetall(RATIOS_KEY))
            for model, ratio in stored.items():
                self.history.set_ratio(model.decode(), float(ratio))

    def rewrite_all(self) -> None:
        """Orders that every set is written anew: the store was found empty."""
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
            self.rewrite_all()
            if not self.is_degraded:
                LOG.warning(
                    "the store does not take the view (%r); placing from memory, copying when it is back",
                    problem,
                )
            self.is_degraded = True
        else:
            if self.is_degraded:
                LOG.info("the store is back; the view is being written anew")
            self.is_degraded = False

    async def flush(self) -> None:
        """Sends what is pending. Raises what Redis raises; nothing is lost then, since sets are rewritten after."""
        for key in list(self._ended):
            await self._redis.unlink(key)
            self._ended.discard(key)
        for worker in list(self._rewrite):
            await self._write_anew(worker)
            self._rewrite.discard(worker)
        pending, self._pending, self._pending_entries = self._pending, {}, 0
        for key, scores in pending.items():
            await self._add(key, scores)
        if pending:
            ratios = {model: repr(ratio) for model, ratio in self.history.ratios().items()}
            if ratios:
                await self._redis.hset(RATIOS_KEY, mapping=cast("dict[Any, Any]", ratios))

    async def _write_anew(self, worker: str) -> None:
        shelf = self._shelves.get(worker)
        if shelf is None:
            return
        key = set_key(worker, shelf.incarnation)
        offset = self._wall_clock() - self._clock()
        scores = {
            block: to_score(entry.used + offset, *mark)
            for block, entry in shelf.entries.items()
            if (mark := self.history.mark(block)) is not None
        }
        await self._redis.unlink(key)
        await self._add(key, scores)

    async def _add(self, key: str, scores: dict[int, int]) -> None:
        items = list(scores.items())
        for start in range(0, len(items), BATCH_ENTRIES):
            batch = {to_member(block): float(score) for block, score in items[start : start + BATCH_ENTRIES]}
            async with self._redis.pipeline(transaction=False) as pipe:
                pipe.zadd(key, cast("dict[Any, Any]", batch))
                pipe.zremrangebyrank(key, 0, -SET_ENTRIES - 1)
                pipe.expire(key, SET_SECONDS)
                await pipe.execute()
