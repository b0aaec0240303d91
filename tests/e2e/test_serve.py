"""`python -m proxy` from the outside: what it says when it cannot start, and how it ends."""

import asyncio
import signal
import socket
import sys
from pathlib import Path

import pytest

from proxy.app import static_workers
from proxy.errors import StartError
from tests.support.clients import Client, chat, request
from tests.support.fleet import LOOP
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
    stream_head,
    until,
)
from tests.support.serving import free_port, run, serving, short_folder

pytestmark = pytest.mark.anyio
STREAM = chat(stream=True)


@pytest.fixture
def anyio_backend():
    return LOOP


@pytest.fixture
def state():
    with short_folder() as folder:
        yield folder


def test_help_and_version_say_what_there_is() -> None:
    told = run("--help")
    assert (told.returncode, told.stderr) == (0, "")
    assert "serve" in told.stdout
    told = run("serve", "--help")
    assert (told.returncode, told.stderr) == (0, "")
    for flag in ("--listen", "--worker", "--store-url", "--state-dir", "--max-body-bytes", "--first-byte-timeout"):
        assert flag in told.stdout
    told = run("version")
    assert (told.returncode, told.stdout.split()[0]) == (0, "homing")


CANNOT_START = [
    (
        2,
        ["--store-url", "redis://localhost:port"],
        {},
        "--store-url: Port could not be cast to integer value as 'port'",
    ),
    (2, ["--worker", "http://x y:1"], {}, "--worker 'http://x y:1'"),
    (2, [], {"HOMING_STORE": "embedded"}, "unknown environment variable HOMING_STORE; did you mean HOMING_STORE_URL?"),
    (2, [], {"HOMING_FLEET_SEED": "not-a-number-7"}, "HOMING_FLEET_SEED: must be a whole number"),
    (1, ["--listen", "192.0.2.1:8080"], {}, "cannot listen on 192.0.2.1:8080: "),
]


@pytest.mark.parametrize(("code", "arguments", "extra", "said"), CANNOT_START)
def test_what_cannot_start_says_so_in_one_line(state: Path, code, arguments, extra, said) -> None:
    listen = [] if "--listen" in arguments else ["--listen", f"127.0.0.1:{free_port()}"]
    told = run("serve", *listen, "--state-dir", str(state), *arguments, **extra)
    assert (told.returncode, told.stdout) == (code, ""), told.stderr
    assert len(told.stderr.splitlines()) == 1, told.stderr
    assert told.stderr.startswith(f"homing: {said}")
    assert "not-a-number-7" not in told.stderr


NO_WORKERS = [
    (("ftp://x",), "--worker 'ftp://x': url 'ftp://x' is not a worker's base URL"),
    (("a=http://h:1", "a=http://h:2"), "--worker 'a=http://h:2': this name is given twice"),
    (("http://h:1", "http://h:1/"), "--worker 'http://h:1/': this URL is given twice"),
    (("a b=http://h:1",), "--worker 'a b=http://h:1': a name has 1 to 64"),
    (("http://h:1/v1",), "--worker 'http://h:1/v1': url 'http://h:1/v1' is not a worker's base URL"),
]


@pytest.mark.parametrize(("named", "said"), NO_WORKERS)
def test_workers_that_cannot_be_named_so_are_a_mistake_of_use(named: tuple[str, ...], said: str) -> None:
    with pytest.raises(StartError) as caught:
        static_workers(named)
    assert str(caught.value).startswith(said)
    assert caught.value.exit_code == 2


def test_a_state_folder_that_cannot_be_is_said_in_one_line(state: Path) -> None:
    (state / "file").write_text("")
    for folder, code in ((state / "file", 1), (state / ("x" * 100), 2)):
        told = run("serve", "--listen", f"127.0.0.1:{free_port()}", "--state-dir", str(folder))
        assert (told.returncode, len(told.stderr.splitlines())) == (code, 1), told.stderr
        assert str(folder) in told.stderr
        assert "--state-dir" in told.stderr


