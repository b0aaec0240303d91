"""A worker on a real socket that does only what a script tells it, and logs what it saw.

`Scripted` answers probes by itself (`/v1/models`, `/metrics`, `/version`); every inference request runs a play: an
async function that is given the exchange and sends exact bytes, waits, closes, resets or hangs. Every connection is
kept in `lines` with the moments of its opening and closing, every request in `heard` with its exact bytes.
"""

import asyncio
import json
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Self

MODEL = "m1"
Play = Callable[["Exchange"], Awaitable[None]]
Pairs = Iterable[tuple[str, str]]


async def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Waits for a condition, checked every 5 ms; fails when it stays false."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        await asyncio.sleep(0.005)


@dataclass(frozen=True)
class Heard:
    """One request as it came: `raw` is every byte of it."""

    at: float
    line: "Line"
    raw: bytes
    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name), None)


class Line(asyncio.Protocol):
    """One accepted connection."""

    def __init__(self, worker: "Scripted") -> None:
        self.worker = worker
        self.buffer = b""
        self.requests = 0
        self.opened = time.monotonic()
        self.closed: float | None = None
        self.gone = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    @property
    def is_inference(self) -> bool:
        return any(heard.line is self for heard in self.worker.heard)

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self.worker.lines.append(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = time.monotonic()
        self.gone.set()
        if self.task is not None:
            self.task.cancel()

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head, separator, rest = self.buffer.partition(b"\r\n\r\n")
        if not separator:
            return
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines)]
        length = int(next((value for name, value in headers if name.lower() == "content-length"), "0"))
        if len(rest) < length:
            return
        method, target, _ = first.split(" ")
        raw, self.buffer = self.buffer, b""
        self.requests += 1
        heard = Heard(time.monotonic(), self, raw, method, target, headers, rest)
        self.task = asyncio.get_running_loop().create_task(self.worker.serve(Exchange(self, heard)))


@dataclass
class Exchange:
    """One request on one connection, for a play to answer."""

    line: Line
    heard: Heard
    sent: list[tuple[float, bytes]] = field(default_factory=list)

    def send(self, data: bytes) -> None:
        """Sends exact bytes, in one piece."""
        self.sent.append((time.monotonic(), data))
        self.line.transport.write(data)

    def close(self) -> None:
        """Closes in good order, after what was sent."""
        self.line.transport.close()

    def reset(self) -> None:
        """Breaks the connection with a reset."""
        handle = socket.socket(fileno=os.dup(self.line.transport.get_extra_info("socket").fileno()))
        handle.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        handle.close()
        self.line.transport.abort()

    async def hang(self) -> None:
        """Says nothing until the other side has gone."""
        await self.line.gone.wait()


class Scripted:
    """The worker.

    Args:
        models: what `/v1/models` lists; names, or whole objects.
        play: what an inference request runs when `plays` is empty.
    """

    def __init__(self, *models: str | dict[str, object], play: Play | None = None) -> None:
        self.models = [
            model if isinstance(model, dict) else {"id": model, "object": "model", "max_model_len": 32768}
            for model in models or (MODEL,)
        ]
        self.play = play or answers(completion())
        self.plays: deque[Play] = deque()
        self.started = 1_700_000_000.0
        self.block_tokens = 16
        self.metrics_extra = ""
        self.probe: Play | None = None
        self.lines: list[Line] = []
        self.heard: list[Heard] = []
        self.probes: list[Heard] = []
        self.port = 0
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.refuse()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def is_open(self) -> bool:
        return self._server is not None

    @property
    def bodies(self) -> list[bytes]:
        return [heard.body for heard in self.heard]

    @property
    def served(self) -> int:
        return len(self.heard)

    @property
    def busy(self) -> list[Line]:
        """Connections that carried inference and are open."""
        return [line for line in self.lines if line.closed is None and line.is_inference]

    async def open(self) -> None:
        """Listens: at a free port the first time, at the same one after."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Line(self), "127.0.0.1", self.port, backlog=512)
        self.port = self._server.sockets[0].getsockname()[1]

    async def refuse(self) -> None:
        """Stops listening and breaks every connection: new ones are refused."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for line in self.lines:
            if line.closed is None:
                line.transport.abort()
        await asyncio.gather(*(line.task for line in self.lines if line.task), return_exceptions=True)
        await until(lambda: all(line.closed for line in self.lines))

    async def serve(self, exchange: Exchange) -> None:
        """Answers a probe, or logs an inference request and plays."""
        heard = exchange.heard
        if heard.method == "GET":
            self.probes.append(heard)
            if self.probe is not None:
                await self.probe(exchange)
            else:
                exchange.send(response(200, self._page(heard.target)))
            return
        self.heard.append(heard)
        await (self.plays.popleft() if self.plays else self.play)(exchange)

    def _page(self, target: str) -> bytes:
        if target == "/v1/models":
            return json.dumps({"object": "list", "data": self.models}).encode()
        if target == "/version":
            return b'{"version":"0.32.0"}'
        lines = [
            f"process_start_time_seconds {self.started}",
            f'vllm:cache_config_info{{block_size="{self.block_tokens}",num_gpu_blocks="4096"}} 1.0',
            'vllm:num_requests_running{engine="0"} 0.0',
            'vllm:num_requests_waiting{engine="0"} 0.0',
        ]
        return "\n".join([*lines, self.metrics_extra, ""]).encode()


