"""Runs one simulated worker as a process: its socket, its membership in a fleet, its signals.

The first SIGTERM or SIGINT lets a member drain and leave while it still serves, then ends what is left with `abort`;
the second ends the process at once.
"""

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass

import uvicorn

from workers.sim.app import Application, create_app
from workers.sim.options import OptionsRefused, SimOptions

_GRACE_SECONDS = 5
"""How long connections may take to close once every request has ended."""

_EVERY_ADDRESS = frozenset({"", "0.0.0.0", "::"})  # noqa: S104 - compared with, not bound to


@dataclass(frozen=True, slots=True)
class _Address:
    """Where to listen."""

    host: str
    port: int

    def url(self) -> str:
        """Returns the base URL of this address."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


class _Server(uvicorn.Server):
    """A server that leaves signals to its caller and tells when it is up."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Captures none."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to serve."""
        await super().startup(sockets)
        self.up.set()


def run(options: SimOptions) -> int:
    """Serves until a signal; returns the exit code.

    0 after a clean end, 1 when the address or the proxy says no, 2 for options that cannot be served, 130 when a
    second signal cut the end short.
    """
    try:
        address = _parse_address(options.listen)
        _check_reachable(options, address)
        app = create_app(options)
    except OptionsRefused as refused:
        return _fail(str(refused), 2)
    try:
        listener = _bind(address)
    except OSError as error:
        return _fail(f"cannot listen on {options.listen}: {error.strerror or error}; choose another --listen", 1)
    with listener, asyncio.Runner(loop_factory=_choose_loop()) as runner:
        bound = _Address(address.host, listener.getsockname()[1])
        return runner.run(_serve(options, app, listener, bound))


async def _serve(options: SimOptions, app: Application, listener: socket.socket, bound: _Address) -> int:
    """Serves, joins the fleet where one is named, and ends both in order."""
    stop, kill = asyncio.Event(), asyncio.Event()
    _listen_for_signals(stop, kill)
    config = uvicorn.Config(
        app,
        lifespan="on",
        log_level="warning",
        access_log=False,
        ws="none",
        timeout_graceful_shutdown=_GRACE_SECONDS,
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    killed = asyncio.create_task(kill.wait())
    await server.up.wait()
    _announce(options, app, bound)
    living = asyncio.create_task(_live(options, app, bound, stop))
    await asyncio.wait({serving, killed, living}, return_when=asyncio.FIRST_COMPLETED)
    code = living.result() if living.done() else 1
    app.engine.shut_down()
    server.should_exit = True
    living.cancel()
    await asyncio.wait({serving, killed}, return_when=asyncio.FIRST_COMPLETED)
    if kill.is_set():
        # Cut connections are what was asked for: no report of each is wanted.
        logging.getLogger("uvicorn.error").disabled = True
    server.force_exit = True
    killed.cancel()
    await asyncio.gather(serving, killed, living, return_exceptions=True)
    return 130 if kill.is_set() else code


async def _live(options: SimOptions, app: Application, bound: _Address, stop: asyncio.Event) -> int:
    """Is a member of the fleet until `stop`, or alone without a proxy; returns the exit code."""
    if options.proxy is None:
        await stop.wait()
        return 0
    # A worker that joins no fleet starts without loading an HTTP client.
    from workers.sim.member import MembershipRefused, belong

    try:
        return await belong(options.proxy, options, app, bound.url(), stop)
    except MembershipRefused as refused:
        return _fail(str(refused), 1)


def _announce(options: SimOptions, app: Application, bound: _Address) -> None:
    shape = app.shape
    sys.stdout.write(
        f"homing-worker sim: {shape.hardware.name} serving {options.model} at {bound.url()} "
        f"(block {shape.block_size:,} tokens, {shape.capacity_tokens:,} tokens of cache, "
        f"{options.time_scale:g}x time)\n"
    )
    sys.stdout.flush()


def _listen_for_signals(stop: asyncio.Event, kill: asyncio.Event) -> None:
    def note() -> None:
        (kill if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, note)


def _parse_address(listen: str) -> _Address:
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65_535:
        raise OptionsRefused(f"--listen {listen!r} is not HOST:PORT, such as 127.0.0.1:8101")
    return _Address(host.removeprefix("[").removesuffix("]") or "0.0.0.0", int(port))  # noqa: S104 - asked for


def _check_reachable(options: SimOptions, address: _Address) -> None:
    if options.proxy and options.advertise is None and address.host in _EVERY_ADDRESS:
        raise OptionsRefused(
            f"--listen {options.listen} is every address: say with --advertise URL which one the proxy can reach"
        )


def _bind(address: _Address) -> socket.socket:
    family, kind, _, _, place = socket.getaddrinfo(
        address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(2048)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def _choose_loop() -> Callable[[], asyncio.AbstractEventLoop]:
    """Takes uvloop where it is installed, which is everywhere but off Linux."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"homing-worker sim: {message}\n")
    return code
