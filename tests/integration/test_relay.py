"""Bytes in, bytes out: what passes through the proxy is what was sent, at once, and it ends as the worker ended it."""

import asyncio
import functools
import gzip
import json
import uuid

import pytest

from proxy.core.types import Usage
from tests.support import fleet
from tests.support.clients import chat, request
from tests.support.fleet import LOOP, WAYS
from tests.support.scripted import (
    DONE,
    LAST_CHUNK,
    ROLE,
    Exchange,
    Scripted,
    answers,
    chunk,
    completion,
    event,
    frames,
    response,
    stream_head,
    streams,
    token,
    until,
)

pytestmark = pytest.mark.anyio
STREAM = chat(stream=True)
RECEIPT = ("x-request-id", "x-homing-worker", "x-homing-reason", "x-homing-expected-tokens", "x-homing-attempts")


@pytest.fixture
def anyio_backend():
    return LOOP


@pytest.fixture(params=WAYS)
def proxying(request):
    return functools.partial(fleet.proxying, way=request.param)


JSON_IN_CHUNKS = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"

# A body that no parser writes out again as it came: white space, key order, numbers, escapes, a lone surrogate.
ODD_BODY = (
    b'{ "messages" : [ {"content":"caf\xc3\xa9 \\u00e9 \\ud800 \xf0\x9f\x90\xa6","role":"user"} ],\r\n\t"model":"m1",'
    b'"seed":9007199254740993,"top_p":0.95,"temperature":1e-3,"n":1.0,"tools":[{"type":"function","function":'
    b'{"name":"f","parameters":{"maximum":1234567890123456789012345}}}],"chat_template_kwargs":{"enable_thinking":'
    b'false},"x_vendor":{"deep":[null,true,-0.0]},"stream":%s }\n'
)


async def test_the_worker_gets_the_clients_bytes(proxying) -> None:
    async with Scripted(play=streams()) as worker, proxying(worker) as proxy:
        for stream in (b"true", b"false"):
            for path in ("/v1/chat/completions", "/v1/completions"):
                body, target = ODD_BODY % stream, f"{path}?a=1&b=%2F%20x&c=[1]|'&d=a+b&e=%zz&&="
                assert (await proxy.ask(body, path=target)).status == 200
                heard = worker.heard[-1]
                assert (heard.method, heard.target, heard.body) == ("POST", target, body)
                assert heard.raw.endswith(b"\r\n\r\n" + body)
        assert worker.served == 4


async def test_a_request_in_single_bytes_and_in_chunks_arrives_whole(proxying) -> None:
    async with Scripted() as worker, proxying(worker) as proxy:
        body = chat("x" * 300)
        slow = await proxy.connect()
        for byte in request(body):
            slow.send(bytes([byte]))
            await asyncio.sleep(0)
        assert (await slow.answer()).body == completion()
        chunked = await proxy.connect()
        chunked.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        for start in range(0, len(body), 50):
            chunked.send(chunk(body[start : start + 50]))
        chunked.send(LAST_CHUNK)
        assert (await chunked.answer()).body == completion()
        assert worker.bodies == [body, body]
        slow.close()
        chunked.close()


async def test_request_headers_travel_less_those_of_the_hop_and_the_keys(proxying) -> None:
    async with Scripted() as worker, proxying(worker) as proxy:
        sent = [
            ("Authorization", "Bearer key-of-the-proxy"),
            ("X-Api-Key", "key-of-the-proxy"),
            ("Cookie", "session=key-of-the-proxy"),
            ("Proxy-Authorization", "Basic key-of-the-proxy"),
            ("Connection", "keep-alive, X-Hop"),
            ("X-Hop", "1"),
            ("Keep-Alive", "timeout=5"),
            ("TE", "trailers"),
            ("Upgrade", "h2c"),
            ("Accept-Encoding", "gzip, br"),
            ("User-Agent", "agent/1"),
            ("traceparent", "00-1-2-01"),
            ("X-Session-ID", "s1"),
            ("X-Twice", "a"),
            ("X-Twice", "b"),
            ("X-Request-Id", "id-of-the-client"),
        ]
        answer = await proxy.ask(headers=sent)
        assert answer.header("x-request-id") == "id-of-the-client"
        heard = worker.heard[0]
        assert b"key-of-the-proxy" not in heard.raw
        assert sorted((name.lower(), value) for name, value in heard.headers) == sorted(
            [
                ("host", f"127.0.0.1:{worker.port}"),
                ("content-type", "application/json"),
                ("content-length", str(len(heard.body))),
                ("accept-encoding", "gzip, br"),
                ("user-agent", "agent/1"),
                ("traceparent", "00-1-2-01"),
                ("x-session-id", "s1"),
                ("x-twice", "a"),
                ("x-twice", "b"),
                ("x-request-id", "id-of-the-client"),
            ]
        )
        assert "key-of-the-proxy" not in str(proxy.outcomes) + str(proxy.log.lines)


