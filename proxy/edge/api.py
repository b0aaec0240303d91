"""The inference door for any ASGI server. Reads the body once, begins a journey, and carries its output."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

from ..core.prompt import Dialect
from ..errors import HomingError, WrongMethod
from .asgi import App, Headers, Message, Receive, Scope, Send, answer_error
from .guard import read_body
from .ports import Arrival, Client
from .verdicts import receipt

ROUTES = {"/v1/chat/completions": Dialect.CHAT, "/v1/completions": Dialect.COMPLETIONS}
# Output that waits for the client: above this the worker is no longer read, below a quarter of it again.
BEHIND_BYTES = 65536


class Course(Protocol):
    """A journey, as a door sees it."""

    is_over: bool

    def client_gone(self) -> None:
        """The client has left."""

    def client_behind(self) -> None:
        """The client reads too slowly."""

    def client_caught_up(self) -> None:
        """It reads again."""


class Service(Protocol):
    """What serves a request: the director."""

    def begin(self, arrival: Arrival, client: Client) -> Course:
        """Sends a request on its way."""


class Api:
    """Takes the inference routes; hands everything else on.

    Args:
        director: serves what is taken.
        rest: the application for all other routes.
        max_body_bytes: the longest body that is read.
    """

    def __init__(self, director: Service, rest: App, max_body_bytes: int) -> None:
        self._director = director
        self._rest = rest
        self._limit = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one connection scope."""
        dialect = ROUTES.get(scope["path"]) if scope["type"] == "http" else None
        if dialect is None:
            await self._rest(scope, receive, send)
        elif scope["method"] != "POST":
            problem = WrongMethod(f"{scope['path']} takes POST, not {scope['method']}.")
            await answer_error(send, problem, [*no_receipt(scope), (b"allow", b"POST")])
        else:
            await self._serve(dialect, scope, receive, send)

    async def _serve(self, dialect: Dialect, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope["state"]
        try:
            body = await read_body(scope, receive, self._limit)
        except HomingError as problem:
            # The rest of the body is not read, so the connection cannot be used again.
            await answer_error(send, problem, [*no_receipt(scope), (b"connection", b"close")])
            return
        if body is None:
            return
        target = scope["path"].encode()
        if scope.get("query_string"):
            target += b"?" + scope["query_string"]
        arrival = Arrival(state["request_id"], dialect, target, scope["headers"], body, state["received"])
        outlet = Outlet(send)
        outlet.course = self._director.begin(arrival, outlet)
        await outlet.carry(receive)


def no_receipt(scope: Scope) -> Headers:
    """Renders the headers for a request that was not placed."""
    return receipt(scope["state"]["request_id"], worker=None, reason=None, expected=None, attempts=0)


class Outlet:
    """A client behind ASGI: what a journey writes is queued here and sent as fast as the client takes it."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._messages: deque[Message] = deque()
        self._bytes = 0
        self._wake = asyncio.Event()
        self._is_ended = False
        self._is_cut = False
        self._is_behind = False
        self.course: Course | None = None

    def start(self, status: int, headers: Headers) -> None:
        """Queues the response's head."""
        self._put({"type": "http.response.start", "status": status, "headers": headers})

    def write(self, chunk: bytes) -> None:
        """Queues a piece of the body."""
        self._bytes += len(chunk)
        self._put({"type": "http.response.body", "body": chunk, "more_body": True})
        if self._bytes > BEHIND_BYTES and not self._is_behind and self.course is not None:
            self._is_behind = True
            self.course.client_behind()

    def end(self) -> None:
        """Queues the end."""
        self._is_ended = True
        self._put({"type": "http.response.body", "body": b"", "more_body": False})

    def cut(self) -> None:
        """Ends without an end: the server closes the connection."""
        self._is_ended = self._is_cut = True
        self._wake.set()

    def _put(self, message: Message) -> None:
        self._messages.append(message)
        self._wake.set()

    async def carry(self, receive: Receive) -> None:
        """Sends what is queued until the response has ended or the client has left."""
        pump = asyncio.create_task(self._pump())
        leaving = asyncio.create_task(gone(receive))
        try:
            await asyncio.wait({pump, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if self.course is not None:
                self.course.client_gone()
            leaving.cancel()
            pump.cancel()
            await asyncio.gather(pump, leaving, return_exceptions=True)

    async def _pump(self) -> None:
        while True:
            while self._messages:
                message = self._messages.popleft()
                self._bytes -= len(message.get("body", b""))
                await self._send(message)
                if self._is_behind and self._bytes <= BEHIND_BYTES // 4 and self.course is not None:
                    self._is_behind = False
                    self.course.client_caught_up()
            if self._is_ended:
                return
            self._wake.clear()
            await self._wake.wait()


async def gone(receive: Receive) -> None:
    """Returns when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
