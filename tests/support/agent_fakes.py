"""A proxy and an engine on real sockets, that do only what a test tells them to."""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import parse_qs, urlsplit

TOKEN = "open-sesame"


@dataclass(frozen=True)
class Call:
    method: str
    path: str
    query: dict[str, list[str]]
    token: str | None
    body: object

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


@dataclass(frozen=True)
class Reply:
    """What to answer; `status` 0 keeps the connection open without a word."""

    status: int
    body: object = None
    headers: dict[str, str] = field(default_factory=dict)


def refuse(status: int, message: str = "no") -> Reply:
    return Reply(status, {"error": {"message": message, "type": "t", "param": None, "code": "c"}})


async def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError("the condition did not come true in time")
        await asyncio.sleep(0.01)


class FakeServer:
    """HTTP/1.1, one request a connection; closing it lets the port refuse connections."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.forced: Callable[[Call], Reply | None] = lambda call: None
        self.port = 0
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()

    async def __aenter__(self):
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        if self._server is None:
            return
        self._server.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        await self._server.wait_closed()
        self._server = None

    def count(self, line: str) -> int:
        return sum(str(call) == line for call in self.calls)

    def answer(self, call: Call) -> Reply:
        raise NotImplementedError

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            call = await _read_call(reader)
            self.calls.append(call)
            reply = self.forced(call) or self.answer(call)
            if reply.status == 0:
                await reader.read()
                return
            text = isinstance(reply.body, str)
            payload = b"" if reply.body is None else (reply.body if text else json.dumps(reply.body)).encode()
            headers = {"content-length": str(len(payload)), "connection": "close", **reply.headers}
            lines = [f"HTTP/1.1 {reply.status} Word", *(f"{k}: {v}" for k, v in headers.items()), "", ""]
            writer.write("\r\n".join(lines).encode() + payload)
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except asyncio.CancelledError:
            writer.transport.abort()
        finally:
            self._serving.discard(task)
            writer.close()


async def _read_call(reader: asyncio.StreamReader) -> Call:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    method, target, _ = head[0].split(" ")
    headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in head[1:] if line)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    parts = urlsplit(target)
    return Call(
        method=method,
        path=parts.path,
        query=parse_qs(parts.query),
        token=headers.get("authorization"),
        body=json.loads(body) if body else None,
    )


class FakeProxy(FakeServer):
    """Holds workers as the registration page says; `inflight` is what each drain call answers, the last one for ever."""

    def __init__(self, *, heartbeat_seconds: float = 0.05, lease_seconds: float = 30.0) -> None:
        super().__init__()
        self.heartbeat_seconds = heartbeat_seconds
        self.lease_seconds = lease_seconds
        self.token = TOKEN
        self.inflight = [0]
        self.held: dict[str, str] = {}

    def answer(self, call: Call) -> Reply:
        if call.token != f"Bearer {self.token}":
            return refuse(401, "The join token is wrong.")
        body = call.body if isinstance(call.body, dict) else {}
        _, _, worker, *verb = call.path.split("/") + [""] * (call.path == "/workers")
        if call.path == "/workers":
            self.held[body["id"]] = body["incarnation"]
            return Reply(
                200,
                {
                    "id": body["id"],
                    "heartbeat_seconds": self.heartbeat_seconds,
                    "lease_seconds": self.lease_seconds,
                },
            )
        if worker not in self.held:
            return refuse(404, "no such worker")
        if call.method == "DELETE":
            assert call.query == {"incarnation": [self.held[worker]]}
            del self.held[worker]
            return Reply(204)
        if body["incarnation"] != self.held[worker]:
            return refuse(409, "another incarnation")
        if verb == ["heartbeat"]:
            return Reply(200, {"lease_seconds": self.lease_seconds, "state": "ready"})
        left = self.inflight.pop(0) if len(self.inflight) > 1 else self.inflight[0]
        return Reply(200, {"state": "draining", "inflight": left})


class FakeEngine(FakeServer):
    """Answers the four pages that are read; `started` is one life's start, in seconds."""

    def __init__(self, started: float = 1796039019.25) -> None:
        super().__init__()
        self.started: float | None = started
        self.prefix_caching = True
        self.models = [{"id": "tiny", "object": "model", "owned_by": "vllm", "max_model_len": 16384}]

    def answer(self, call: Call) -> Reply:
        pages = {
            "/health": Reply(200),
            "/version": Reply(200, {"version": "0.32.0"}),
            "/v1/models": Reply(200, {"object": "list", "data": self.models}),
            "/metrics": Reply(200, self._metrics()),
        }
        return pages.get(call.path, Reply(404, {"detail": "Not Found"}))

    def _metrics(self) -> str:
        cache = (
            f'block_size="32",cache_dtype="auto",enable_prefix_caching="{self.prefix_caching}",engine="0",'
            'kv_cache_size_tokens="262144",num_gpu_blocks="8192"'
        )
        lines = ["# TYPE vllm:cache_config_info gauge", f"vllm:cache_config_info{{{cache}}} 1.0"]
        if self.started is not None:
            lines += [
                "# TYPE process_start_time_seconds gauge",
                f"process_start_time_seconds {self.started!r}",
            ]
        return "\n".join([*lines, ""])
