"""One HTTP/1.1 connection to a worker: what is sent, and what is read from it, call after call."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

import httptools

from ...errors import ReuseFailed, WorkerDied
from .limits import describe

if TYPE_CHECKING:
    from .wire import Pool, WireCall

# Below this a request goes out as one buffer; above it the body is handed to the socket as it is, uncopied.
JOINED_BYTES = 16384
INFORMATIONAL = range(100, 200)


class Connection(asyncio.Protocol):
    """One connection to a worker; serves one call after another."""

    __slots__ = (
        "_has_length",
        "_headers",
        "_is_complete",
        "_is_reusable",
        "_parser",
        "_pieces",
        "_status",
        "has_heard",
        "idle_since",
        "is_reused",
        "on_body",
        "pool",
        "running",
        "transport",
    )

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.transport: asyncio.Transport = None  # type: ignore[assignment]  # set before anything else is called
        self.running: WireCall | None = None
        self.idle_since = 0.0
        self.is_reused = False
        self.has_heard = False
        self._pieces: list[bytes] = []
        # The parser calls the list's own method: no Python frame per piece of body.
        self.on_body = self._pieces.append
        self._headers: list[tuple[bytes, bytes]] = []
        self._status: int | None = None
        self._is_complete = False
        self._has_length = False
        self._is_reusable = True
        self._parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keeps the transport."""
        self.transport = transport  # type: ignore[assignment]

    def start(self, running: WireCall, *, is_reused: bool) -> None:
        """Sends a call."""
        self.running, running.connection = running, self
        self.is_reused = is_reused
        self.has_heard = self._is_complete = self._has_length = False
        self._is_reusable = True
        self._status = None
        running.touched = True
        call = running.call
        head = [b"POST ", self.pool.prefix, call.target, b" HTTP/1.1\r\nhost: ", self.pool.authority]
        for name, value in call.headers:
            head += (b"\r\n", name, b": ", value)
        head.append(b"\r\ncontent-length: %d\r\n\r\n" % len(call.body))
        if len(call.body) <= JOINED_BYTES:
            head.append(call.body)
            self.transport.write(b"".join(head))
        else:
            self.transport.writelines([b"".join(head), call.body])
        if running.is_paused:
            self.transport.pause_reading()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collects one header; names in lower case."""
        name = name.lower()
        if name in (b"content-length", b"transfer-encoding"):
            self._has_length = True
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Notes the status; interim answers (1xx) are passed over."""
        status = self._parser.get_status_code()
        if self._is_complete:
            raise ValueError("a second answer to one call")  # its body must not pass for this answer's
        if status in INFORMATIONAL:
            self._headers = []
        else:
            self._status = status

    def on_message_complete(self) -> None:
        """Notes the end, unless it is that of an interim answer."""
        if self._status is not None or self.has_heard:
            self._is_complete = True
            self._is_reusable = self._is_reusable and self._parser.should_keep_alive()

    def data_received(self, data: bytes) -> None:
        """Parses what came, then tells: head, body, end."""
        running = self.running
        if running is None:
            self.transport.abort()  # nobody asked
            return
        running.touched = True
        self.is_reused = False  # it lives: what goes wrong from here on is no matter of its having been idle
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as problem:
            running.fail(WorkerDied(f"worker {running.worker_id} sent no valid HTTP ({describe(problem)})"))
            return
        sink = running.sink
        if sink is None:
            return
        if self._status is not None:
            status, self._status = self._status, None
            headers, self._headers = self._headers, []
            self.has_heard = True
            sink.on_head(status, headers)
        pieces = self._pieces
        if pieces:
            chunk = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            pieces.clear()
            if running.sink is not None:
                sink.on_data(chunk)
        if self._is_complete and running.sink is not None:
            self._finish(running)

    def _finish(self, running: WireCall) -> None:
        sink = running.release()
        self.running = None
        if self._is_reusable:
            if running.is_paused:
                self.transport.resume_reading()
            self.idle_since = asyncio.get_running_loop().time()
            self.pool.idle.append(self)
        else:
            self.transport.close()
        if sink is not None:
            sink.on_end()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone: idle, or under a call."""
        running, self.running = self.running, None
        if running is None:
            with suppress(ValueError):  # it was closed by the pool
                self.pool.idle.remove(self)
            return
        if self.has_heard and not self._has_length and exc is None:
            sink = running.release()  # an answer without a length ends with its connection
            if sink is not None:
                sink.on_end()
            return
        running.connection = None
        why = describe(exc) if exc is not None else "it closed the connection"
        if self.has_heard:
            running.fail(WorkerDied(f"worker {running.worker_id} broke off its answer ({why})"))
        elif self.is_reused:
            self.pool.drop_idle()  # they have been idle for as long: the next try gets a connection of its own
            running.fail(ReuseFailed(f"worker {running.worker_id} closed an idle connection ({why})"))
        else:
            running.fail(WorkerDied(f"worker {running.worker_id} broke the connection before it answered ({why})"))
