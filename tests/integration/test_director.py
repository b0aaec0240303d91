"""Where requests go, what is tried again and what never is, and what a bad request gets."""

import asyncio
import functools
import json

import pytest

from proxy.edge.upstream import wire
from tests.support import fleet
from tests.support.clients import Response, ask, chat, request
from tests.support.fleet import LOOP, WAYS, Proxy, proxying
from tests.support.scripted import (
    LAST_CHUNK,
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
RECEIPT = ("x-request-id", "x-homing-worker", "x-homing-reason", "x-homing-expected-tokens", "x-homing-attempts")
BUSY = b'{"error":{"message":"The engine is currently busy","type":"Service Unavailable","param":null,"code":503}}'


@pytest.fixture
def anyio_backend():
    return LOOP


@pytest.fixture(params=WAYS)
def either(request):
    """Runs a proxy with either door and transport, for what they do each in its own way."""
    return functools.partial(fleet.proxying, way=request.param)


def receipt(answer: Response) -> tuple[str, ...]:
    """Worker, reason, expected tokens, attempts; each header exactly once."""
    assert [name for name in RECEIPT if len(answer.all(name)) != 1] == []
    return tuple(answer.header(name) for name in RECEIPT[1:])


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


# As `messages` entries, and as whole bodies: odd, but the engine's business.
ODD = [
    {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]}]},
    {"messages": [{"role": "tool", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]}]},
    {"messages": [{"role": "latest_reminder", "content": "x"}]},
    {"messages": [{"role": 7, "content": [None]}, None, 5, "x", ["y"]]},
    {"messages": [{"role": "user", "tool_calls": [None]}]},
    {"messages": [{"role": "user", "content": 5, "name": 3}]},
    {"messages": []},
    {"messages": "hi"},
    {"messages": {"role": "user"}},
    {"messages": None},
    {},
    {"messages": [{}], "tools": "x", "cache_salt": 7, "stream": "yes"},
    {"messages": [{"role": "user", "content": "x"}], "tools": [None, 1, {"type": "function"}]},
    {"prompt": "text"},
    {"prompt": ["a", "b"]},
    {"prompt": [1, 2, 3]},
    {"prompt": [[1, 2], [3]]},
    {"prompt": [-1, 1 << 70, True, None]},
    {"prompt": []},
    {"prompt": None},
]


async def test_odd_bodies_pass_unchanged(either) -> None:
    deep: object = "x"
    for _ in range(400):
        deep = [deep]
    bodies = [json.dumps({"model": "m1"} | odd).encode() for odd in [*ODD, {"messages": deep}]]
    bodies.append(b'{"model":"m1","model":"m1","messages":[{"role":"user","content":"\\ud800\\u0000"}]}')
    bodies.append(b' \n{"messages":[],"model":"m1"}\r\n ')
    async with Scripted() as worker, either(worker) as proxy:
        for path in ("/v1/chat/completions", "/v1/completions"):
            worker.heard.clear()
            for body in bodies:
                assert (await proxy.ask(body, path=path)).status == 200, body
            assert worker.bodies == bodies


UNREADABLE = [
    b"",
    b"[]",
    b'"x"',
    b"null",
    b'{"a":',
    b'{"\xff"}',
    b'{"model": "\xff", "messages": []}',
    b"[" * 2000 + b"]" * 2000,
    b'{"model":"m1","messages":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    b"model=m1",
    b'{"model":"m1"} trailing',
    b"\x00" * 100,
]
NAMELESS = [b"{}", b'{"model":7}', b'{"model":null}', b'{"model":""}', b'{"model":["m1"]}', b'{"model":{}}']


async def test_what_cannot_be_read_gets_one_clear_error(either) -> None:
    async with Scripted() as worker, either(worker) as proxy:
        client = await proxy.connect()
        for path in ("/v1/chat/completions", "/v1/completions"):
            for bodies, code in ((UNREADABLE, "bad_json"), (NAMELESS, "missing_model")):
                for body in bodies:
                    answer = await client.exchange(request(body, path))
                    told = (answer.status, answer.error["code"], answer.error["type"])
                    assert told == (400, code, "invalid_request_error"), body[:60]
                    assert receipt(answer) == ("none", "refused", "unknown", "0")
        assert worker.served == 0
        assert (await client.exchange(request(chat()))).status == 200
        assert set(proxy.results[:-1]) == {"client_error"}
        assert await proxy.value("homing_requests_total", model="other", result="client_error") == 36
        client.close()


async def test_a_byte_order_mark_is_readable_or_clearly_not() -> None:
    body = b"\xef\xbb\xbf" + chat()
    async with Scripted() as worker, proxying(worker) as proxy:
        answer = await proxy.ask(body)
        if answer.status == 200:
            assert worker.bodies == [body]
        else:
            assert (answer.status, answer.error["code"], worker.served) == (400, "bad_json", 0)