async def test_what_the_client_did_not_ask_for_is_not_added(proxying) -> None:
    async with Scripted() as worker, proxying(worker) as proxy:
        answer = await proxy.ask()
        assert {name.lower() for name, _ in worker.heard[0].headers} == {
            "host",
            "content-type",
            "content-length",
            "x-request-id",
        }
        made = answer.header("x-request-id") or ""
        assert uuid.UUID(made).hex == made == worker.heard[0].header("x-request-id")


async def test_an_id_that_no_log_can_carry_is_replaced(proxying) -> None:
    async with Scripted() as worker, proxying(worker) as proxy:
        for unfit in ("", "a b", "x" * 129, "caf\xe9"):
            answer = await proxy.ask(headers=[("x-request-id", unfit)])
            (made,) = answer.all("x-request-id")
            assert uuid.UUID(made).hex == made
            assert [value for name, value in worker.heard[-1].headers if name == "x-request-id"] == [made]


async def test_response_headers_travel_less_those_of_the_hop(proxying) -> None:
    async with Scripted() as worker, proxying(worker) as proxy:
        told = [
            ("Content-Type", "application/json; charset=x"),
            ("Retry-After", "7"),
            ("Set-Cookie", "a=1"),
            ("Set-Cookie", "b=2"),
            ("Connection", "X-Secret-Hop, keep-alive"),
            ("X-Secret-Hop", "1"),
            ("Keep-Alive", "timeout=5"),
            ("X-Request-Id", "w-1"),
            ("X-Homing-Worker", "forged"),
            ("Server", "uvicorn"),
            ("Date", "Thu, 01 Jan 1970 00:00:00 GMT"),
            ("Vary", "Origin"),
        ]
        worker.play = answers(b'{"error": {"message": "slow down"}}', 429, told)
        answer = await proxy.ask(headers=[("x-request-id", "c-1")])
        assert answer.status == 429
        assert answer.body == b'{"error": {"message": "slow down"}}'
        assert len(answer.all("date")) == 1
        assert answer.header("date") != "Thu, 01 Jan 1970 00:00:00 GMT"
        assert sorted(pair for pair in answer.headers if pair[0] != "date") == sorted(
            [
                ("content-type", "application/json; charset=x"),
                ("content-length", "35"),
                ("retry-after", "7"),
                ("set-cookie", "a=1"),
                ("set-cookie", "b=2"),
                ("vary", "Origin"),
                ("x-request-id", "c-1"),
                ("x-homing-worker", "w0"),
                ("x-homing-reason", "only-candidate"),
                ("x-homing-expected-tokens", "0"),
                ("x-homing-attempts", "1"),
            ]
        )


async def test_a_coded_body_passes_with_its_coding(proxying) -> None:
    coded = gzip.compress(completion())
    async with Scripted() as worker, proxying(worker) as proxy:
        worker.play = answers(coded, 200, [("content-type", "application/json"), ("content-encoding", "gzip")])
        for accept in ("gzip", "identity"):
            answer = await proxy.ask(headers=[("accept-encoding", accept)])
            assert answer.body == coded
            assert answer.all("content-encoding") == ["gzip"]
            assert answer.header("content-length") == str(len(coded))


async def test_a_chunked_answer_that_is_no_stream_passes_whole(proxying) -> None:
    body = completion(text="caf\u00e9 \u4f60" * 200_000)
    assert len(body) < 4 * 1024 * 1024

    async def play(exchange: Exchange) -> None:
        exchange.send(JSON_IN_CHUNKS)
        for start in range(0, len(body), 100_000):
            exchange.send(chunk(body[start : start + 100_000]))
        exchange.send(LAST_CHUNK)

    async with Scripted(play=play) as worker, proxying(worker) as proxy:
        answer = await proxy.ask()
        assert (answer.body, answer.is_whole) == (body, True)


async def test_an_answer_too_long_to_hold_passes_whole(proxying) -> None:
    body = completion(text="y" * 5_000_000)

    async def in_chunks(exchange: Exchange) -> None:
        exchange.send(JSON_IN_CHUNKS + chunk(body) + LAST_CHUNK)

    async with Scripted() as worker, proxying(worker) as proxy:
        for play in (answers(body), in_chunks):
            worker.play = play
            answer = await proxy.ask()
            assert (answer.body == body, answer.is_whole) == (True, True)
        assert proxy.results == ["ok", "ok"]


