"""The ASGI types, and the three things that every door does with them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from ..errors import HomingError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]


def header(scope: Scope, name: bytes) -> str | None:
    """Returns the first value of a request header (name in lower case), or None."""
    for key, value in scope["headers"]:
        if key == name:
            text: str = value.decode("latin-1")
            return text
    return None


async def answer(send: Send, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> None:
    """Sends a whole response."""
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


async def answer_error(send: Send, error: HomingError, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
    """Sends an error in the OpenAI shape, with `Retry-After` where waiting helps."""
    extra: Headers = [(b"content-type", b"application/json"), *headers]
    if error.retry_after is not None:
        extra.append((b"retry-after", str(error.retry_after).encode()))
    await answer(send, error.status, extra, error.body())
