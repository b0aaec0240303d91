"""The simulated worker's HTTP surface: a raw ASGI application over one engine.

It answers what vLLM's OpenAI server answers; the server around it is uvicorn, as vLLM's is.
A client that goes away ends its request at once, streamed or not.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST

from workers.sim import wire
from workers.sim.cache import PrefixCache
from workers.sim.engine import Clock, Engine, Generation, WallClock
from workers.sim.exposition import Meters
from workers.sim.options import Shape, SimOptions, resolve_shape
from workers.sim.request import Ask, Reader, Rejection
from workers.sim.scheduler import Scheduler
from workers.sim.speed import Speed
from workers.sim.text import Tokenizer

_JSON = b"application/json"

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request: its body, its id, and where the answer goes."""

    body: bytes
    headers: dict[bytes, bytes]
    request_id: str | None
    fallback_id: str
    receive: Receive
    send: Send

    async def start(self, status: int, content_type: bytes | None, length: int | None) -> None:
        """Sends status and headers; without a length the body is chunked."""
        echo = (self.request_id or self.fallback_id).encode("latin-1")
        headers = [(b"vary", b"Origin"), (b"x-request-id", echo)]
        if content_type is not None:
            headers.append((b"content-type", content_type))
        if length is not None:
            headers.append((b"content-length", b"%d" % length))
        await self.send({"type": "http.response.start", "status": status, "headers": headers})

    async def reply(self, status: int, body: bytes = b"", content_type: bytes | None = _JSON) -> None:
        """Sends a whole answer."""
        await self.start(status, content_type if body else None, len(body))
        await self.send({"type": "http.response.body", "body": body})


Handler = Callable[[Call], Awaitable[None]]


