"""The inference door: raw ASGI. Reads the body once, hands it to the director, and watches for the client leaving."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Protocol

from ..core.prompt import Dialect
from ..errors import HomingError
from .asgi import App, Receive, Scope, Send, answer, answer_error
from .director import Arrival, receipt
from .guard import read_body

ROUTES = {"/v1/chat/completions": Dialect.CHAT, "/v1/completions": Dialect.COMPLETIONS}


class Service(Protocol):
    """What serves a request: the director."""

    async def serve(self, arrival: Arrival, send: Send) -> None:
        """Answers one request; a cancellation means that the client has gone."""


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
            body = b'{"detail":"Method Not Allowed"}'
            await answer(send, 405, [(b"content-type", b"application/json"), (b"allow", b"POST")], body)
        else:
            await self._serve(dialect, scope, receive, send)

    async def _serve(self, dialect: Dialect, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope["state"]
        try:
            body = await read_body(scope, receive, self._limit)
        except HomingError as problem:
            nothing = receipt(state["request_id"], worker=None, reason=None, expected=None, attempts=0)
            # The rest of the body is not read, so the connection cannot be used again.
            await answer_error(send, problem, [*nothing, (b"connection", b"close")])
            return
        if body is None:
            return
        query = b"?" + scope["query_string"] if scope.get("query_string") else b""
        path = scope["path"] + query.decode("latin-1")
        arrival = Arrival(state["request_id"], dialect, path, scope["headers"], body, state["received"])
        await until_gone(self._director.serve(arrival, send), receive)


async def until_gone(work: Coroutine[None, None, None], receive: Receive) -> None:
    """Runs the work until it is done or the client has left, whichever is first; then the work is cancelled."""
    serving = asyncio.create_task(work)
    leaving = asyncio.create_task(gone(receive))
    try:
        await asyncio.wait({serving, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
        if not serving.done():
            serving.cancel()
        await asyncio.gather(serving, leaving, return_exceptions=True)


async def gone(receive: Receive) -> None:
    """Returns when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
