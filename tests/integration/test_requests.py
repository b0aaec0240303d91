"""What a request gets that is odd, broken, too long, in the wrong place, or asks for what nobody serves."""

import functools
import json

import pytest

from tests.support import fleet
from tests.support.clients import ask, chat, receipt, request
from tests.support.fleet import LOOP, WAYS, proxying
from tests.support.scripted import (
    LAST_CHUNK,
    Scripted,
    chunk,
    completion,
    until,
)

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return LOOP


@pytest.fixture(params=WAYS)
def either(request):
    """Runs a proxy with either door and transport, for what they do each in its own way."""
    return functools.partial(fleet.proxying, way=request.param)


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
