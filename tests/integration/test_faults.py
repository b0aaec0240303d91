"""Whoever leaves, breaks, hangs or floods: nothing stays booked, the worker is let go, and the next request is served.

What `proxying` checks at its end (nothing booked, no task left, nothing logged as an error) is part of every test here.
"""

import asyncio
import contextlib
import functools
import random
import socket

import pytest

from proxy.edge.upstream import wire
from tests.support import fleet
from tests.support.clients import Client, ask, chat, leave, request
from tests.support.fleet import LOOP, WAYS
from tests.support.scripted import (
    LAST_CHUNK,
    ROLE,
    Exchange,
    Scripted,
    adapts,
    chunk,
    completion,
    frames,
    hangs,
    resets,
    response,
    stream_head,
    token,
    until,
)

pytestmark = pytest.mark.anyio
STREAM = chat(stream=True)
MANNERS = [Client.close, Client.reset]


@pytest.fixture
def anyio_backend():
    return LOOP


@pytest.fixture(params=WAYS)
def proxying(request, monkeypatch):
    monkeypatch.setattr(wire, "SWEEP_SECONDS", 0.05)
    return functools.partial(fleet.proxying, way=request.param)


async def trickles(exchange: Exchange) -> None:
    exchange.send(stream_head() + chunk(ROLE))
    while True:
        exchange.send(chunk(token("x")))
        await asyncio.sleep(0.05)


async def begins_and_hangs(exchange: Exchange) -> None:
    exchange.send(response(200, completion())[:-20])
    await exchange.hang()


async def opens_and_hangs(exchange: Exchange) -> None:
    exchange.send(stream_head())
    await exchange.hang()


async def test_clients_that_leave_inside_a_stream_free_the_worker(proxying) -> None:
    async with Scripted(play=trickles) as worker, proxying(worker) as proxy:
        clients = [await proxy.connect() for _ in range(30)]
        for place, client in enumerate(clients):
            client.send(request(chat(f"conversation {place}", stream=True)))
        await asyncio.gather(*(client.body(token("x")) for client in clients))
        assert len(worker.busy) == 30
        for place, client in enumerate(clients):
            MANNERS[place % 2](client)
        await until(lambda: not worker.busy, seconds=2)
        await proxy.idle()
        assert proxy.results == ["client_gone"] * 30
        assert proxy.states == {"w0": "ready"}
        assert await proxy.value("homing_requests_total", result="client_gone") == 30
        worker.play = adapts
        assert (await proxy.ask()).body == completion()


@pytest.mark.parametrize("play", [hangs, begins_and_hangs])
async def test_clients_that_leave_before_an_answer_free_the_worker(proxying, play) -> None:
    async with Scripted(play=play) as worker, proxying(worker) as proxy:
        clients = [await proxy.connect() for _ in range(30)]
        for place, client in enumerate(clients):
            client.send(request(chat(f"count to {place}")))
        await until(lambda: len(worker.busy) == 30)
        assert await proxy.value("homing_inflight_requests", worker="w0") == 30
        for place, client in enumerate(clients):
            MANNERS[place % 2](client)
        await until(lambda: not worker.busy, seconds=2)
        await proxy.idle()
        assert proxy.results == ["client_gone"] * 30
        assert proxy.states == {"w0": "ready"}
        worker.play = adapts
        assert (await proxy.ask()).body == completion()


@pytest.mark.parametrize("manner", MANNERS)
async def test_a_client_that_leaves_inside_its_own_request_is_no_request(proxying, manner) -> None:
    async with Scripted() as worker, proxying(worker) as proxy:
        for part in (10, 70, -1):
            client = await proxy.connect()
            client.send(request(chat())[:part])
            await asyncio.sleep(0.01)
            await leave(client, manner)
        assert (await proxy.ask()).status == 200
        assert worker.served == 1
        assert proxy.results == ["ok"]


