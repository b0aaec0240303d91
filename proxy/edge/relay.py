"""The pump: a worker's bytes to the client, read beside the way but never altered.

A stream's chunks leave before they are understood. An answer that is no stream comes in one piece anyway; it is held
until it is whole, so that a worker that dies inside it becomes a clean error and not a broken transfer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..core.stream import StreamScanner, read_answer
from ..core.types import Usage
from ..errors import HomingError
from .asgi import Headers, Send
from .headers import to_client
from .ports import Answer

# An answer that is no stream is held up to here; a longer one is passed on as it comes.
HELD_BYTES = 4 * 1024 * 1024


@dataclass(slots=True)
class Relayed:
    """What the relay saw. `result` is one of the closed list in docs/reference/metrics.md."""

    result: str = "internal"
    usage: Usage = field(default_factory=Usage)
    bytes_out: int = 0
    error: str | None = None


class Relay:
    """Sends one answer to one client.

    Args:
        send: the client's side.
        extra: headers of ours for the response.
        on_content: called once, when the first content token has been sent.
    """

    def __init__(self, send: Send, extra: Headers, on_content: Callable[[], None]) -> None:
        self._send = send
        self._extra = extra
        self._on_content = on_content
        self.has_started = False
        self.relayed = Relayed()

    async def run(self, answer: Answer) -> None:
        """Pumps the whole answer.

        Raises:
            WorkerDied: it broke off; if `has_started`, the client has been told inside the stream.
        """
        kind = next((value for name, value in answer.headers if name.lower() == b"content-type"), b"")
        if kind.startswith(b"text/event-stream"):
            await self._stream(answer)
        else:
            await self._whole(answer)

    async def _start(self, answer: Answer) -> None:
        headers = [*to_client(answer.headers), *self._extra]
        self.has_started = True
        await self._send({"type": "http.response.start", "status": answer.status, "headers": headers})

    async def _body(self, chunk: bytes, *, more: bool) -> None:
        self.relayed.bytes_out += len(chunk)
        await self._send({"type": "http.response.body", "body": chunk, "more_body": more})

    async def _stream(self, answer: Answer) -> None:
        scanner = StreamScanner()
        last = b"\n\n"
        await self._start(answer)
        try:
            async for chunk in answer.chunks():
                await self._body(chunk, more=True)
                awaited = not scanner.has_content
                scanner.feed(chunk)
                if awaited and scanner.has_content:
                    self._on_content()
                last = (last + chunk)[-2:]
        except HomingError as problem:
            # An event of ours, set apart from what was cut; never an end marker, for the worker sent none.
            gap = b"" if last == b"\n\n" else b"\n\n"
            await self._body(gap + b"data: " + problem.body() + b"\n\n", more=False)
            raise
        finally:
            scanner.finish()
            self.relayed.usage = scanner.usage
        await self._body(b"", more=False)
        self.relayed.result, self.relayed.error = stream_result(answer.status, scanner)

    async def _whole(self, answer: Answer) -> None:
        held = bytearray()
        async for chunk in answer.chunks():
            held += chunk
            if len(held) > HELD_BYTES:
                if not self.has_started:
                    await self._start(answer)
                await self._body(bytes(held), more=True)
                held.clear()
        if not self.has_started:
            await self._start(answer)
        body = bytes(held)
        await self._body(body, more=False)
        if answer.status < 300:
            self.relayed.usage, aborted = read_answer(body)
            self.relayed.result = "worker_aborted" if aborted else "ok"
            self._on_content()
        else:
            self.relayed.result = "client_error" if answer.status < 500 else "worker_error"
            self.relayed.error = body[:500].decode("utf-8", "replace")


def stream_result(status: int, scanner: StreamScanner) -> tuple[str, str | None]:
    """Names how a stream ended, and the engine's own error if it sent one."""
    if scanner.error is not None:
        return "worker_error", scanner.error
    if status >= 400:
        return ("client_error" if status < 500 else "worker_error"), None
    if scanner.aborted:
        return "worker_aborted", None
    return ("ok", None) if scanner.done else ("incomplete", "the stream ended without its end marker")
