"""One suite over the index in memory and the index with a copy in a real store."""

from collections.abc import AsyncIterator, Iterator

import pytest

from proxy.index.memory import EVIDENT_TOKENS, MemoryIndex
from tests.support.prompts import S, U, V, W, assume, find, overlap, serve, shared, text
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


@pytest.fixture(params=["memory", "shared"])
def index(request, redis):
    index = MemoryIndex() if request.param == "memory" else shared(redis)
    for worker in "ab":
        index.begin(worker, "1", None)
    return index


async def test_assumed_is_believed_and_withdrawn_is_not(index):
    assumption, _ = assume(index, "a", S, U)
    assert overlap(index, S, U) == {"a": 3500}
    index.withdraw(assumption)
    assert overlap(index, S, U) == {}
    assert index.shelf_sizes() == {"a": (0, 0), "b": (0, 0)}


async def test_served_lengths_and_turns_are_known(index):
    serve(index, "a", S, U, tokens=3777)
    trail = find(index, S, U, V)
    assert (trail.known_tokens, trail.turn) == (3777, 2)


async def test_capacity_bounds_and_the_oldest_goes_first(index):
    index.begin("a", "1", 4100)
    serve(index, "a", S, U, now=1)
    serve(index, "a", V, now=2)
    serve(index, "a", W, now=3)
    assert index.shelf_sizes()["a"][1] <= 4100
    assert overlap(index, V) == overlap(index, W) == {"a": 500}
    assert 2900 <= overlap(index, S, U)["a"] <= 3100


async def test_another_life_is_empty_at_once(index):
    serve(index, "a", S)
    assert index.begin("a", "2", None)
    assert overlap(index, S) == {}


@pytest.mark.parametrize("way", ["forget", "suspend"])
async def test_a_closed_shelf_is_out_of_sight(index, way):
    serve(index, "a", S)
    serve(index, "b", S)
    getattr(index, way)("a")
    assert overlap(index, S) == {"b": 3000}
    assert not [run for run in index._where.values() if run.holders & 1]


async def test_a_whole_miss_drops_what_is_older(index):
    old, mine = text("o", EVIDENT_TOKENS), text("m", EVIDENT_TOKENS)
    serve(index, "a", old, now=1)
    serve(index, "a", mine, now=2)
    assert serve(index, "a", mine, U, now=3, delivered=None) == 0
    assert serve(index, "a", mine, U, V, now=4, delivered=0) == 1
    assert overlap(index, old) == {}
    assert overlap(index, mine, U, V) == {"a": EVIDENT_TOKENS + 1000}
