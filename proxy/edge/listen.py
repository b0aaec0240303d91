"""The listening socket and the server on it: uvicorn, with our own manner of stopping."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import uvicorn

from ..errors import StartError
from .asgi import App

# Longer than the pauses of an agent between two turns, so that its connection is still there.
KEEP_ALIVE_SECONDS = 75
BACKLOG = 4096


def bind(host: str, port: int) -> socket.socket:
    """Binds the socket and listens, so that whoever comes next finds the address in use.

    Raises:
        StartError: the address is in use, not ours, or not allowed.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except (OSError, OverflowError) as problem:
        listener.close()
        reason = getattr(problem, "strerror", None) or str(problem)
        raise StartError(f"cannot listen on {host}:{port}: {reason}; choose another --listen") from None
    return listener


class Server(uvicorn.Server):
    """Stops on the first SIGTERM or SIGINT once running answers are out; on the second at once. Exits 0 either way."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Installs the handlers for as long as the server runs. Uvicorn's own end by raising the signal again."""
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGTERM, signal.SIGINT)
        for number in numbers:
            loop.add_signal_handler(number, self._stop)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _stop(self) -> None:
        if self.should_exit:
            self.break_off()
        self.should_exit = True

    def break_off(self) -> None:
        """Breaks every connection, so that no answer is waited for."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def configure(app: App, protocol: type[asyncio.Protocol] | Literal["httptools"] = "httptools") -> uvicorn.Config:
    """Says how the application is served: through its fast door if its protocol class is given, else as plain ASGI."""
    return uvicorn.Config(
        app,
        http=protocol,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="on",
        ws="none",
    )


def serve(app: App, protocol: type[asyncio.Protocol], listener: socket.socket) -> None:
    """Serves until a signal ends it."""
    Server(configure(app, protocol)).run(sockets=[listener])