def cut(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


WHOLE = b": keep-alive\n\n" + b"".join(frames(prompt=120, cached=96))


async def test_a_stream_is_equal_however_it_is_cut(proxying) -> None:
    async with Scripted() as worker, proxying(worker) as proxy:
        for size in (1, 7, 64, 10_000):
            worker.play = streams(*cut(WHOLE, size))
            answer = await proxy.ask(STREAM)
            assert (answer.body, answer.is_whole) == (WHOLE, True)
            assert answer.header("content-type") == "text/event-stream; charset=utf-8"
            assert answer.header("content-encoding") is None
        assert proxy.results == ["ok"] * 4
        assert {outcome.usage for outcome in proxy.outcomes} == {Usage(120, 96, 2)}


async def test_windows_line_ends_and_foreign_events_pass_too(proxying) -> None:
    whole = WHOLE.replace(b"\n", b"\r\n") + b"event: odd\r\nid: 7\r\ndata: not json\r\ndata:\xff\r\n\r\n"
    async with Scripted(play=streams(*cut(whole, 11))) as worker, proxying(worker) as proxy:
        answer = await proxy.ask(STREAM)
        assert answer.body == whole
        assert (proxy.results, proxy.outcomes[0].usage.cached_tokens) == (["ok"], 96)


async def test_headers_and_every_chunk_arrive_before_the_next_is_sent(proxying) -> None:
    go = asyncio.Queue[bytes]()

    async def play(exchange: Exchange) -> None:
        exchange.send(stream_head())
        while piece := await go.get():
            exchange.send(chunk(piece))
        exchange.send(LAST_CHUNK)

    async with Scripted(play=play) as worker, proxying(worker) as proxy:
        client = await proxy.connect()
        client.send(request(STREAM, headers=[("accept-encoding", "gzip")]))
        await until(lambda: client.response is not None)  # the worker has sent its head and nothing else
        assert client.response.header("content-encoding") is None
        so_far = b""
        for piece in [
            b": ping\n\n",
            ROLE,
            *(token(f"t{place}") for place in range(20)),
            b"data: half",
            b"-event\n\n",
            DONE,
        ]:
            go.put_nowait(piece)
            so_far += piece
            await client.body(so_far)
        assert client.response.body == so_far
        go.put_nowait(b"")
        assert (await client.answer()).is_whole
        client.close()


def breaks_after(*pieces: bytes, manner: str) -> object:
    async def play(exchange: Exchange) -> None:
        exchange.send(stream_head())
        for piece in pieces:
            exchange.send(chunk(piece))
        await broken.wait()
        getattr(exchange, manner)()

    broken = asyncio.Event()
    return play, broken


@pytest.mark.parametrize("manner", ["reset", "close"])
async def test_a_worker_that_dies_inside_a_stream_becomes_an_error_event(proxying, manner: str) -> None:
    async with Scripted() as worker, proxying(worker) as proxy:
        for last in (token("two"), token("two")[:-1], token("two")[:25]):
            worker.play, broken = breaks_after(ROLE, token("one"), last, manner=manner)
            client = await proxy.connect()
            client.send(request(STREAM))
            await client.body(last)
            broken.set()
            answer = await client.answer()
            assert answer.is_whole
            assert check_event(answer.body, ROLE + token("one") + last) == ("worker_died", "server_error")
            client.close()
        assert proxy.results == ["worker_error"] * 3
        assert worker.served == 3


def check_event(body: bytes, sent: bytes) -> tuple[str, str]:
    """What the worker sent comes first, unchanged; then one event of ours, set apart, and no end marker."""
    assert body.startswith(sent)
    added = body.removeprefix(sent)
    gap = b"" if sent.endswith(b"\n\n") else b"\n\n"
    assert added.startswith(gap + b"data: {")
    assert added.endswith(b"}\n\n")
    assert added.count(b"data:") == 1
    error = json.loads(added.strip().removeprefix(b"data: "))["error"]
    assert "w0" in error["message"]
    return error["code"], error["type"]


async def test_a_worker_that_falls_silent_inside_a_stream_is_given_up(proxying) -> None:
    play, _ = breaks_after(ROLE, token("one"), manner="close")
    async with Scripted(play=play) as worker, proxying(worker, idle_timeout=0.2) as proxy:
        answer = await proxy.ask(STREAM)
        assert answer.body.startswith(ROLE + token("one") + b'data: {"error": ')
        assert b"silent for 0.2 s" in answer.body
        assert b"[DONE]" not in answer.body
        await until(lambda: not worker.busy)
        assert proxy.results == ["worker_error"]


async def test_a_stream_that_ends_without_its_marker_ends_so(proxying) -> None:
    pieces = frames()[:2]
    async with Scripted(play=streams(*pieces)) as worker, proxying(worker) as proxy:
        answer = await proxy.ask(STREAM)
        assert (answer.body, answer.is_whole) == (b"".join(pieces), True)
        assert proxy.results == ["incomplete"]


QUIET = [
    ([ROLE, token("a"), token("", "abort"), DONE], "worker_aborted"),
    ([ROLE, token("a"), event(error={"message": "EngineCore", "code": 500}), DONE], "worker_error"),
    ([ROLE, event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}]), DONE], "ok"),
    ([DONE], "ok"),
    ([], "incomplete"),
]