async def test_a_client_that_leaves_while_its_worker_is_dialled_is_forgotten(proxying) -> None:
    async with Scripted() as worker, proxying(worker, connect_timeout=30) as proxy:
        await worker.refuse()
        with deaf(worker.port):
            client = await proxy.connect()
            client.send(request(chat()))
            await until(lambda: proxy.homing.registry.get("w0").inflight == 1)
            await leave(client, Client.close)
            await until(lambda: proxy.results == ["client_gone"])
            await proxy.idle()


@contextlib.contextmanager
def deaf(port: int):
    """A port that neither takes nor refuses connections: its queue is full and nobody accepts."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(0)
        for _ in range(2):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        yield


async def test_a_worker_that_takes_no_connection_is_given_up_in_time(proxying) -> None:
    async with Scripted() as worker, proxying(worker, connect_timeout=0.2) as proxy:
        await worker.refuse()
        with deaf(worker.port):
            answer = await proxy.ask()
        assert (answer.status, answer.error["code"]) == (502, "worker_unreachable")
        assert "w0" in answer.error["message"]
        assert proxy.results == ["worker_error"]
        assert proxy.states == {"w0": "suspect"}


async def test_a_worker_that_stays_silent_is_given_up_and_let_go_first(proxying) -> None:
    async with Scripted(play=hangs) as worker, Scripted() as other, proxying(worker, first_byte_timeout=0.2) as proxy:
        answer = await proxy.ask()
        assert (answer.status, answer.error["code"]) == (504, "first_byte_timeout")
        assert "w0 sent no byte within 0.2 s" in answer.error["message"]
        await until(lambda: not worker.busy, seconds=2)
        assert (worker.served, other.served) == (1, 0)
        assert proxy.results == ["worker_error"]


async def test_a_stream_that_opens_and_hangs_is_given_up(proxying) -> None:
    async with Scripted(play=opens_and_hangs) as worker, proxying(worker, idle_timeout=0.2) as proxy:
        answer = await proxy.ask(STREAM)
        assert answer.body.startswith(b'data: {"error": {"message": "worker w0 was silent for 0.2 s')
        assert b"[DONE]" not in answer.body
        await until(lambda: not worker.busy, seconds=2)
        assert proxy.results == ["worker_error"]


async def test_a_slow_worker_is_not_a_silent_one(proxying) -> None:
    async def play(exchange: Exchange) -> None:
        exchange.send(stream_head())
        for piece in frames():
            await asyncio.sleep(0.15)
            exchange.send(chunk(piece))
        exchange.send(LAST_CHUNK)

    async with Scripted(play=play) as worker, proxying(worker, idle_timeout=0.4, first_byte_timeout=0.4) as proxy:
        answer = await proxy.ask(STREAM)
        assert answer.body == b"".join(frames())


async def test_a_client_that_does_not_read_holds_up_its_own_stream_only(proxying) -> None:
    pieces = [token("y" * 1_000_000 + str(place)) for place in range(24)]

    async def floods(exchange: Exchange) -> None:
        exchange.send(stream_head())
        for piece in pieces:
            exchange.send(chunk(piece))
        exchange.send(LAST_CHUNK)

    async with Scripted(play=floods) as worker, proxying(worker) as proxy:
        slow = await proxy.connect()
        slow.transport.pause_reading()
        slow.send(request(STREAM))
        await until(lambda: worker.served and worker.heard[0].line.transport.get_write_buffer_size())
        line = worker.heard[0].line
        # Every buffer on the way is full: what is left, most of it, waits at the worker.
        unsent = 0
        while unsent != (unsent := line.transport.get_write_buffer_size()):
            await asyncio.sleep(0.1)
        assert unsent > 4_000_000
        worker.play = adapts
        assert (await proxy.ask()).body == completion()
        slow.transport.resume_reading()
        answer = await slow.answer(30)
        assert answer.body == b"".join(pieces)
        slow.close()


async def test_a_client_that_does_not_read_and_leaves_frees_the_worker(proxying) -> None:
    async def floods(exchange: Exchange) -> None:
        exchange.send(stream_head())
        for _ in range(200):
            exchange.send(chunk(token("y" * 100_000)))

    async with Scripted(play=floods) as worker, proxying(worker) as proxy:
        slow = await proxy.connect()
        slow.transport.pause_reading()
        slow.send(request(STREAM))
        await until(lambda: worker.served and worker.heard[0].line.transport.get_write_buffer_size())
        slow.reset()
        await until(lambda: not worker.busy, seconds=2)
        await until(lambda: proxy.results == ["client_gone"])


async def test_every_abnormal_end_gives_back_what_it_took(proxying) -> None:
    async def dies(exchange: Exchange) -> None:
        exchange.send(stream_head() + chunk(ROLE))
        await asyncio.sleep(0.02)
        exchange.reset()

    async def garbles(exchange: Exchange) -> None:
        exchange.send(b"SMTP/1.0 220 not the protocol\r\n\r\n")

    async with Scripted() as worker, proxying(worker, first_byte_timeout=0.3, idle_timeout=0.3) as proxy:
        for play in (resets, dies, garbles, hangs, opens_and_hangs):
            worker.play = play
            answers = await asyncio.gather(*(proxy.ask(chat(f"{place}", stream=True)) for place in range(10)))
            assert {answer.status for answer in answers} <= {200, 502, 504}
            await proxy.idle()
        assert proxy.results == ["worker_error"] * 50
        await worker.refuse()
        assert {(await proxy.ask()).status for _ in range(10)} <= {502, 503}


async def test_a_worker_that_does_not_speak_http_is_a_clean_error(proxying) -> None:
    oddities = [
        b"SMTP/1.0 220 not the protocol\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\nabc",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\nabc",
        b"",
    ]

    def says(data: bytes):
        async def play(exchange: Exchange) -> None:
            exchange.send(data)
            exchange.close()

        return play

    async with Scripted() as worker, proxying(worker) as proxy:
        for oddity in oddities:
            worker.play = says(oddity)
            answer = await proxy.ask()
            assert (answer.status, answer.error["code"], answer.is_whole) == (502, "worker_died", True), oddity
        assert proxy.results == ["worker_error"] * len(oddities)


async def test_interim_answers_are_passed_over_and_a_body_may_end_with_its_connection(proxying) -> None:
    async def play(exchange: Exchange) -> None:
        exchange.send(b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n")
        await asyncio.sleep(0.02)
        exchange.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n" + completion()[:30])
        await asyncio.sleep(0.02)
        exchange.send(completion()[30:])
        exchange.close()

    async with Scripted(play=play) as worker, proxying(worker) as proxy:
        answer = await proxy.ask()
        assert (answer.status, answer.body, answer.is_whole) == (200, completion(), True)
        assert answer.header("link") is None


async def test_a_storm_of_requests_and_departures_leaves_nothing_behind(proxying) -> None:
    dice = random.Random(7)

    async def play(exchange: Exchange) -> None:
        await asyncio.sleep(dice.random() * 0.02)
        if dice.random() < 0.1:
            exchange.reset()
            return
        await adapts(exchange)

    async def visit(port: int, place: int) -> None:
        body = request(chat(f"conversation {place % 20}", "ok", f"turn {place}", stream=place % 2 == 0))
        for _ in range(2):
            client = await Client.connect(port)
            client.send(body)
            await asyncio.sleep(dice.random() * 0.03)
            dice.choice(MANNERS)(client)
            answer = await ask(port, body)
            assert answer.status in (200, 502)

    async with Scripted(play=play) as one, Scripted(play=play) as two, proxying(one, two) as proxy:
        await asyncio.gather(*(visit(proxy.port, place) for place in range(200)))
        await proxy.idle()
        await until(lambda: not one.busy or all(line.task.done() for line in one.busy))
        assert set(proxy.results) <= {"ok", "client_gone", "worker_error"}
        assert len(proxy.results) <= 800
        one.play = two.play = adapts
        assert (await proxy.ask()).body == completion()
