"""The contract of a transport, which the fast one and the reference both keep: what a sink hears of every turn."""

import asyncio
import socket
from collections.abc import Callable
from contextlib import asynccontextmanager

import pytest

from proxy.edge.ports import Call
from proxy.edge.upstream import wire
from proxy.edge.upstream.limits import Limits
from proxy.edge.upstream.reference import HttpxTransport
from proxy.edge.upstream.wire import WireTransport
from proxy.errors import ConnectFailed, FirstByteTimeout, ReuseFailed, WorkerDied
from tests.support.fleet import LOOP
from tests.support.scripted import (
    DONE,
    LAST_CHUNK,
    Exchange,
    Scripted,
    answers,
    chunk,
    closes,
    completion,
    hangs,
    resets,
    response,
    stream_head,
    streams,
    token,
    until,
)

pytestmark = pytest.mark.anyio
LIMITS = Limits(connect=0.3, first_byte=0.3, idle=0.3)


@pytest.fixture
def anyio_backend():
    return LOOP


class Heard:
    """A sink that keeps what it is told."""

    def __init__(self, on_data: Callable[[], None] | None = None) -> None:
        self.heads: list[tuple[int, dict[bytes, bytes]]] = []
        self.pieces: list[bytes] = []
        self.ends = 0
        self.faults: list[Exception] = []
        self.react = on_data

    @property
    def is_over(self) -> bool:
        return bool(self.ends or self.faults)

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)

    @property
    def story(self) -> tuple[int, bytes, int, list[type]]:
        status = self.heads[0][0] if self.heads else 0
        assert len(self.heads) <= 1
        return status, self.body, self.ends, [type(fault) for fault in self.faults]

    def on_head(self, status, headers) -> None:
        assert not self.is_over
        self.heads.append((status, dict(headers)))

    def on_data(self, chunk: bytes) -> None:
        assert chunk
        assert self.heads
        assert not self.is_over
        self.pieces.append(chunk)
        if self.react is not None:
            self.react()

    def on_end(self) -> None:
        assert not self.is_over
        self.ends += 1

    def on_fault(self, fault: Exception) -> None:
        assert not self.is_over
        self.faults.append(fault)


@pytest.fixture(params=[WireTransport, HttpxTransport])
def opened(request, monkeypatch):
    """Opens a transport of each kind, and closes it."""
    monkeypatch.setattr(wire, "SWEEP_SECONDS", 0.05)

    @asynccontextmanager
    async def open_one(limits: Limits = LIMITS):
        transport = request.param(limits)
        try:
            yield transport
        finally:
            await transport.close()

    return open_one


def call_of(worker: Scripted, body: bytes = b'{"a": 1}', target: bytes = b"/v1/chat/completions?x=1") -> Call:
    return Call(worker.url, target, [(b"accept", b"*/*"), (b"x-twice", b"a"), (b"x-twice", b"b")], body)


async def talk(transport, call: Call) -> Heard:
    """One call, to its end."""
    heard = Heard()
    transport.open("w0", call, heard)
    assert not heard.heads
    assert not heard.is_over
    await until(lambda: heard.is_over)
    return heard


async def warm(transport, worker: Scripted, connections: int) -> None:
    """Leaves this many kept-alive connections idle."""
    play, go = worker.play, asyncio.Event()

    async def waits(exchange: Exchange) -> None:
        await go.wait()
        exchange.send(response(200, b"{}"))

    worker.play = waits
    calls = [asyncio.create_task(talk(transport, call_of(worker))) for _ in range(connections)]
    await until(lambda: len(worker.busy) == connections)
    go.set()
    await asyncio.gather(*calls)
    worker.play = play
    worker.heard.clear()


