"""Where requests go, what is tried again and what never is, and what a bad request gets."""

import asyncio
import functools

import pytest

from proxy.edge.upstream import wire
from tests.support import fleet
from tests.support.clients import Response, chat, receipt
from tests.support.fleet import LOOP, WAYS, Proxy, proxying
from tests.support.scripted import (
    ROLE,
    Exchange,
    Scripted,
    answers,
    chunk,
    closes,
    completion,
    hangs,
    resets,
    stream_head,
    token,
    until,
)

pytestmark = pytest.mark.anyio
BUSY = b'{"error":{"message":"The engine is currently busy","type":"Service Unavailable","param":null,"code":503}}'


@pytest.fixture
def anyio_backend():
    return LOOP


@pytest.fixture(params=WAYS)
def either(request):
    """Runs a proxy with either door and transport, for what they do each in its own way."""
    return functools.partial(fleet.proxying, way=request.param)


class Talk:
    """A conversation: each turn repeats all before it and adds two messages. A token is four bytes to its engine."""

    def __init__(self, name: str) -> None:
        self.messages = [f"{name}: " + "background of the matter " * 60]

    async def turn(self, proxy: Proxy, *workers: Scripted) -> Response:
        body = chat(*self.messages)
        prompt = sum(map(len, self.messages)) // 4
        for worker in workers:
            worker.play = answers(completion(prompt, 0))
        answer = await proxy.ask(body)
        assert answer.status == 200
        self.messages += ["Hello", f"and then, {len(self.messages)}?"]
        return answer


async def test_a_conversation_goes_home_and_stays() -> None:
    async with Scripted() as one, Scripted() as two, proxying(one, two) as proxy:
        homes = []
        for name in "abcdef":
            talk = Talk(name)
            first = receipt(await talk.turn(proxy, one, two))
            assert first[2:] == ("0", "1")
            turns = [receipt(await talk.turn(proxy, one, two)) for _ in range(3)]
            assert {turn[0] for turn in turns} == {first[0]}
            assert {turn[1] for turn in turns} == {"overlap"}
            expected = [int(turn[2]) for turn in turns]
            assert expected == sorted(expected)
            assert expected[0] >= 300
            assert {tokens % one.block_tokens for tokens in expected} == {0}
            homes.append(first[0])
        assert one.served + two.served == 24
        assert [outcome.turn for outcome in proxy.outcomes] == [1, 2, 3, 4] * 6


@pytest.mark.parametrize("dies", [closes, resets])
async def test_a_kept_connection_that_dies_costs_nobody_anything(either, dies) -> None:
    """Several connections are idle, and the worker ends each as its second request comes on it."""
    go = asyncio.Event()

    async def serves_once(exchange: Exchange) -> None:
        await go.wait()
        await (dies if exchange.line.requests > 1 else answers(completion()))(exchange)

    async with Scripted(play=serves_once) as worker, either(worker) as proxy:
        asked = [asyncio.create_task(proxy.ask()) for _ in range(3)]
        await until(lambda: worker.served == 3)
        go.set()
        assert {(await answer).status for answer in asked} == {200}
        for _ in range(3):
            before = worker.served
            answer = await proxy.ask()
            assert (answer.status, answer.body) == (200, completion())
            assert receipt(answer)[::3] == ("w0", "2")
            assert worker.served == before + 2
            assert worker.bodies[-1] == worker.bodies[-2]
        assert proxy.states == {"w0": "ready"}
        assert proxy.results == ["ok"] * 6


async def test_a_kept_connection_that_dies_sends_no_conversation_away() -> None:
    async with Scripted() as one, Scripted() as two, proxying(one, two) as proxy:
        talk = Talk("a")
        home = receipt(await talk.turn(proxy, one, two))[0]
        for _ in range(3):
            (one, two)[int(home[1])].plays.append(closes)
            assert receipt(await talk.turn(proxy, one, two))[::3] == (home, "2")
        assert {outcome.placement.reason.value for outcome in proxy.outcomes[1:]} == {"overlap"}


async def test_output_that_has_begun_is_never_asked_for_again() -> None:
    async def dies(exchange: Exchange) -> None:
        exchange.send(stream_head())
        for piece in (ROLE, token("one"), token("two")):
            exchange.send(chunk(piece))
        await asyncio.sleep(0.05)
        exchange.reset()

    async with Scripted(play=dies) as one, Scripted(play=dies) as two, proxying(one, two) as proxy:
        answer = await proxy.ask(chat(stream=True))
        assert answer.body.count(token("one")) == answer.body.count(token("two")) == 1
        assert one.served + two.served == 1
        assert receipt(answer)[3] == "1"