def response(status: int, body: bytes, headers: Pairs = (("content-type", "application/json"),)) -> bytes:
    """A whole answer with its length."""
    lines = [f"HTTP/1.1 {status} Word", *(f"{name}: {value}" for name, value in headers)]
    return "\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode("latin-1") + body


def stream_head(headers: Pairs = ()) -> bytes:
    """The head of a chunked event stream."""
    lines = ["HTTP/1.1 200 OK", "content-type: text/event-stream; charset=utf-8", "transfer-encoding: chunked"]
    return "\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers), "", ""]).encode()


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


LAST_CHUNK = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def event(**fields: object) -> bytes:
    """One event of a chat stream."""
    frame = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": MODEL} | fields
    return b"data: " + json.dumps(frame).encode() + b"\n\n"


def token(text: str, finish: str | None = None) -> bytes:
    """An event with a content token."""
    return event(choices=[{"index": 0, "delta": {"content": text}, "finish_reason": finish}])


ROLE = event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])


def usage(prompt: int, cached: int | None = None, output: int = 2) -> dict[str, object]:
    """A usage object as vLLM writes it."""
    told: dict[str, object] = {"prompt_tokens": prompt, "total_tokens": prompt + output, "completion_tokens": output}
    return told if cached is None else told | {"prompt_tokens_details": {"cached_tokens": cached}}


def frames(prompt: int = 100, cached: int | None = 0) -> list[bytes]:
    """The events of a whole stream."""
    end = event(choices=[], usage=usage(prompt, cached))
    return [ROLE, token("Hel"), token("lo", "stop"), end, DONE]


def completion(prompt: int = 100, cached: int | None = 0, text: str = "Hello") -> bytes:
    """The body of a whole answer."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    answer = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": MODEL, "choices": [choice]}
    return json.dumps(answer | {"usage": usage(prompt, cached)}).encode()


def answers(body: bytes, status: int = 200, headers: Pairs = (("content-type", "application/json"),)) -> Play:
    """A play that sends one whole answer."""

    async def play(exchange: Exchange) -> None:
        exchange.send(response(status, body, headers))

    return play


def streams(*pieces: bytes) -> Play:
    """A play that sends each piece as a chunk of an event stream, and ends it."""

    async def play(exchange: Exchange) -> None:
        exchange.send(stream_head())
        for piece in pieces or frames():
            exchange.send(chunk(piece))
        exchange.send(LAST_CHUNK)

    return play


async def adapts(exchange: Exchange) -> None:
    """A play that streams if asked to, and else answers whole."""
    is_stream = json.loads(exchange.heard.body).get("stream") is True
    await (streams() if is_stream else answers(completion()))(exchange)


async def hangs(exchange: Exchange) -> None:
    """A play that never answers."""
    await exchange.hang()


async def resets(exchange: Exchange) -> None:
    """A play that breaks the connection before any byte."""
    exchange.reset()


async def closes(exchange: Exchange) -> None:
    """A play that closes the connection before any byte."""
    exchange.close()