@pytest.mark.parametrize("size", [0, 100, 200_000])
async def test_a_call_is_written_once_and_as_given(opened, size: int) -> None:
    body = bytes(range(256)) * (size // 256 + 1)
    async with Scripted() as worker, opened() as transport:
        heard = await talk(transport, call_of(worker, body[:size]))
        assert heard.story == (200, completion(), 1, [])
        told = worker.heard[0]
        assert (told.target, told.body) == ("/v1/chat/completions?x=1", body[:size])
        assert sorted((name.lower(), value) for name, value in told.headers) == [
            ("accept", "*/*"),
            ("content-length", str(size)),
            ("host", f"127.0.0.1:{worker.port}"),
            ("x-twice", "a"),
            ("x-twice", "b"),
        ]


async def test_header_names_come_in_lower_case_and_bodies_as_they_are(opened) -> None:
    async with Scripted() as worker, opened() as transport:
        worker.play = answers(b"\x1f\x8b not really", 418, [("X-Odd", "\xe9"), ("Content-Encoding", "gzip")])
        heard = await talk(transport, call_of(worker))
        assert heard.story == (418, b"\x1f\x8b not really", 1, [])
        assert heard.heads[0][1] == {b"x-odd": b"\xe9", b"content-encoding": b"gzip", b"content-length": b"13"}


async def test_a_connection_is_kept_for_the_next_call(opened) -> None:
    async with Scripted() as worker, opened() as transport:
        for play in (answers(b"{}"), streams(), answers(b"", 204, []), answers(b"{}", 500)):
            worker.play = play
            assert (await talk(transport, call_of(worker))).ends == 1
        assert len({id(told.line) for told in worker.heard}) == 1


@pytest.mark.parametrize("ending", ["connection: close", "x: y"])
async def test_a_connection_that_the_worker_ends_is_not_kept(opened, ending: str) -> None:
    async def play(exchange: Exchange) -> None:
        if ending == "x: y":
            exchange.send(f"HTTP/1.1 200 OK\r\n{ending}\r\n\r\nhello".encode())
            exchange.close()
        else:
            exchange.send(f"HTTP/1.1 200 OK\r\n{ending}\r\ncontent-length: 5\r\n\r\nhello".encode())

    async with Scripted(play=play) as worker, opened() as transport:
        for _ in range(2):
            assert (await talk(transport, call_of(worker))).story == (200, b"hello", 1, [])
        assert len({id(told.line) for told in worker.heard}) == 2
        await until(lambda: not worker.busy)


async def test_an_idle_connection_that_the_worker_closed_is_not_used(opened) -> None:
    async with Scripted() as worker, opened() as transport:
        await warm(transport, worker, 3)
        for line in worker.lines:
            line.transport.close()
        await until(lambda: all(line.closed for line in worker.lines))
        await asyncio.sleep(0.02)
        assert (await talk(transport, call_of(worker))).ends == 1
        assert worker.served == 1


@pytest.mark.parametrize("play", [resets, closes])
async def test_a_kept_connection_that_dies_under_a_call_is_told_apart(opened, play) -> None:
    async with Scripted() as worker, opened() as transport:
        await warm(transport, worker, 3)
        worker.play = play
        assert (await talk(transport, call_of(worker))).story == (0, b"", 0, [ReuseFailed])
        # What happened to one may happen to all that were idle as long: the next call gets a connection of its own.
        worker.play = answers(b"fresh")
        assert (await talk(transport, call_of(worker))).story == (200, b"fresh", 1, [])
        assert worker.heard[-1].line.requests == 1


@pytest.mark.parametrize("play", [resets, closes])
async def test_a_new_connection_that_dies_under_a_call_is_the_workers_fault(opened, play) -> None:
    async with Scripted(play=play) as worker, opened() as transport:
        assert (await talk(transport, call_of(worker))).story == (0, b"", 0, [WorkerDied])


async def test_nobody_there_is_told_apart(opened) -> None:
    async with Scripted() as worker, opened() as transport:
        await worker.refuse()
        heard = await talk(transport, call_of(worker))
        assert heard.story == (0, b"", 0, [ConnectFailed])
        assert "w0" in str(heard.faults[0])


async def test_silence_is_told_apart_by_when_it_came(opened) -> None:
    async def opens(exchange: Exchange) -> None:
        exchange.send(stream_head() + chunk(b"one"))
        await exchange.hang()

    async with Scripted(play=hangs) as worker, opened() as transport:
        assert (await talk(transport, call_of(worker))).story == (0, b"", 0, [FirstByteTimeout])
        worker.play = opens
        assert (await talk(transport, call_of(worker))).story == (200, b"one", 0, [WorkerDied])
        await until(lambda: not worker.busy)


async def test_a_paused_call_reads_nothing_and_is_not_silent(opened) -> None:
    async def play(exchange: Exchange) -> None:
        exchange.send(stream_head() + chunk(b"one"))
        await exchange.line.worker.go.wait()
        for _ in range(100):
            exchange.send(chunk(b"x" * 100_000))
        exchange.send(LAST_CHUNK)

    async with Scripted(play=play) as worker, opened() as transport:
        worker.go = asyncio.Event()
        heard = Heard()
        exchange = transport.open("w0", call_of(worker), heard)
        await until(lambda: heard.body == b"one")
        exchange.pause()
        worker.go.set()
        await asyncio.sleep(0.5)  # longer than the limit of silence
        assert len(heard.body) < 1_000_000
        assert not heard.is_over
        exchange.resume()
        await until(lambda: heard.is_over)
        assert heard.story == (200, b"one" + b"x" * 10_000_000, 1, [])


async def test_a_call_that_ends_while_paused_leaves_a_sound_connection(opened) -> None:
    whole = token("z" * 1000) + DONE

    async def play(exchange: Exchange) -> None:
        exchange.send(stream_head() + chunk(whole) + LAST_CHUNK)

    async with Scripted(play=play) as worker, opened() as transport:
        heard = Heard()
        exchange = transport.open("w0", call_of(worker), heard)
        heard.react = exchange.pause
        await until(lambda: heard.body == whole)
        await asyncio.sleep(0.02)
        exchange.resume()
        await until(lambda: heard.is_over)
        assert heard.story == (200, whole, 1, [])
        assert (await talk(transport, call_of(worker))).story == (200, whole, 1, [])


async def test_an_aborted_call_closes_its_connection_and_is_heard_no_more(opened) -> None:
    async def play(exchange: Exchange) -> None:
        exchange.send(stream_head() + chunk(b"one"))
        while True:
            await asyncio.sleep(0.01)
            exchange.send(chunk(b"more"))

    async with Scripted(play=play) as worker, opened() as transport:
        heard = Heard()
        exchange = transport.open("w0", call_of(worker), heard)
        await until(lambda: heard.body)
        exchange.abort()
        before = heard.story
        await until(lambda: not worker.busy, seconds=1)
        exchange.abort()
        assert heard.story == before
        # From inside what it hears, too.
        hasty = Heard()
        exchange = transport.open("w0", call_of(worker), hasty)
        hasty.react = exchange.abort
        await until(lambda: hasty.body and not worker.busy)
        await asyncio.sleep(0.03)
        assert hasty.story == (200, b"one", 0, [])


async def test_a_call_may_be_aborted_before_it_is_connected(opened) -> None:
    async with Scripted(play=hangs) as worker, opened() as transport:
        for delay in (None, 0, 0, 0.001, 0.002):
            heard = Heard()
            exchange = transport.open("w0", call_of(worker), heard)
            if delay is not None:
                await asyncio.sleep(delay)
            exchange.abort()
            assert heard.story == (0, b"", 0, [])
        await until(lambda: all(line.closed for line in worker.lines))


async def test_closing_tells_running_calls_and_leaves_no_connection(opened) -> None:
    async with Scripted() as worker, opened(Limits()) as transport:
        await warm(transport, worker, 2)
        worker.play = hangs
        heard = [Heard() for _ in range(4)]
        for one in heard:
            transport.open("w0", call_of(worker), one)
        await until(lambda: worker.served == 4)
        await transport.close()
        assert [one.story for one in heard] == [(0, b"", 0, [WorkerDied])] * 4
        await until(lambda: all(line.closed for line in worker.lines))


async def test_proxies_of_the_environment_are_not_asked(opened, monkeypatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "HTTPS_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{listener.getsockname()[1]}")
        async with Scripted() as worker, opened() as transport:
            assert (await talk(transport, call_of(worker))).ends == 1
        with pytest.raises(BlockingIOError):
            listener.accept()


async def test_a_kept_connection_that_has_begun_to_answer_is_the_workers_fault() -> None:
    """The fast one alone: httpx does not tell whether a byte had come."""

    async def play(exchange: Exchange) -> None:
        exchange.send(b"HTTP/1.1 200 OK\r\ncontent-ty")
        await asyncio.sleep(0.05)
        exchange.close()

    transport = WireTransport(LIMITS)
    async with Scripted() as worker:
        await warm(transport, worker, 1)
        worker.play = play
        assert (await talk(transport, call_of(worker))).story == (0, b"", 0, [WorkerDied])
        await transport.close()


async def test_a_second_answer_to_one_call_reaches_nobody() -> None:
    """The fast one alone: httpx would take what is left over for the answer to the next call."""

    async def play(exchange: Exchange) -> None:
        exchange.send(response(200, b"mine") + response(200, b"another's"))

    transport = WireTransport(LIMITS)
    async with Scripted(play=play) as worker:
        assert (await talk(transport, call_of(worker))).story == (0, b"", 0, [WorkerDied])
        worker.play = answers(b"mine too")
        assert (await talk(transport, call_of(worker))).story == (200, b"mine too", 1, [])
        await transport.close()


async def test_idle_connections_end_before_the_workers_own_limit(monkeypatch) -> None:
    monkeypatch.setattr(wire, "SWEEP_SECONDS", 0.02)
    monkeypatch.setattr(wire, "KEEP_ALIVE_SECONDS", 0.1)
    transport = WireTransport(LIMITS)
    async with Scripted() as worker:
        await warm(transport, worker, 3)
        await until(lambda: all(line.closed for line in worker.lines))
        assert repr(transport) == "<WireTransport 0 busy, 0 idle>"
        await transport.close()
