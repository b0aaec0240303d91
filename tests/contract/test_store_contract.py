"""The fleet in a real store: members, leases, the shared seed, and what a store may do to them."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator

import pytest

from proxy.core.lifecycle import Event, State
from proxy.fleet.registry import Facts, Registry, Source, Worker
from proxy.fleet.store import FLEET_KEY, LEASE_SECONDS, SEED_KEY, FleetStore, facts_from_json, facts_to_json, worker_key
from tests.support.stores import KINDS, Store

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module", params=KINDS)
def store(request) -> Iterator[Store]:
    store = Store(request.param)
    yield store
    store.close()


@pytest.fixture
async def redis(store: Store) -> AsyncIterator:
    async with store.client() as client:
        await client.flushall()
        yield client


@pytest.fixture
async def impatient(store: Store, redis) -> AsyncIterator:
    """A client that gives up soon, for a store that is about to be frozen or killed."""
    async with store.client(0.3) as client:
        yield client


class Proxy:
    """The fleet's part of one proxy."""

    def __init__(self, redis, seed=None):
        self.now = 100.0
        self.registry = Registry()
        self.store = FleetStore(self.registry, redis, lambda: self.now, seed)
        self.emptied = self.reseeded = 0
        self.store.on_emptied = lambda: setattr(self, "emptied", self.emptied + 1)
        self.store.on_reseeded = lambda: setattr(self, "reseeded", self.reseeded + 1)

    def join(self, name="a", incarnation="1", source=Source.REGISTERED, url="http://a:8000"):
        lease = None if source is Source.STATIC else self.now + LEASE_SECONDS
        worker = self.registry.upsert(Worker(name, url, incarnation, source, IDENTITY, FACTS, lease_until=lease))
        if source is Source.REGISTERED:
            self.store.vouch(worker)
        return worker

    def states(self):
        return {worker.id: worker.state for worker in self.registry}


IDENTITY = {"name": "H200 SXM", "gpu_count": 1, "note": "é\n"}
FACTS = Facts("0.32.0", ({"id": "m", "max_model_len": 16384},), 32, 262_144, True, "auto")


async def test_a_registration_is_seen_by_another_proxy(redis):
    one, other = Proxy(redis), Proxy(redis)
    one.join()
    assert await one.store.try_sync()
    assert await other.store.try_sync()
    told = other.registry.get("a")
    assert (told.url, told.incarnation, told.source) == ("http://a:8000", "1", Source.REGISTERED)
    assert (told.identity, told.facts, told.state) == (IDENTITY, FACTS, State.JOINING)
    assert 0 < told.lease_until - other.now <= LEASE_SECONDS


async def test_a_lease_lapses_by_the_stores_clock(redis):
    one, other, late = Proxy(redis), Proxy(redis), Proxy(redis)
    one.join()
    await one.store.sync()
    await redis.pexpire(worker_key("a"), 300)
    await other.store.sync()
    assert 0 < other.registry.get("a").lease_until - other.now <= 0.3
    other.now += 0.3
    assert [worker.id for worker in other.registry.expire(other.now)] == ["a"]
    while await redis.exists(worker_key("a")):
        await asyncio.sleep(0.02)
    await late.store.sync()
    assert late.states() == {}
    assert await redis.smembers(FLEET_KEY) == set()


async def test_who_is_heard_from_stays_and_who_is_not_lapses(redis):
    one = Proxy(redis)
    one.join()
    await one.store.sync()
    one.now += LEASE_SECONDS / 2
    await redis.pexpire(worker_key("a"), 1000)
    await one.store.sync()  # still within what was heard: written again, for what is left of the lease
    assert LEASE_SECONDS * 400 < await redis.pttl(worker_key("a")) <= LEASE_SECONDS * 500
    one.now += LEASE_SECONDS / 2 + 0.1
    await redis.pexpire(worker_key("a"), 1000)
    await one.store.sync()
    assert await redis.pttl(worker_key("a")) <= 1000


async def test_who_left_leaves_nothing(redis):
    one, other = Proxy(redis), Proxy(redis)
    one.join()
    one.join("b", url="http://b:8000")
    await one.store.sync()
    one.registry.apply(one.registry.get("a"), Event.REMOVED)
    await one.store.remove("a")
    await one.store.sync()
    await other.store.sync()
    assert other.states() == {"b": State.JOINING}
    assert await redis.exists(worker_key("a")) == 0
    assert await redis.smembers(FLEET_KEY) == {b"b"}


async def test_draining_and_new_lives_are_told(redis):
    one, other = Proxy(redis), Proxy(redis)
    worker = one.join()
    await one.store.sync()
    await other.store.sync()
    other.registry.apply(other.registry.get("a"), Event.PROBED)
    one.registry.apply(worker, Event.DRAIN)
    await one.store.sync()
    await other.store.sync()
    assert other.states() == {"a": State.DRAINING}
    one.join(incarnation="2")
    await one.store.sync()
    await other.store.sync()
    assert (other.registry.get("a").incarnation, other.states()) == ("2", {"a": State.JOINING})


async def test_what_a_proxy_heard_itself_is_newer_than_the_store(redis):
    one, other = Proxy(redis), Proxy(redis)
    one.join(incarnation="old")
    await one.store.sync()
    other.join(incarnation="new")
    await other.store._read()
    assert other.registry.get("a").incarnation == "new"