def test_an_address_in_use_is_said_in_one_line(state: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        told = run("serve", "--listen", address, "--state-dir", str(state))
    assert (told.returncode, len(told.stderr.splitlines())) == (1, 1), told.stderr
    assert f"cannot listen on {address}: Address already in use" in told.stderr


async def test_two_that_start_at_once_on_one_address_do_not_both_serve(state: Path) -> None:
    port = free_port()
    with serving(state, port) as one, serving(state, port) as two:
        await until(lambda: one.process.poll() is not None or two.process.poll() is not None, 30)
        lost, won = (one, two) if one.process.poll() is not None else (two, one)
        assert await lost.end() == 1
        assert len(lost.stderr.splitlines()) == 1
        await won.up()
        won.signal(signal.SIGTERM)
        assert await won.end() == 0


def slowly(go: asyncio.Event):
    """A play that sends the rest of its stream when it may."""

    async def play(exchange: Exchange) -> None:
        exchange.send(stream_head() + chunk(frames()[0]))
        await go.wait()
        for piece in frames()[1:]:
            exchange.send(chunk(piece))
        exchange.send(LAST_CHUNK)

    return play


async def test_the_first_signal_waits_for_running_answers(state: Path) -> None:
    go = asyncio.Event()
    async with Scripted(play=slowly(go)) as worker:
        with serving(state, free_port(), "--worker", f"w0={worker.url}", HOMING_VERIFY="false") as proxy:
            await proxy.ready()
            running, idle = await Client.connect(proxy.port), await Client.connect(proxy.port)
            running.send(request(STREAM))
            await running.body(ROLE)
            proxy.signal(signal.SIGTERM)
            await until(lambda: idle.closed is not None)
            with pytest.raises(ConnectionRefusedError):
                await Client.connect(proxy.port)
            assert proxy.process.poll() is None
            assert running.closed is None
            go.set()
            answer = await running.answer()
            assert (answer.body, answer.is_whole) == (b"".join(frames()), True)
            assert await proxy.end() == 0
            await until(lambda: proxy.stores() == [])
            assert '"result":"ok"' in proxy.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_second_signal_waits_for_nothing(state: Path, number: signal.Signals) -> None:
    async with Scripted(play=slowly(asyncio.Event())) as worker:
        with serving(state, free_port(), "--worker", f"w0={worker.url}", HOMING_VERIFY="false") as proxy:
            await proxy.ready()
            stream, whole = await Client.connect(proxy.port), await Client.connect(proxy.port)
            stream.send(request(STREAM))
            await stream.body(ROLE)
            worker.play = hangs
            whole.send(request(chat("never answered")))
            await until(lambda: worker.served == 2)
            proxy.signal(number)
            await until(lambda: not proxy._answers())
            proxy.signal(number)
            assert await proxy.end(5) == 0
            await until(lambda: stream.closed is not None and whole.closed is not None)
            assert b"[DONE]" not in stream.received
            assert whole.received == b""
            await until(lambda: not worker.busy)
            await until(lambda: proxy.stores() == [])


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
async def test_a_killed_proxy_leaves_no_store_behind(state: Path) -> None:
    with serving(state, free_port()) as proxy:
        await proxy.up()
        assert len(proxy.stores()) == 1
        proxy.signal(signal.SIGKILL)
        await proxy.end()
        await until(lambda: proxy.stores() == [])


async def test_a_store_that_is_away_stops_no_request(state: Path) -> None:
    async with Scripted(play=adapts) as worker:
        away = ["--store-url", f"redis://127.0.0.1:{free_port()}/0", "--worker", f"w0={worker.url}"]
        with serving(state, free_port(), *away, HOMING_VERIFY="false") as proxy:
            await proxy.ready()
            assert (await proxy.ask()).body == completion()
            proxy.signal(signal.SIGTERM)
            assert await proxy.end() == 0


async def test_bad_input_leaves_no_trace_on_stderr_but_its_lines(state: Path) -> None:
    async with Scripted(play=adapts) as worker:
        named = ["--worker", f"w0={worker.url}", "--max-body-bytes", "2000"]
        environment = {"HOMING_VERIFY": "false", "HOMING_JOIN_TOKEN": "t", "HTTP_PROXY": "http://127.0.0.1:1"}
        with serving(state, free_port(), *named, **environment) as proxy:
            await proxy.ready()
            for body in (b"", b"{", b"[]", b'{"model": 5}', b"\xff" * 50, b"[" * 1900, b"x" * 3000, chat(model="nope")):
                assert 400 <= (await proxy.ask(body)).status < 500
            for data in (b"\x16\x03\x01\x02\x00\x01", b"GET\r\n\r\n", request(b"", "/workers", method="POST")):
                client = await Client.connect(proxy.port)
                client.send(data)
                await until(lambda client=client: client.closed is not None or client.response is not None)
                client.close()
            for manner in (Client.close, Client.reset):
                client = await Client.connect(proxy.port)
                client.send(request(STREAM)[:-5])
                manner(client)
            assert (await proxy.ask()).body == completion()
            proxy.signal(signal.SIGTERM)
            assert await proxy.end() == 0
            assert '"result":"client_error"' in proxy.stderr