async def test_an_engines_quiet_failures_pass_and_are_seen(proxying) -> None:
    async with Scripted() as worker, proxying(worker) as proxy:
        for pieces, _ in QUIET:
            worker.play = sends(stream_head() + b"".join(map(chunk, pieces)) + LAST_CHUNK)
            answer = await proxy.ask(STREAM)
            assert (answer.body, answer.is_whole) == (b"".join(pieces), True)
        assert proxy.results == [result for _, result in QUIET]


def sends(data: bytes, then: str | None = None):
    async def play(exchange: Exchange) -> None:
        exchange.send(data)
        if then is not None:
            getattr(exchange, then)()

    return play


async def test_a_worker_that_dies_inside_a_whole_answer_becomes_a_clean_error(proxying) -> None:
    # A reset overtakes what was sent; whichever is seen first, no answer was whole.
    plays = [
        sends(data, then)
        for data in (response(200, completion())[:-5], JSON_IN_CHUNKS + chunk(completion()))
        for then in ("close", "reset")
    ]
    async with Scripted() as worker, proxying(worker) as proxy:
        for play in plays:
            worker.play = play
            answer = await proxy.ask()
            assert (answer.status, answer.error["code"], answer.is_whole) == (502, "worker_died", True)
            assert answer.header("x-homing-worker") == "w0"
        assert proxy.results == ["worker_error"] * 4
        assert worker.served == 4


async def test_a_stream_with_a_length_that_breaks_off_is_told_too(proxying) -> None:
    sent = ROLE + token("one")
    told = response(200, sent + DONE, [("content-type", "text/event-stream")])
    async with Scripted(play=sends(told.removesuffix(DONE), "close")) as worker, proxying(worker) as proxy:
        answer = await proxy.ask(STREAM)
        assert check_event(answer.body, sent) == ("worker_died", "server_error")
        assert answer.is_whole
        assert proxy.results == ["worker_error"]


JSON = ("content-type", "application/json")
ERRORS = [
    (400, b'{"error":{"message":"This model\'s maximum context length is 16384 tokens.","code":400}}', [JSON]),
    (404, b'{"detail":"Not Found"}', [JSON]),
    (422, b"plain words", [("content-type", "text/plain")]),
    (429, b'{"error":{"message":"busy"}}', [JSON, ("retry-after", "7")]),
    (500, b"", []),
    (503, b'{"error":{"message":"The engine is currently busy"}}', [JSON, ("retry-after", "3")]),
]


async def test_a_workers_error_comes_as_it_is(proxying) -> None:
    async with Scripted() as worker, proxying(worker) as proxy:
        for is_stream in (True, False):
            for status, body, headers in ERRORS:
                worker.play = answers(body, status, headers)
                answer = await proxy.ask(chat(stream=is_stream))
                assert (answer.status, answer.body) == (status, body)
                assert set(headers) <= set(answer.headers)
                assert [name for name in RECEIPT if len(answer.all(name)) != 1] == []
        assert proxy.results == [
            "client_error" if status < 500 else "worker_error" for _ in (0, 1) for status, _, _ in ERRORS
        ]
        assert worker.served == 2 * len(ERRORS)
        assert proxy.states == {"w0": "ready"}


async def test_usage_is_read_from_a_whole_answer_and_absent_is_unknown(proxying) -> None:
    async with Scripted() as worker, proxying(worker) as proxy:
        worker.plays += [answers(completion(90, 64)), answers(completion(90, None)), answers(b"<html>")]
        for _ in range(3):
            assert (await proxy.ask()).status == 200
        assert [outcome.usage for outcome in proxy.outcomes] == [Usage(90, 64, 2), Usage(90, None, 2), Usage()]


async def test_one_connection_serves_many_requests_in_turn(proxying) -> None:
    async with Scripted() as worker, proxying(worker) as proxy:
        client = await proxy.connect()
        for place in range(5):
            worker.play = streams() if place % 2 else answers(completion(text=str(place)))
            answer = await client.exchange(request(chat(stream=bool(place % 2))))
            assert answer.body == (b"".join(frames()) if place % 2 else completion(text=str(place)))
        assert proxy.results == ["ok"] * 5
        assert len({id(heard.line) for heard in worker.heard}) == 1
        client.close()
