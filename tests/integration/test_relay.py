"""Bytes in, bytes out: what passes through the proxy is what was sent, at once, and it ends as the worker ended it."""

import asyncio
import functools
import json

import pytest

from proxy.core.types import Usage
from tests.support import fleet
from tests.support.clients import chat, receipt, request
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


@pytest.fixture
def anyio_backend():
    return LOOP


@pytest.fixture(params=WAYS)
def proxying(request):
    return functools.partial(fleet.proxying, way=request.param)


JSON_IN_CHUNKS = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"


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
                assert receipt(answer)[0] == "w0"
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
