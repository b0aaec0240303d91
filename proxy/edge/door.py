"""The fast inference door: a uvicorn protocol class that takes the inference routes before ASGI's cost arises.

Everything else, and whatever is unusual (pipelined, HTTP/1.0, `Expect`), goes on to the application, whose own door
serves the same routes through the same director.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from ..core.prompt import Dialect
from ..errors import HomingError
from .api import ROUTES, Course, Service
from .asgi import Headers
from .guard import REQUEST_ID, too_large
from .ports import Arrival
from .verdicts import receipt

# How long a client that was refused may go on sending before its connection is closed.
LINGER_SECONDS = 5.0
PATHS = {path.encode(): dialect for path, dialect in ROUTES.items()}


def make_protocol(director: Service, clock: Any, max_body_bytes: int) -> type[HttpToolsProtocol]:
    """Returns the protocol class for `uvicorn.Config(http=…)`."""

    class Protocol(Door):
        service = director
        limit = max_body_bytes
        now = staticmethod(clock)

    return Protocol


class Door(HttpToolsProtocol):
    """One client connection."""

    service: Service
    limit: int
    passage: Passage | None = None

    @staticmethod
    def now() -> float:
        """A steady clock, in seconds; set by `make_protocol`."""
        raise NotImplementedError

    def on_headers_complete(self) -> None:
        """Takes an inference request, or leaves it to the application."""
        path, _, _ = self.url.partition(b"?")
        dialect = PATHS.get(path)
        is_free = self.cycle is None or self.cycle.response_complete
        if (
            dialect is None
            or not is_free
            or self.pipeline
            or self.expect_100_continue
            or self.root_path
            or self.parser.get_method() != b"POST"
            or self.parser.get_http_version() != "1.1"
        ):
            super().on_headers_complete()
            return
        self.passage = Passage(self, dialect, keep_alive=self.parser.should_keep_alive())
        # Uvicorn asks its current cycle whether the connection is busy: the passage answers in its place.
        self.cycle = self.passage  # type: ignore[assignment]
        self.passage.check_length()

    def on_body(self, body: bytes) -> None:
        """Takes a piece of the request's body."""
        passage = self._current()
        if passage is not None:
            passage.take(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is whole."""
        passage = self._current()
        if passage is not None:
            passage.depart()
        else:
            super().on_message_complete()

    def _current(self) -> Passage | None:
        """Returns the passage if what is being parsed belongs to it."""
        cycle: object = self.cycle
        return self.passage if cycle is self.passage else None

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone."""
        passage, self.passage = self.passage, None
        super().connection_lost(exc)
        if passage is not None:
            passage.leave()

    def pause_writing(self) -> None:
        """The client reads too slowly."""
        super().pause_writing()
        if self.passage is not None and self.passage.course is not None:
            self.passage.course.client_behind()

    def resume_writing(self) -> None:
        """The client reads again."""
        super().resume_writing()
        if self.passage is not None and self.passage.course is not None:
            self.passage.course.client_caught_up()


class NoEvent:
    """Stands in for the event that uvicorn's own cycle waits on; nobody waits on a passage."""

    def set(self) -> None:
        """Does nothing."""


class Passage:
    """One request through the door: a journey's client, and what uvicorn takes for its current cycle."""

    __slots__ = (
        "_dialect",
        "_door",
        "_headers",
        "_is_chunked",
        "_pieces",
        "_received",
        "_request_id",
        "_size",
        "_target",
        "course",
        "disconnected",
        "keep_alive",
        "message_event",
        "response_complete",
    )

    def __init__(self, door: Door, dialect: Dialect, *, keep_alive: bool) -> None:
        self._door = door
        self._dialect = dialect
        self._received = door.now()
        self._headers = door.headers
        self._target = door.url
        self._pieces: list[bytes] = []
        self._size = 0
        self._is_chunked = False
        self._request_id = ""
        self.course: Course | None = None
        self.keep_alive = keep_alive
        self.response_complete = False
        self.disconnected = False
        self.message_event = NoEvent()

    def check_length(self) -> None:
        """Refuses a body that is announced to be over the limit before it comes."""
        for name, value in self._headers:
            if name == b"content-length" and int(value) > self._door.limit:
                self._refuse(too_large(int(value), self._door.limit))

    def take(self, piece: bytes) -> None:
        """Takes a piece of the body, up to the limit."""
        self._size += len(piece)
        if self._size <= self._door.limit:
            self._pieces.append(piece)
        elif not self.response_complete:
            self._refuse(too_large(self._size, self._door.limit))

    def depart(self) -> None:
        """Begins the journey."""
        if self.response_complete:
            self._door.transport.close()
            return
        pieces = self._pieces
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        self._pieces = []
        arrival = Arrival(self._identify(), self._dialect, self._target, self._headers, body, self._received)
        course = self._door.service.begin(arrival, self)
        if not self.response_complete:
            self.course = course

    def leave(self) -> None:
        """The client has gone."""
        course, self.course = self.course, None
        if course is not None:
            course.client_gone()

    def start(self, status: int, headers: Headers) -> None:
        """Sends the response's head."""
        door = self._door
        lines = [STATUS_LINE[status]]
        self._is_chunked = True
        for name, value in (*door.server_state.default_headers, *headers):
            if name == b"content-length":
                self._is_chunked = False
            lines += (name, b": ", value, b"\r\n")
        if self._is_chunked:
            lines.append(b"transfer-encoding: chunked\r\n")
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        door.transport.write(b"".join(lines))

    def write(self, chunk: bytes) -> None:
        """Sends a piece of the body."""
        self._door.transport.write(b"%x\r\n%b\r\n" % (len(chunk), chunk) if self._is_chunked else chunk)

    def end(self) -> None:
        """Completes the response and frees the connection."""
        door = self._door
        if self._is_chunked:
            door.transport.write(b"0\r\n\r\n")
        self._finish()
        if not self.keep_alive:
            door.transport.close()
        door.on_response_complete()

    def cut(self) -> None:
        """Closes the connection: the client sees that the response is not whole."""
        self._finish()
        self._door.transport.close()

    def _finish(self) -> None:
        self.response_complete = True
        self.course = None
        if self._door.passage is self:
            self._door.passage = None

    def _identify(self) -> str:
        if not self._request_id:
            given = next((value.decode("latin-1") for name, value in self._headers if name == b"x-request-id"), "")
            self._request_id = given if REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
        return self._request_id

    def _refuse(self, problem: HomingError) -> None:
        body = problem.body()
        self.keep_alive = False  # the rest of the body is not kept, so the connection cannot be used again
        headers: Headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        headers += receipt(self._identify(), worker=None, reason=None, expected=None, attempts=0)
        self._pieces = []
        self.start(problem.status, headers)
        self.write(body)
        self.response_complete = True
        # Closing under a client that still sends would reset the connection, and with it the answer on its way.
        transport = self._door.transport
        transport.write_eof()
        asyncio.get_running_loop().call_later(LINGER_SECONDS, transport.close)