async def test_static_workers_are_each_proxys_own(redis):
    one, other = Proxy(redis), Proxy(redis)
    one.registry.apply(one.join(source=Source.STATIC), Event.PROBED)
    await one.store.sync()
    await other.store.sync()
    assert other.states() == {}
    other.join(source=Source.STATIC, url="http://elsewhere:8000")
    await other.store.sync()
    assert other.registry.get("a").url == "http://elsewhere:8000"


async def test_two_proxies_agree_on_one_seed_and_keep_it(redis):
    one, other = Proxy(redis), Proxy(redis)
    first = one.store.seed
    assert other.store.seed != first
    await one.store.sync()
    await other.store.sync()
    await one.store.sync()
    assert one.store.seed == other.store.seed == first
    assert (one.reseeded, other.reseeded) == (0, 1)
    again = Proxy(redis)
    await again.store.sync()
    assert again.store.seed == first
    assert int(await redis.get(SEED_KEY)) == first < 1 << 63


async def test_a_given_seed_is_written_over_a_made_one(redis):
    made = Proxy(redis)
    await made.store.sync()
    given = Proxy(redis, seed=42)
    await given.store.sync()
    await made.store.sync()
    assert (given.store.seed, made.store.seed, made.reseeded) == (42, 42, 1)


@pytest.mark.parametrize("garbage", [b"", b"abc", b"-5", b"1.5", b"\xff"])
async def test_a_seed_that_is_none_is_written_anew(redis, garbage):
    one = Proxy(redis)
    await redis.set(SEED_KEY, garbage)
    assert await one.store.try_sync()
    assert int(await redis.get(SEED_KEY)) == one.store.seed


async def test_a_flushed_store_fills_again(redis):
    one, other = Proxy(redis), Proxy(redis)
    one.join()
    for proxy in (one, other):
        await proxy.store.sync()
    seed = one.store.seed
    await redis.flushall()
    for proxy in (one, other):
        await proxy.store.sync()
    assert (one.emptied, other.emptied) == (1, 0)  # the first to notice
    assert await redis.smembers(FLEET_KEY) == {b"a"}
    assert int(await redis.get(SEED_KEY)) == seed == other.store.seed
    assert other.states() == {"a": State.JOINING}


ROW = {"url": "http://b:8000", "incarnation": "1", "source": "registered", "state": "ready"}
BAD_ROWS = [
    {},
    {"identity": "{", "engine": "{}"},
    {"identity": "{}", "engine": "[]"},
    {"identity": "[]", "engine": "{}"},
    {"identity": "5", "engine": "{}"},
    {"identity": "{}", "engine": '{"models": 5}'},
    {"identity": "{}", "engine": '{"models": [{"id": 5}]}'},
    {"identity": "{}", "engine": "[" * 100_000},
    {"identity": "{}", "engine": "{}", "url": b"\xff"},
    {"identity": b"\xff", "engine": "{}"},
]


@pytest.mark.parametrize("row", BAD_ROWS)
async def test_a_row_that_cannot_be_read_is_left_alone_and_hides_no_other(redis, row):
    one, other = Proxy(redis), Proxy(redis)
    one.join("z")
    await one.store.sync()
    await redis.hset(worker_key("b"), mapping=ROW | row)
    await redis.pexpire(worker_key("b"), 10_000)
    await redis.set(worker_key("c"), "of another type")
    await redis.sadd(FLEET_KEY, "b", "c", b"\xff")
    assert await other.store.try_sync()
    assert other.states() == {"z": State.JOINING}
    assert await redis.exists(worker_key("b"), worker_key("c")) == 2


async def test_a_row_without_an_end_is_not_taken_in(redis):
    one = Proxy(redis)
    await redis.hset(worker_key("b"), mapping=ROW | {"identity": "{}", "engine": "{}"})
    await redis.sadd(FLEET_KEY, "b")
    await one.store.sync()
    assert one.states() == {}


async def test_a_store_that_is_away_is_said_once_and_comes_back(store, impatient, caplog):
    one = Proxy(impatient)
    one.join()
    assert await one.store.try_sync()
    for away, back in ((store.freeze, store.thaw), (store.kill, store.start)):
        away()
        caplog.clear()
        try:
            for _ in range(3):
                assert not await one.store.try_sync()
                assert one.store.is_degraded
            await one.store.remove("nobody")
        finally:
            back()
        assert sum("the store is away" in line for line in caplog.messages) == 1
        assert one.states() == {"a": State.JOINING}
        while not await one.store.try_sync():
            await asyncio.sleep(0.02)
        assert not one.store.is_degraded
        assert await impatient.smembers(FLEET_KEY) == {b"a"}
    assert one.emptied == 1


@pytest.mark.parametrize(
    ("engine", "facts"),
    [
        ({}, Facts()),
        ({"models": None}, Facts()),
        (facts_to_json(FACTS), FACTS),
        (
            {"block_size": "32", "capacity_tokens": 1.5, "prefix_caching": 1, "version": 3, "kv_cache_dtype": []},
            Facts(),
        ),
        ({"block_size": 0, "capacity_tokens": -5}, Facts()),
        ({"block_size": -32, "capacity_tokens": True}, Facts()),
        ({"models": [{"id": "m", "extra": [1]}], "unknown": 5}, Facts(models=({"id": "m", "extra": [1]},))),
    ],
)
async def test_an_engines_facts_are_read_leniently(engine, facts):
    assert facts_from_json(json.loads(json.dumps(engine))) == facts


@pytest.mark.parametrize("models", [5, "m", {"id": "m"}, ["m"], [None], [{}], [{"id": None}]])
async def test_models_of_another_form_are_refused(models):
    with pytest.raises(ValueError, match="models"):
        facts_from_json({"models": models})
