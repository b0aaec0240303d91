"""The fleet in Redis: one hash per worker, alive as long as its lease, told by the store's own clock.

The set is reconciled, not logged: every few seconds this process writes the workers that it vouches for and takes in
those that others wrote. So a store that was flushed or away fills again by itself, and no request ever waits for it.
Schema: docs/reference/store.md.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from redis.exceptions import RedisError

from ..core.lifecycle import Event, State
from .registry import Facts, Registry, Source, Worker
from .verify import read_verification

if TYPE_CHECKING:
    from redis.asyncio import Redis

LOG = logging.getLogger("homing.fleet")

SYNC_SECONDS = 2.0
LEASE_SECONDS = 10.0
FLEET_KEY = "homing:v1:fleet"
SEED_KEY = "homing:v1:seed"


def worker_key(worker_id: str) -> str:
    """The key of a worker's hash; the braces keep a worker's keys in one cluster slot."""
    return f"homing:v1:{{{worker_id}}}:worker"


class FleetStore:
    """Keeps a registry and Redis in step.

    Args:
        registry: the live set.
        redis: the client.
        clock: a steady clock, seconds.
        seed: the fleet's hash seed if one is configured; else the stored one, else a new one, is used.

    `seed` may change once the store is reached, and then `on_reseeded` is called: hashes made before are void.
    `on_emptied` is called when the store was found to have lost its content.
    """

    def __init__(self, registry: Registry, redis: Redis, clock: Callable[[], float], seed: int | None) -> None:
        self._registry = registry
        self._redis = redis
        self._clock = clock
        self._vouched: dict[str, float] = {}
        self._is_seed_given = seed is not None
        self._is_seed_agreed = False
        self.on_emptied: Callable[[], None] = lambda: None
        self.on_reseeded: Callable[[], None] = lambda: None
        self.seed = secrets.randbits(63) if seed is None else seed
        self.is_degraded = False

    def vouch(self, worker: Worker) -> None:
        """Notes that this process heard from the worker itself, and so writes its lease."""
        self._vouched[worker.id] = self._clock()

    async def remove(self, worker_id: str) -> None:
        """Deletes a worker's hash. A store that is away lets it lapse instead."""
        self._vouched.pop(worker_id, None)
        try:
            await self._redis.unlink(worker_key(worker_id))
            await self._redis.srem(FLEET_KEY, worker_id)
        except (RedisError, OSError, TimeoutError) as problem:
            LOG.warning("worker %s: its entry in the store will lapse by itself (%r)", worker_id, problem)

    async def run(self) -> None:
        """Reconciles until cancelled."""
        while True:
            await self.try_sync()
            await asyncio.sleep(SYNC_SECONDS)

    async def try_sync(self) -> bool:
        """Reconciles once; tells in the log when the store goes away or comes back. Returns whether it answered."""
        try:
            await self.sync()
        except (RedisError, OSError, TimeoutError) as problem:
            if not self.is_degraded:
                LOG.warning("the store is away (%r); requests go on from memory", problem)
            self.is_degraded = True
            return False
        if self.is_degraded:
            LOG.info("the store is back")
        self.is_degraded = False
        return True

    async def sync(self) -> None:
        """Writes the workers that this process vouches for, and takes in the others."""
        await self._agree()
        now = self._clock()
        for worker in self._registry:
            if worker.source is Source.STATIC and worker.state is State.READY:
                self.vouch(worker)
            age = now - self._vouched.get(worker.id, -LEASE_SECONDS)
            if age < LEASE_SECONDS:
                await self._write(worker, age)
        await self._read()

    async def _agree(self) -> None:
        """Agrees on the fleet's secret hash seed with the other replicas and with the time before a restart."""
        if self._is_seed_given and not self._is_seed_agreed:
            await self._redis.set(SEED_KEY, self.seed)
        was_missing = await self._redis.set(SEED_KEY, self.seed, nx=True)
        if was_missing and self._is_seed_agreed:
            LOG.warning("the store had lost its content; writing it anew")
            self.on_emptied()
        stored = await cast("Awaitable[bytes | None]", self._redis.get(SEED_KEY))
        if stored is not None and not stored.isdigit():
            LOG.warning("the seed in the store is no whole number; writing it anew")
            await self._redis.set(SEED_KEY, self.seed)
        elif stored is not None and int(stored) != self.seed:
            self.seed = int(stored)
            self.on_reseeded()
        self._is_seed_agreed = True

    async def _write(self, worker: Worker, age: float) -> None:
        """Writes a worker that was heard from `age` seconds ago: its lease has run since then."""
        row: dict[Any, Any] = {
            "url": worker.url,
            "incarnation": worker.incarnation,
            "source": worker.source.value,
            "state": worker.state.value,
            "identity": json.dumps(dict(worker.identity)),
            "engine": json.dumps(facts_to_json(worker.facts)),
        }
        if worker.verification is not None:
            row["verification"] = json.dumps(worker.verification.report())
        key = worker_key(worker.id)
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hset(key, mapping=row)
            pipe.pexpire(key, max(int((LEASE_SECONDS - age) * 1000), 1))
            pipe.sadd(FLEET_KEY, worker.id)
            await pipe.execute()

    async def _read(self) -> None:
        members = await cast("Awaitable[set[bytes]]", self._redis.smembers(FLEET_KEY))
        ids = sorted(member.decode(errors="replace") for member in members)
        if not ids:
            return
        async with self._redis.pipeline(transaction=False) as pipe:
            for worker_id in ids:
                pipe.hgetall(worker_key(worker_id))
                pipe.pttl(worker_key(worker_id))
            answers = await pipe.execute(raise_on_error=False)  # one bad entry must not hide the others
        for position, worker_id in enumerate(ids):
            row, ttl_ms = answers[2 * position], answers[2 * position + 1]
            if isinstance(row, RedisError):
                LOG.warning("worker %s: its entry in the store cannot be read (%r); left alone", worker_id, row)
            elif row and ttl_ms > 0:
                self._take_in(worker_id, row, ttl_ms / 1000)
            elif not row:
                await self._redis.srem(FLEET_KEY, worker_id)

    def _take_in(self, worker_id: str, row: dict[bytes, bytes], left: float) -> None:
        now = self._clock()
        known = self._registry.get(worker_id)
        if now - self._vouched.get(worker_id, -LEASE_SECONDS) < LEASE_SECONDS:
            return  # what this process heard itself is newer
        if known is not None and known.source is Source.STATIC:
            return
        if row.get(b"source") == Source.STATIC.value.encode():
            return  # every proxy names its static workers itself
        try:
            told = worker_of(worker_id, row, now + left)
        except (KeyError, ValueError) as problem:
            LOG.warning("worker %s: its entry in the store cannot be read (%r); left alone", worker_id, problem)
            return
        worker = self._registry.upsert(told)
        event = STANDING.get(row.get(b"state", b""))
        if event is not None:
            self._registry.apply(worker, event)


