"""What travels to the worker and back, and what does not: the body's bytes, path and query, headers each way."""

import asyncio
import functools
import gzip
import uuid

import pytest

from tests.support import fleet
from tests.support.clients import chat, request
from tests.support.fleet import LOOP, WAYS
from tests.support.scripted import (
    LAST_CHUNK,
    Scripted,
    answers,
    chunk,
    completion,
    streams,
)

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return LOOP


@pytest.fixture(params=WAYS)
def proxying(request):
    return functools.partial(fleet.proxying, way=request.param)


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