class Application:
    """The ASGI callable; its lifespan runs the engine."""

    def __init__(self, options: SimOptions, clock: Clock | None) -> None:
        self.shape: Shape = resolve_shape(options)
        self.cache = PrefixCache(self.shape.num_blocks, self.shape.block_size)
        self.meters = Meters(options.model, self.shape)
        scheduler = Scheduler(
            self.cache,
            Speed(self.shape.hardware),
            options.max_num_batched_tokens,
            options.max_num_seqs,
        )
        self.engine = Engine(scheduler, self.cache, self.meters, clock or WallClock(), options.time_scale)
        self._options = options
        self._started_at = int(time.time())
        self._reader = Reader(
            options.model,
            self.shape.max_model_len,
            options.seed,
            Tokenizer(self.shape.block_size),
            options.force_include_usage,
        )
        configured = blake2b(repr(self.shape).encode(), digest_size=4).hexdigest()
        self._fingerprint = f"vllm-{wire.VERSION}-{configured}"
        self._routes = self._declare_routes()

    @property
    def models(self) -> dict[str, Any]:
        """The answer of `/v1/models`."""
        return wire.render_models(self._options.model, self.shape.max_model_len, self._started_at)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serves one ASGI scope."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            await self._serve(scope, receive, send)

    def _declare_routes(self) -> dict[str, dict[str, Handler]]:
        ping: dict[str, Handler] = {"GET": _reply_empty, "POST": _reply_empty}
        return {
            "/health": {"GET": _reply_empty},
            "/ping": ping,
            "/version": {"GET": lambda call: call.reply(200, wire.dump({"version": wire.VERSION}))},
            "/load": {"GET": lambda call: call.reply(200, wire.dump({"server_load": 0}))},
            "/v1/models": {"GET": lambda call: call.reply(200, wire.dump(self.models))},
            "/metrics": {"GET": self._reply_metrics},
            "/tokenize": {"POST": self._tokenize},
            "/v1/chat/completions": {"POST": lambda call: self._generate(call, chat=True)},
            "/v1/completions": {"POST": lambda call: self._generate(call, chat=False)},
        }

    async def _live(self, receive: Receive, send: Send) -> None:
        """Runs the engine between start-up and shutdown."""
        await receive()
        running = asyncio.create_task(self.engine.run())
        await send({"type": "lifespan.startup.complete"})
        await receive()
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await send({"type": "lifespan.shutdown.complete"})

    async def _serve(self, scope: Message, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        body = await _read_body(receive)
        if body is None:
            return
        named = headers.get(b"x-request-id")
        call = Call(body, headers, named.decode("latin-1") if named else None, uuid.uuid4().hex, receive, send)
        methods = self._routes.get(scope["path"])
        if methods is None:
            await call.reply(404, b'{"detail":"Not Found"}')
            return
        handler = methods.get(scope["method"])
        if handler is None:
            await call.reply(405, b'{"detail":"Method Not Allowed"}')
            return
        try:
            await handler(call)
        except Rejection as refused:
            body = wire.render_error(refused.status, refused.message, refused.kind, refused.param)
            await call.reply(refused.status, body)

    async def _reply_metrics(self, call: Call) -> None:
        await call.reply(200, self.meters.render(), CONTENT_TYPE_LATEST.encode())

    async def _tokenize(self, call: Call) -> None:
        _check_content_type(call)
        await call.reply(200, wire.dump(self._reader.read_tokenize(call.body)))

    async def _generate(self, call: Call, *, chat: bool) -> None:
        """Serves one generation; whatever ends it, its blocks are free afterwards."""
        _check_content_type(call)
        _check_rank(call)
        ask = self._reader.read_ask(call.body, chat=chat)
        envelope = wire.Envelope(
            answer_id=f"{'chatcmpl' if chat else 'cmpl'}-{call.request_id or call.fallback_id[:16]}",
            chat=chat,
            created=int(time.time()),
            model=self._options.model,
            fingerprint=self._fingerprint,
        )
        generation = self.engine.submit(ask.draft)
        watch = asyncio.create_task(_wait_gone(call.receive))
        watch.add_done_callback(lambda _: self.engine.abort(generation))
        try:
            if ask.stream:
                await self._stream(call, ask, envelope, generation)
            else:
                await self._reply_whole(call, envelope, generation, watch)
        finally:
            self.engine.abort(generation)
            watch.cancel()

    async def _stream(self, call: Call, ask: Ask, envelope: wire.Envelope, generation: Generation) -> None:
        """Sends the headers at once, and a chunk for each token when it is there."""
        await call.start(200, b"text/event-stream; charset=utf-8", None)
        stream: wire.Stream | None = None
        async for batch in generation.batches():
            chunks: list[bytes] = []
            if stream is None:
                # Cached tokens are known once the request is admitted, which the first token proves.
                stream = wire.Stream(
                    envelope,
                    self._count_usage(envelope, generation),
                    include_usage=ask.include_usage,
                    continuous=ask.continuous_usage,
                )
                chunks.append(stream.open())
            reason = generation.sequence.finish_reason
            chunks.extend(_write_batch(stream, batch, reason))
            await call.send({"type": "http.response.body", "body": b"".join(chunks), "more_body": reason is None})

    async def _reply_whole(
        self, call: Call, envelope: wire.Envelope, generation: Generation, watch: asyncio.Task[None]
    ) -> None:
        """Collects the answer and sends it, unless the client has gone."""
        texts = [text async for batch in generation.batches() for text in batch]
        if watch.done():
            return
        usage = self._count_usage(envelope, generation).whole(generation.sequence.emitted)
        reason = generation.sequence.finish_reason or "abort"
        await call.reply(200, envelope.render_whole("".join(texts), reason, usage))

    def _count_usage(self, envelope: wire.Envelope, generation: Generation) -> wire.Usage:
        sequence = generation.sequence
        stored = sequence.prompt.tokens // self.shape.block_size * self.shape.block_size
        return wire.Usage(
            prompt_tokens=sequence.prompt.tokens,
            cached_tokens=sequence.cached_tokens,
            created_tokens=stored - sequence.cached_tokens if envelope.chat else None,
            details=self._options.prompt_tokens_details,
        )


def create_app(options: SimOptions, clock: Clock | None = None) -> Application:
    """Builds a worker to be served by any ASGI server with a lifespan; raises `OptionsRefused`."""
    return Application(options, clock)


def _write_batch(stream: wire.Stream, batch: list[str], reason: str | None) -> list[bytes]:
    """Returns the chunks of new tokens; with `reason` set, the finishing chunk and the end as well."""
    if reason is None:
        return [stream.token(text) for text in batch]
    chunks = [stream.token(text) for text in batch[:-1]]
    chunks.append(stream.last(batch[-1] if batch else "", reason, counted=bool(batch)))
    chunks.append(stream.close())
    return chunks


async def _reply_empty(call: Call) -> None:
    await call.reply(200)


async def _read_body(receive: Receive) -> bytes | None:
    """Returns the whole body, `None` when the client left before its end."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def _wait_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _check_content_type(call: Call) -> None:
    kind = call.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if kind != _JSON:
        raise Rejection(
            400, "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed", "Bad Request"
        )


def _check_rank(call: Call) -> None:
    rank = call.headers.get(b"x-data-parallel-rank", b"")
    if rank.isdigit() and int(rank) != 0:
        raise Rejection(
            400,
            f"data_parallel_rank {int(rank)} is out of range [0, 1).",
            "BadRequestError",
            "data_parallel_rank",
        )
