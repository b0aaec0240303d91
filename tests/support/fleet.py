"""The real application in this process, on a real socket, with a real Valkey; and the checks that every test shares.

Whatever a test does to it, at the end nothing is booked on any worker, no task is left, and no error was logged.
"""

import asyncio
import atexit
import contextlib
import dataclasses
import functools
import logging
import shutil
import socket
import ssl
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
import redis
from prometheus_client.parser import text_string_to_metric_families

from proxy import app
from proxy.app import Homing
from proxy.edge.listen import Server, bind, configure
from proxy.edge.ports import Outcome
from proxy.edge.upstream.limits import Limits
from proxy.edge.upstream.reference import HttpxTransport
from proxy.fleet import embedded, probes
from proxy.settings import Settings
from tests.support.clients import Client, Response, ask, chat, request
from tests.support.scripted import Scripted, until

# The loop that the product runs on.
LOOP = ("asyncio", {"use_uvloop": True})
# The product's own door and transport, and the plain ones that must do the same.
WAYS = ("fast", "plain")


@functools.cache
def store_url() -> str:
    """One Valkey for the whole run, in a folder short enough for its socket; started by whoever asks first."""
    folder = Path(tempfile.mkdtemp(prefix="homing-"))
    store = embedded.start(folder)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(store.stop)
    return store.url


# Reading the certificates takes longer than most tests do.
make_tls = functools.cache(ssl.create_default_context)


class Logged(logging.Handler):
    """Keeps what the product, the server and the loop log."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        self.errors: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        if record.levelno >= logging.ERROR or record.exc_info:
            self.errors.append(f"{record.name}: {record.getMessage()} {record.exc_info}")


@contextmanager
def logged() -> Iterator[Logged]:
    """Collects the log for as long as it is open."""
    handler = Logged()
    loggers = [logging.getLogger(name) for name in ("homing", "asyncio", "uvicorn.error")]
    levels = [logger.level for logger in loggers]
    loggers[0].setLevel(logging.INFO)
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield handler
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)


class Quiet(Server):
    """The product's server, less its signal handlers (the process belongs to the tests) and its tenths of seconds."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await until(lambda: self.should_exit, seconds=300)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await until(lambda: not self.server_state.connections and not self.server_state.tasks)
        for server in self.servers:
            await server.wait_closed()
        await self.lifespan.shutdown()


class Proxy:
    """A running proxy."""

    def __init__(self, homing: Homing, port: int, log: Logged) -> None:
        self.homing = homing
        self.port = port
        self.log = log
        self.outcomes: list[Outcome] = []
        homing.director.rooms = dataclasses.replace(homing.director.rooms, telemetry=self)

    def observe(self, outcome: Outcome) -> None:
        """Stands before the product's telemetry."""
        self.outcomes.append(outcome)
        self.homing.observe(outcome)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def results(self) -> list[object]:
        return [outcome.result for outcome in self.outcomes]

    @property
    def states(self) -> dict[str, str]:
        return {worker.id: worker.state.value for worker in self.homing.registry}

    async def connect(self) -> Client:
        return await Client.connect(self.port)

    async def ask(self, body: bytes | None = None, *, path: str = "/v1/chat/completions", headers=()) -> Response:
        """One inference request on a connection of its own."""
        return await ask(self.port, request(chat() if body is None else body, path, headers))

    async def call(self, method: str, path: str, body: bytes = b"", headers=()) -> Response:
        """One request of the control plane."""
        return await ask(self.port, request(body, path, headers, method))

    async def value(self, name: str, **labels: str) -> float | None:
        """The sum of a series over the samples that have these labels; None when there is no such sample."""
        page = (await self.call("GET", "/metrics")).body.decode()
        found = [
            sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        return sum(found) if found else None

    async def ready(self, *ids: str) -> None:
        """Waits until exactly these workers are ready."""
        await until(lambda: {one for one, state in self.states.items() if state == "ready"} == set(ids))

    async def idle(self) -> None:
        """Waits until nothing is booked, as the exporter and the registry say."""
        workers = list(self.homing.registry)
        await until(lambda: not any(worker.inflight or worker.pending_tokens for worker in workers))
        assert {worker.pending_seconds for worker in workers} <= {0.0}
        for name in ("homing_inflight_requests", "homing_pending_tokens"):
            assert await self.value(name) in (0.0, None)


def build(way: str, **given: object) -> tuple[Homing, Server]:
    """Wires the application and its server, by the fast door and transport or by the plain ones."""
    settings = Settings(**{"log_level": "error", "verify": False} | given)
    homing = Homing(settings, store_url())
    if way == "fast":
        return homing, Quiet(configure(homing.application, homing.protocol))
    homing.transport = HttpxTransport(
        Limits(settings.connect_timeout, settings.first_byte_timeout, settings.idle_timeout)
    )
    homing.director.rooms = dataclasses.replace(homing.director.rooms, transport=homing.transport)
    return homing, Quiet(configure(homing.application))


@asynccontextmanager
async def proxying(
    *workers: Scripted, way: str = "fast", keep_store: bool = False, **given: object
) -> AsyncIterator[Proxy]:
    """Runs a proxy whose static workers are `workers`, named w0, w1, …; `given` are further settings.

    Those that answer when it starts are ready when it is handed out.
    """
    if not keep_store:
        with redis.Redis.from_url(store_url()) as store:
            store.flushall()
    before = asyncio.all_tasks()
    named = tuple(f"w{place}={worker.url}" for place, worker in enumerate(workers))
    with logged() as log, contextlib.closing(bind("127.0.0.1", 0)) as listener, pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", make_tls)
        patch.setattr(probes, "READY_SECONDS", 0.2)
        patch.setattr(probes, "WAITING_SECONDS", 0.05)
        patch.setattr(probes, "TICK_SECONDS", 0.02)
        if not keep_store:
            patch.setattr(app, "END_SECONDS", 0.02)  # nobody reads what the last words to the store would say
        homing, server = build(way, **{"worker": named} | given)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        proxy = Proxy(homing, listener.getsockname()[1], log)
        try:
            await until(lambda: server.started)
            await proxy.ready(*(f"w{place}" for place, worker in enumerate(workers) if worker.is_open))
            yield proxy
            await proxy.idle()
        except BaseException:
            server.break_off()
            raise
        finally:
            server.should_exit = True
            await serving
    await until(lambda: asyncio.all_tasks() <= before)
    assert log.errors == []
