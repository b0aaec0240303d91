"""The first and last to see a request: gives it an id, notes when it came, and keeps the body within its limit.

Pure ASGI: nothing wraps the response.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable

from ..errors import TooLarge
from .asgi import App, Message, Receive, Scope, Send, header

# What the engine and every log can carry; anything else is replaced by an id of ours.
REQUEST_ID = re.compile(r"[!-~]{1,128}")


class Guard:
    """Wraps the whole application.

    Args:
        app: what is guarded. Finds `request_id` and `received` (seconds on `clock`) in the scope's `state`.
        clock: a steady clock.
    """

    def __init__(self, app: App, clock: Callable[[], float]) -> None:
        self._app = app
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one connection scope."""
        if scope["type"] == "http":
            given = header(scope, b"x-request-id")
            state = scope.setdefault("state", {})
            state["request_id"] = given if given and REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
            state["received"] = self._clock()
        await self._app(scope, receive, send)


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes | None:
    """Reads a request body of at most `limit` bytes. None: the client left before it was whole.

    Raises:
        TooLarge: it is longer, by its declared length or in fact.
    """
    declared = header(scope, b"content-length")
    if declared is not None and declared.isdigit() and int(declared) > limit:
        raise too_large(int(declared), limit)
    pieces: list[bytes] = []
    size = 0
    while True:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            return None
        piece: bytes = message.get("body", b"")
        size += len(piece)
        if size > limit:
            raise too_large(size, limit)
        pieces.append(piece)
        if not message.get("more_body", False):
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def too_large(size: int, limit: int) -> TooLarge:
    """Builds the error for a body over the limit."""
    return TooLarge(f"The request body has {size} bytes or more; the limit is {limit}. See --max-body-bytes.")
