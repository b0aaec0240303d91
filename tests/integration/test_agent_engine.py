"""Reading and watching an engine on a real socket."""

import asyncio
import contextlib

import pytest

from tests.support.agent_fakes import FakeEngine, Reply, until
from workers.agent.engine import EngineUnusable, EngineWatch, open_engine, wait_ready

pytestmark = pytest.mark.anyio

LIFE = f"{1796039019250:x}"


async def read(engine: FakeEngine, wait_seconds: float = 0.0):
    async with open_engine(engine.url) as client:
        return await wait_ready(client, wait_seconds)


@contextlib.asynccontextmanager
async def watched(engine: FakeEngine):
    """Watches an engine and yields the list of what it is told: `None` = gone, else the new life's facts."""
    told: list[object] = []

    async def gone() -> None:
        told.append(None)

    async def back(facts) -> None:
        told.append(facts)

    async with open_engine(engine.url) as client:
        facts = await wait_ready(client, 0.0)
        watch = EngineWatch(client, facts, on_gone=gone, on_back=back, poll_seconds=0.02)
        running = asyncio.create_task(watch.run())
        try:
            yield told
            assert not running.done(), running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def test_reads_what_the_engine_reports() -> None:
    async with FakeEngine() as engine:
        facts = await read(engine)
    assert facts.incarnation == LIFE
    assert facts.body() == {
        "version": "0.32.0",
        "models": [{"id": "tiny", "object": "model", "owned_by": "vllm", "max_model_len": 16384}],
        "block_size": 32,
        "capacity_tokens": 262144,
        "prefix_caching": True,
        "kv_cache_dtype": "auto",
    }


async def test_leaves_unknown_what_the_engine_does_not_say() -> None:
    async with FakeEngine() as engine:
        engine.forced = lambda call: None if call.path == "/v1/models" else Reply(404)
        facts, again = await read(engine), await read(engine)
    assert {key for key, value in facts.body().items() if value is None} == {
        "version",
        "block_size",
        "capacity_tokens",
        "prefix_caching",
        "kv_cache_dtype",
    }
    assert facts.incarnation != again.incarnation


async def test_waits_with_a_line_until_the_engine_is_ready(caplog) -> None:
    caplog.set_level("INFO", logger="workers.agent")
    engine = FakeEngine()
    await engine.open()
    await engine.close()
    waiting = asyncio.create_task(read(engine, wait_seconds=20))
    await until(lambda: caplog.records)
    engine.forced = lambda call: Reply(503)
    await engine.open()
    await until(lambda: engine.calls)
    engine.forced = lambda call: None
    assert (await waiting).incarnation == LIFE
    await engine.close()
    assert caplog.messages[0].startswith(f"waiting for the engine at {engine.url}, 0 s so far (")


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (Reply(401, {"error": "Unauthorized"}), "asks for a key at /v1/models"),
        (Reply(404), "its /v1/models lists no model"),
        (Reply(200, {"data": []}), "its /v1/models lists no model"),
        (Reply(200, "<html>"), "its /v1/models lists no model"),
        (Reply(302, headers={"location": "/"}), "/v1/models answered 302"),
    ],
    ids=["401", "404", "empty", "html", "302"],
)
async def test_says_why_an_engine_cannot_be_used(reply, said) -> None:
    async with FakeEngine() as engine:
        engine.forced = lambda call: reply
        with pytest.raises(EngineUnusable) as unusable:
            await read(engine)
    assert said in str(unusable.value)
    assert "\n" not in str(unusable.value)


async def test_gives_up_when_nothing_ever_listens() -> None:
    engine = FakeEngine()
    await engine.open()
    await engine.close()
    with pytest.raises(EngineUnusable, match=f"no engine is ready at {engine.url} after 0 s"):
        await read(engine)


async def test_tells_when_the_engine_goes_and_when_its_next_life_is_there() -> None:
    async with FakeEngine() as engine, watched(engine) as told:
        await engine.close()
        await until(lambda: told)
        assert told == [None]
        engine.started += 60
        engine.models = [{"id": "other"}]
        await engine.open()
        await until(lambda: len(told) == 2)
        assert told[1].incarnation == f"{1796039079250:x}"
        assert told[1].models == ({"id": "other"},)


async def test_notices_a_restart_between_two_polls() -> None:
    async with FakeEngine() as engine, watched(engine) as told:
        engine.started += 1
        await until(lambda: told)
        assert [facts.incarnation for facts in told] == [f"{1796039020250:x}"]


async def test_forgives_a_poll_that_failed_and_gives_up_after_three() -> None:
    async with FakeEngine() as engine, watched(engine) as told:
        asked = len(engine.calls)
        engine.forced = lambda call: Reply(503) if (len(engine.calls) - asked) % 3 else None
        await until(lambda: len(engine.calls) > asked + 9)
        assert told == []
        engine.forced = lambda call: Reply(503)
        await until(lambda: told)
        assert told == [None]


async def test_does_not_take_silence_about_the_start_for_a_restart() -> None:
    async with FakeEngine() as engine:
        engine.started = None
        async with watched(engine) as told:
            asked = engine.count("GET /metrics")
            await until(lambda: engine.count("GET /metrics") >= asked + 2)
            assert told == []
