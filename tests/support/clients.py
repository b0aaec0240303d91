"""A client on a raw socket: sends exact bytes, keeps exact bytes with the moments of their arrival, leaves when told."""

import asyncio
import json
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tests.support.scripted import MODEL, until

CHAT = "/v1/chat/completions"


def chat(*contents: str, **fields: object) -> bytes:
    """The body of a chat request: one message per content, user and assistant in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[turn % 2], "content": content} for turn, content in enumerate(contents or ("Hi",))]
    return json.dumps({"model": MODEL, "messages": messages} | fields).encode()


def request(body: bytes, path: str = CHAT, headers: Iterable[tuple[str, str]] = (), method: str = "POST") -> bytes:
    """A whole request with its length."""
    lines = [f"{method} {path} HTTP/1.1", "host: homing", "content-type: application/json"]
    lines += [f"{name}: {value}" for name, value in headers]
    return "\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode("latin-1") + body


# On every answer of an inference route, errors too.
RECEIPT = ("x-request-id", "x-homing-worker", "x-homing-reason", "x-homing-expected-tokens", "x-homing-attempts")


@dataclass(frozen=True)
class Response:
    """One answer, read strictly. `is_whole`: its framing says that it ended."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes
    is_whole: bool

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name), None)

    def all(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key == name]

    @property
    def error(self) -> dict[str, object]:
        """The error object; fails unless the body is exactly that, in the OpenAI shape."""
        assert self.header("content-type") == "application/json"
        told = json.loads(self.body)
        assert set(told) == {"error"}
        error = told["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert error["message"]
        return dict(error)


def receipt(answer: Response) -> tuple[str | None, ...]:
    """Worker, reason, expected tokens, attempts; fails unless each header is there exactly once."""
    assert [name for name in RECEIPT if len(answer.all(name)) != 1] == []
    return tuple(answer.header(name) for name in RECEIPT[1:])


def parse(received: bytes) -> Response | None:
    """Reads the first answer in the bytes; None while its head is not there. Fails on broken framing."""
    head, separator, rest = received.partition(b"\r\n\r\n")
    if not separator:
        return None
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
    status = int(first.split(" ")[1])
    named = dict(headers)
    if "content-length" in named:
        assert "transfer-encoding" not in named
        length = int(named["content-length"])
        assert len(rest) <= length
        return Response(status, headers, rest, len(rest) == length)
    if named.get("transfer-encoding") == "chunked":
        return Response(status, headers, *dechunk(rest))
    return Response(status, headers, rest, status in (204, 304))


def dechunk(data: bytes) -> tuple[bytes, bool]:
    """Reads a chunked body strictly; returns what has come and whether the last chunk was among it."""
    pieces = []
    while True:
        size, separator, data = data.partition(b"\r\n")
        if not separator:
            return b"".join(pieces), False
        length = int(size, 16)
        if length == 0:
            assert data in (b"\r\n", b"")
            return b"".join(pieces), data == b"\r\n"
        pieces.append(data[:length])
        if len(data) < length + 2:
            return b"".join(pieces), False
        assert data[length : length + 2] == b"\r\n"
        data = data[length + 2 :]


class Client(asyncio.Protocol):
    """One connection to the proxy."""

    def __init__(self) -> None:
        self.arrived: list[tuple[float, bytes]] = []
        self.closed: float | None = None

    @classmethod
    async def connect(cls, port: int) -> "Client":
        _, client = await asyncio.get_running_loop().create_connection(cls, "127.0.0.1", port)
        return client

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.arrived.append((time.monotonic(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = time.monotonic()

    @property
    def received(self) -> bytes:
        return b"".join(data for _, data in self.arrived)

    @property
    def response(self) -> Response | None:
        return parse(self.received)

    def send(self, data: bytes) -> None:
        self.transport.write(data)

    def close(self) -> None:
        """Leaves in good order."""
        self.transport.close()

    def reset(self) -> None:
        """Leaves with a reset."""
        handle = socket.socket(fileno=os.dup(self.transport.get_extra_info("socket").fileno()))
        handle.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        handle.close()
        self.transport.abort()

    async def body(self, ends: bytes) -> None:
        """Waits until the body that has come ends so."""
        await until(lambda: (got := self.response) is not None and got.body.endswith(ends))

    async def answer(self, seconds: float = 10.0) -> Response:
        """Waits for a whole answer, or for the end of the connection, and returns what came."""

        seen = 0

        def is_over() -> bool:
            nonlocal seen
            if self.closed is not None:
                return True
            # Read what came only when no more comes: reading a long answer again with every piece takes minutes.
            before, seen = seen, len(self.arrived)
            return before == seen and (got := self.response) is not None and got.is_whole

        await until(is_over, seconds)
        got = self.response
        assert got is not None, f"the connection ended without an answer: {self.received!r}"
        return got

    async def exchange(self, data: bytes) -> Response:
        """Sends one request, and takes its answer off the connection."""
        self.arrived.clear()
        self.send(data)
        return await self.answer()


async def ask(port: int, data: bytes, seconds: float = 10.0) -> Response:
    """One request on a connection of its own."""
    client = await Client.connect(port)
    try:
        client.send(data)
        return await client.answer(seconds)
    finally:
        client.close()


async def leave(client: Client, manner: Callable[[Client], None]) -> None:
    """Leaves in the given manner, and waits until this side has closed."""
    manner(client)
    await until(lambda: client.closed is not None)