# States that one proxy's operator sets for all of them.
STANDING = {State.DRAINING.value.encode(): Event.DRAIN, State.CORDONED.value.encode(): Event.CORDON}


def worker_of(worker_id: str, row: Mapping[bytes, bytes], lease_until: float) -> Worker:
    """Reads a worker's hash.

    Raises:
        KeyError, ValueError: it cannot be read.
    """
    return Worker(
        id=worker_id,
        url=row[b"url"].decode(),
        incarnation=row[b"incarnation"].decode(),
        source=Source.REGISTERED,
        identity=read_object(row[b"identity"]),
        facts=facts_from_json(read_object(row[b"engine"])),
        lease_until=lease_until,
        verification=read_verification(read_object(row[b"verification"])) if b"verification" in row else None,
    )


def read_object(text: bytes) -> dict[str, Any]:
    """Parses a JSON object, or raises ValueError."""
    try:
        value = json.loads(text)
    except RecursionError:
        value = None
    if isinstance(value, dict):
        return value
    raise ValueError(f"{text[:40]!r} is not a JSON object")


def facts_to_json(facts: Facts) -> dict[str, object]:
    """Renders facts for a worker's hash, with the names of the registration page."""
    return {
        "version": facts.version,
        "models": list(facts.models),
        "block_size": facts.block_tokens,
        "capacity_tokens": facts.capacity_tokens,
        "prefix_caching": facts.prefix_caching,
        "kv_cache_dtype": facts.kv_cache_dtype,
    }


def facts_from_json(engine: dict[str, Any]) -> Facts:
    """Reads facts as a worker registers them. Absent, of another type, or no size is unknown.

    Raises:
        ValueError: `models` is not a list of objects with an `id`.
    """
    models = engine.get("models") or []
    if not isinstance(models, list) or not all(isinstance(m, dict) and isinstance(m.get("id"), str) for m in models):
        raise ValueError("engine.models must be a list of objects with an `id`, as the engine's /v1/models gives them")

    def typed(name: str, kind: type) -> Any:
        value = engine.get(name)
        return value if type(value) is kind else None

    def size(name: str) -> int | None:
        value = typed(name, int)
        return value if value and value > 0 else None

    return Facts(
        version=typed("version", str),
        models=tuple(models),
        block_tokens=size("block_size"),
        capacity_tokens=size("capacity_tokens"),
        prefix_caching=typed("prefix_caching", bool),
        kv_cache_dtype=typed("kv_cache_dtype", str),
    )