async def test_work_that_may_have_begun_is_never_asked_for_again(monkeypatch) -> None:
    monkeypatch.setattr(wire, "SWEEP_SECONDS", 0.05)
    async with Scripted() as one, Scripted() as two, proxying(one, two, first_byte_timeout=0.2) as proxy:
        for play, status in ((hangs, 504), (resets, 502), (closes, 502)):
            one.play = two.play = play
            before = one.served + two.served
            answer = await proxy.ask()
            assert (answer.status, answer.error["type"]) == (status, "server_error")
            assert one.served + two.served == before + 1
            assert receipt(answer)[3] == "1"
            await until(lambda: not one.busy + two.busy)
        assert await proxy.value("homing_attempts_total") == 3


async def test_a_worker_that_refuses_is_left_for_another_at_once_and_for_good() -> None:
    async with Scripted() as one, Scripted() as two, proxying(one, two) as proxy:
        talk = Talk("a")
        home = receipt(await talk.turn(proxy, one, two))[0]
        worker, other = (one, two) if home == "w0" else (two, one)
        name = "w1" if home == "w0" else "w0"
        await worker.refuse()
        assert receipt(await talk.turn(proxy, one, two))[::3] in ((name, "2"), (name, "1"))  # a probe may come first
        third = receipt(await talk.turn(proxy, one, two))
        assert (third[0], third[3]) == (name, "1")
        assert proxy.states[home] == "suspect"
        assert (worker.served, other.served) == (1, 2)
        await worker.open()
        await proxy.ready("w0", "w1")
        assert receipt(await talk.turn(proxy, one, two))[:2] == (name, "overlap")


async def test_a_refused_connection_is_tried_elsewhere() -> None:
    async with Scripted() as one, Scripted() as two, proxying(one, two) as proxy:
        proxy.homing.prober._due |= {"w0": float("inf"), "w1": float("inf")}  # no probe interferes
        await one.refuse()
        for place in range(100):  # a new conversation goes to either
            if proxy.states["w0"] != "ready":
                break
            answer = await proxy.ask(chat(f"conversation {place}"))
            assert answer.status == 200
        assert receipt(answer) == ("w1", "fallback", "0", "2")
        assert proxy.results[-1] == "ok"
        await two.refuse()
        answer = await proxy.ask()
        assert (answer.status, answer.error["code"]) == (502, "worker_unreachable")
        answer = await proxy.ask()
        assert (answer.status, answer.error["code"], answer.header("retry-after")) == (503, "no_worker", "1")
        assert receipt(answer) == ("none", "refused", "unknown", "0")


async def test_a_worker_whose_queue_is_full_passes_on_and_the_last_one_speaks_for_itself() -> None:
    async with Scripted() as one, Scripted() as two, proxying(one, two) as proxy:
        told = [("content-type", "application/json"), ("retry-after", "9")]
        one.play = answers(BUSY, 503, told)
        for place in range(12):
            answer = await proxy.ask(chat(f"question {place}", stream=place % 2 == 0))
            assert (answer.status, receipt(answer)[0]) == (200, "w1")
        assert (one.served > 0, two.served) == (True, 12)
        two.play = answers(BUSY, 503, told)
        answer = await proxy.ask(chat("last", stream=True))
        assert (answer.status, answer.body, answer.header("retry-after")) == (503, BUSY, "9")
        assert receipt(answer)[3] == "2"
        assert proxy.states == {"w0": "ready", "w1": "ready"}
        assert set(proxy.results) == {"ok", "worker_error"}


async def test_tries_have_an_end() -> None:
    async with Scripted() as a, Scripted() as b, Scripted() as c, Scripted() as d, proxying(a, b, c, d) as proxy:
        for worker in (a, b, c, d):
            worker.play = answers(BUSY, 503)
        answer = await proxy.ask()
        assert (answer.status, answer.body, receipt(answer)[3]) == (503, BUSY, "3")
        assert sorted(worker.served for worker in (a, b, c, d)) == [0, 1, 1, 1]


async def test_mistakes_of_clients_are_no_fault_of_workers() -> None:
    async with Scripted() as one, Scripted() as two, proxying(one, two) as proxy:
        for status in (400, 404, 422, 429):
            one.play = two.play = answers(b'{"error":{}}', status)
            before = one.served + two.served
            asked = await asyncio.gather(*(proxy.ask(chat(f"{status} {place}")) for place in range(20)))
            assert {(answer.status, receipt(answer)[3]) for answer in asked} == {(status, "1")}
            assert one.served + two.served == before + 20
        assert proxy.states == {"w0": "ready", "w1": "ready"}
        one.play = two.play = answers(completion())
        assert (await proxy.ask()).status == 200