async def test_models_are_the_union_and_an_unknown_one_is_told_from_one_that_is_away() -> None:
    base = {"id": "m1", "object": "model", "owned_by": "vllm", "max_model_len": 32768, "x": [1]}
    legal = {"id": "m1-legal", "object": "model", "parent": "m1"}
    async with (
        Scripted(base, legal) as one,
        Scripted(base, legal) as two,
        Scripted("m2", "org/m3") as three,
        proxying(one, two, three) as proxy,
    ):
        listed = json.loads((await proxy.call("GET", "/v1/models")).body)
        assert listed["object"] == "list"
        assert listed["data"][:2] == [base, legal]
        assert [model["id"] for model in listed["data"]] == ["m1", "m1-legal", "m2", "org/m3"]
        assert json.loads((await proxy.call("GET", "/v1/models/org/m3")).body)["id"] == "org/m3"
        for model, served in (("m1", one.served + two.served), ("m1-legal", 0), ("m2", three.served)):
            assert (await proxy.ask(chat(model=model))).status == 200, served
        assert (one.served + two.served, three.served) == (2, 1)
        await three.refuse()
        await proxy.ready("w0", "w1")
        listed = json.loads((await proxy.call("GET", "/v1/models")).body)
        assert listed["data"] == [base, legal]
        away = await proxy.ask(chat(model="m2"))
        assert (away.status, away.error["code"], away.header("retry-after")) == (503, "no_worker", "1")
        for model in ("nope", "M1", "m1 ", 'x"\n', "y" * 10_000):
            unknown = await proxy.ask(chat(model=model))
            assert (unknown.status, unknown.error["code"], unknown.error["param"]) == (404, "model_not_found", "model")
        assert (await proxy.call("GET", "/v1/models/nope")).status == 404
        assert all(b"m2" not in body and b"nope" not in body for body in one.bodies + two.bodies)
        assert await proxy.value("homing_requests_total", model="other") == 5


async def test_an_empty_fleet_says_so(either) -> None:
    async with either() as proxy:
        answer = await proxy.ask()
        assert (answer.status, answer.error["code"], answer.header("retry-after")) == (503, "no_worker", "1")
        assert receipt(answer) == ("none", "refused", "unknown", "0")
        assert json.loads((await proxy.call("GET", "/v1/models")).body) == {"object": "list", "data": []}
        assert proxy.results == ["refused"]


async def test_a_dead_fleet_says_so() -> None:
    async with Scripted() as worker:
        await worker.refuse()
        async with proxying(worker) as proxy:
            answer = await proxy.ask()
            assert (answer.status, answer.error["code"], answer.header("retry-after")) == (503, "no_worker", "1")


async def test_a_body_over_the_limit_is_refused_however_it_comes(either) -> None:
    async with Scripted() as worker, either(worker, max_body_bytes=100_000) as proxy:
        fits = chat("x" * 99_000)
        assert (await proxy.ask(fits + b" " * (100_000 - len(fits)))).status == 200
        over = fits + b" " * (100_001 - len(fits))
        in_chunks = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        in_chunks += b"".join(chunk(over[start : start + 9000]) for start in range(0, len(over), 9000))
        much = b"y" * 20_000_000
        for data in (request(over), in_chunks + LAST_CHUNK, request(much)):
            answer = await ask(proxy.port, data)
            assert (answer.status, answer.error["code"], answer.is_whole) == (413, "body_too_large", True)
            assert receipt(answer) == ("none", "refused", "unknown", "0")
        assert worker.served == 1
        # Whoever only announces too much is told before it sends anything.
        client = await proxy.connect()
        client.send(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100001\r\n\r\n")
        assert (await client.answer()).status == 413
        client.close()


async def test_other_methods_and_paths_get_a_shaped_error(either) -> None:
    async with Scripted() as worker, either(worker) as proxy:
        for method in ("GET", "PUT", "DELETE", "PATCH"):
            for path in ("/v1/chat/completions", "/v1/completions?x=1"):
                answer = await proxy.call(method, path, headers=[("x-request-id", "r1")])
                assert (answer.status, answer.error["code"], answer.header("allow")) == (
                    405,
                    "method_not_allowed",
                    "POST",
                )
                assert answer.header("x-request-id") == "r1"
                assert receipt(answer) == ("none", "refused", "unknown", "0")
        for path in ("/v1/embeddings", "/v1/chat/completions/", "/v1", "/", "/v1/chat/completions/x", "/nope"):
            answer = await proxy.ask(path=path)
            assert (answer.status, answer.error["code"]) == (404, "not_found")
            assert path in answer.error["message"]
        assert worker.served == 0


async def test_unusual_requests_are_served_all_the_same(either) -> None:
    """HTTP/1.0, an absolute target, an escaped path, a last request, `Expect`, pipelining."""
    async with Scripted() as worker, either(worker) as proxy:
        body = chat()
        length = f"content-length: {len(body)}\r\n\r\n".encode() + body
        for head in (
            b"POST /v1/chat/completions HTTP/1.0\r\n",
            b"POST http://homing/v1/chat/completions HTTP/1.1\r\nhost: homing\r\n",
            b"POST /v1/chat%2Fcompletions HTTP/1.1\r\nhost: homing\r\n",
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: homing\r\nconnection: close\r\n",
        ):
            answer = await ask(proxy.port, head + length)
            assert (answer.status, answer.body) == (200, completion()), head
            assert receipt(answer)[0] == "w0"
        assert worker.bodies == [body] * 4
        expecting = await proxy.connect()
        expecting.send(request(body, headers=[("expect", "100-continue")]))
        await until(lambda: expecting.received.endswith(completion()))
        assert expecting.received.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK")
        expecting.close()
        pipelined = await proxy.connect()
        pipelined.send(request(body) * 3)
        await until(lambda: pipelined.received.count(completion()) == 3)
        pipelined.close()
        assert worker.served == 8
