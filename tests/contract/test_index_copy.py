"""What the copy of the index adds: a warm start, and what stores and other proxies may do meanwhile; on real stores."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator

import pytest
from redis.exceptions import RedisError

from proxy.core.blocks import chain
from proxy.index.memory import EVIDENT_TOKENS
from proxy.index.records import pack_key
from proxy.index.shared import RATIOS_KEY, set_key
from tests.support.prompts import Clocks, S, U, V, W, assume, find, overlap, serve, shared, text, warm
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


async def test_a_restarted_proxy_is_warm(redis):
    clocks = Clocks()
    index = shared(redis, clocks)
    index.begin("a", "1", None)
    serve(index, "a", S, U, tokens=3333)
    serve(index, "a", S, U, V, W, tokens=4444)
    serve(index, "a", S, W, tokens=3456)
    await index.flush()
    clocks.move(60)
    again = await warm(redis, Clocks(clocks.wall, 7.0))
    for segments in ((S, U), (S, U, V, W), (S, W), (S, U, V, W, U), (S, V), (V,)):
        one, other = find(index, *segments), find(again, *segments)
        assert overlap(again, *segments) == overlap(index, *segments)
        assert (other.tokens, other.known_tokens, other.depth, other.turn) == (
            one.tokens, one.known_tokens, one.depth, one.turn,
        )  # fmt: skip
    assert again.shelf_sizes() == index.shelf_sizes()
    assert again.ratios() == index.ratios()
    assert [find(again, *segments).turn for segments in ((S, U), (S, U, V, W), (S, W), (S, V))] == [2, 3, 2, 1]


async def test_what_was_served_without_usage_survives_too(redis):
    # Most streams carry no usage; they must not start cold.
    index = shared(redis)
    index.begin("a", "1", None)
    serve(index, "a", S, U, tokens=None)
    await index.flush()
    again = await warm(redis)
    assert overlap(again, S, U) == overlap(index, S, U) == {"a": 3500}
    assert find(again, S, U, V).turn == 2


async def test_the_order_of_use_survives(redis):
    clocks = Clocks()
    index = shared(redis, clocks)
    index.begin("a", "1", None)
    for segments in ((U,), (V,), (W,), (U,)):
        clocks.move(10)
        serve(index, "a", *segments, now=clocks.steady)
    await index.flush()
    clocks.move(100)
    again = await warm(redis, Clocks(clocks.wall, 3000.0), capacity=1100)
    assert overlap(again, U) == overlap(again, W) == {"a": 500}
    assert overlap(again, V).get("a", 0) <= 100
    assert again.overlap(find(again, U), "a", 3000.0).room["a"].coldest_age == pytest.approx(120, abs=1.1)


async def test_only_changes_are_sent(redis):
    index = shared(redis)
    index.begin("a", "1", None)
    serve(index, "a", S, U)
    await index.flush()
    key = set_key("a", "1")
    await redis.hset(key, b"foreign", b"left alone")
    serve(index, "a", S, U, V)
    await index.flush()
    assert await redis.hlen(key) == 3
    assert await redis.ttl(key) > 3600
    assert (await warm(redis)).shelf_sizes() == index.shelf_sizes()


async def test_two_proxies_write_one_set_and_neither_wipes_the_other(redis):
    one, other = shared(redis), shared(redis)
    for index in (one, other):
        index.begin("a", "1", None)
    serve(one, "a", S, U)
    serve(other, "a", S, V)
    serve(one, "a", S, W)
    await one.flush()
    await other.flush()
    for index in (one, other, one):
        index.rewrite_all()
        await index.flush()
    again = await warm(redis)
    for segments in ((S, U), (S, V), (S, W)):
        assert overlap(again, *segments) == {"a": 3500}
        assert find(again, *segments).tokens == 3500


async def test_a_part_is_found_inside_what_another_proxy_wrote_as_one(redis):
    one, other = shared(redis), shared(redis)
    for index in (one, other):
        index.begin("a", "1", None)
    serve(one, "a", S, U)
    serve(other, "a", S, V)
    serve(other, "a", S, W)  # cuts S off, and V and W go on from it
    await one.flush()
    await other.flush()
    await redis.hdel(set_key("a", "1"), pack_key(chain([S], 1).hashes[-1]))
    again = await warm(redis)
    for segments in ((S, U), (S, V), (S, W)):
        assert overlap(again, *segments) == {"a": 3500}


async def test_what_was_given_up_is_not_loaded_again(redis):
    index = shared(redis)
    index.begin("a", "1", 1200)
    for segments in ((U,), (V,), (W,)):
        serve(index, "a", *segments)
        await index.flush()
    assert (await warm(redis)).shelf_sizes() == index.shelf_sizes()


async def test_a_whole_miss_is_taken_out_of_the_copy(redis):
    index = shared(redis)
    index.begin("a", "1", None)
    old, mine = text("o", EVIDENT_TOKENS), text("m", EVIDENT_TOKENS)
    serve(index, "a", old, now=1)
    serve(index, "a", mine, now=2)
    await index.flush()
    serve(index, "a", mine, U, now=3, delivered=0)
    await index.flush()
    again = await warm(redis)
    assert overlap(again, old) == {}
    assert overlap(again, mine, U) == {"a": EVIDENT_TOKENS + 500}


async def test_the_end_of_a_life_deletes_its_set(redis):
    index = shared(redis)
    for way in (lambda: index.forget("a"), lambda: index.begin("a", "2", None)):
        index.begin("a", "1", None)
        serve(index, "a", S)
        await index.flush()
        assert await redis.exists(set_key("a", "1")) == 1
        way()
        await index.flush()
        assert await redis.exists(set_key("a", "1")) == 0


async def test_a_life_that_ended_before_it_was_copied_leaves_nothing(redis):
    index = shared(redis)
    index.begin("a", "1", None)
    attempt, trail = assume(index, "a", S)
    serve(index, "a", U)
    index.forget("a")
    index.confirm(attempt, 3000, None, trail.turn)
    await index.flush()
    assert await redis.keys("*prefixes*") == []


async def test_a_suspended_set_is_kept_and_comes_back(redis):
    index = shared(redis)
    index.begin("a", "1", None)
    serve(index, "a", S, U)
    await index.flush()
    index.suspend("a")
    index.rewrite_all()
    await index.flush()
    index.begin("a", "1", None)
    index.rewrite_all()  # the shelf is empty at this moment, and that must not reach the store
    await index.flush()
    assert await index.load("a") == len(find(index, S, U).blocks)
    assert overlap(index, S, U) == {"a": 3500}


async def test_nothing_is_loaded_for_another_life(redis):
    index = shared(redis)
    index.begin("a", "1", None)
    serve(index, "a", S)
    await index.flush()
    again = await warm(redis, incarnation="2")
    assert overlap(again, S) == {}
    assert await again.load("stranger") == 0


async def test_what_no_proxy_wrote_does_not_stop_the_start(redis):
    index = shared(redis)
    index.begin("a", "1", None)
    serve(index, "a", S, U)
    await index.flush()
    key = set_key("a", "1")
    await redis.hset(key, mapping={b"x": b"y", b"12345678": b"", b"87654321": b"\0" * 30})
    await redis.hset(RATIOS_KEY, mapping={b"\xff": b"3", b"n": b"x", b"o": b"0"})
    again = await warm(redis)
    assert overlap(again, S, U) == {"a": 3500}
    await redis.delete(key)
    await redis.set(key, "another type")
    cold = await warm(redis)
    assert overlap(cold, S, U) == {}
    serve(cold, "a", S)
    with pytest.raises(RedisError):
        await cold.flush()


async def test_loading_keeps_what_came_meanwhile(redis):
    index = shared(redis)
    index.begin("a", "1", None)
    serve(index, "a", S, U, tokens=3333)
    await index.flush()
    again = shared(redis)
    again.begin("a", "1", None)
    serve(again, "a", S, V, tokens=3400)
    await again.load("a")
    assert find(again, S, V).tokens == 3400
    assert overlap(again, S, U) == {"a": 3333}
    assert overlap(again, S, V) == {"a": 3400}


async def test_a_store_that_was_killed_is_written_anew(store, impatient):
    index = shared(impatient)
    index.begin("a", "1", None)
    serve(index, "a", S, U)
    await index.flush()
    store.kill()
    serve(index, "a", S, V)
    await index._try_flush()
    assert index.is_degraded
    serve(index, "a", W)
    assert overlap(index, S, V) == {"a": 3500}
    store.start()
    await index._try_flush()
    assert not index.is_degraded
    again = await warm(impatient)
    assert again.shelf_sizes() == index.shelf_sizes()


async def test_what_was_pending_when_the_proxy_stops_is_written(redis):
    index = shared(redis)
    index.begin("a", "1", None)
    running = asyncio.create_task(index.run())
    await asyncio.sleep(0)
    serve(index, "a", S, U)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert overlap(await warm(redis), S, U) == {"a": 3500}


async def test_a_flush_that_is_cancelled_loses_nothing(store, redis):
    index = shared(redis)
    index.begin("a", "1", None)
    serve(index, "a", S, U)
    store.freeze()
    try:
        flushing = asyncio.create_task(index.flush())
        await asyncio.sleep(0.05)
        flushing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await flushing
    finally:
        store.thaw()
    await index.flush()
    assert overlap(await warm(redis), S, U) == {"a": 3500}


async def test_a_frozen_store_blocks_nothing_but_the_copy(store, impatient):
    index = shared(impatient)
    index.begin("a", "1", None)
    serve(index, "a", S, U)
    store.freeze()
    try:
        copying = asyncio.create_task(index._try_flush())
        await asyncio.sleep(0.02)
        # All of these are plain calls: with the copy stuck they still come back, and answer from memory.
        assert overlap(index, S, U) == {"a": 3500}
        attempt, _ = assume(index, "a", S, V)
        index.withdraw(attempt)
        serve(index, "a", S, W)
        assert overlap(index, S, W) == {"a": 3500}
        assert not copying.done()
        await copying
        assert index.is_degraded
        assert await index.load("a") == 0
    finally:
        store.thaw()
    deadline = time.monotonic() + 10
    while index.is_degraded and time.monotonic() < deadline:
        await index._try_flush()
    assert overlap(await warm(impatient), S, W) == {"a": 3500}
