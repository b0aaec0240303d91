"""What a running engine says about itself over HTTP, and whether it still lives the same life.

Read from the outside only: `/v1/models`, `/version`, `/metrics` and `/health`, as vLLM serves them.
What the engine does not say is `None`; nothing here sends it work.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus

import httpx

from workers.agent.exposition import CacheShape, read_cache, read_incarnation

_LOG = logging.getLogger(__name__)

_READY_POLL_SECONDS = 0.5
_PROGRESS_SECONDS = 15.0

_PATIENCE_POLLS = 3
"""Unanswered polls in a row before an engine counts as gone; a refused connection counts at once."""

_LIFE_EVERY_POLLS = 5
"""Rendering `/metrics` costs milliseconds of the engine's event loop, so `/health` is asked in between."""


class EngineUnusable(Exception):
    """The engine never became ready, or does not speak to us; the message is one line."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """One life of an engine, as it reports itself; `models` are the objects of `/v1/models` as they came."""

    incarnation: str
    version: str | None
    models: tuple[dict[str, object], ...]
    cache: CacheShape

    def body(self) -> dict[str, object]:
        """Returns the `engine` object of `POST /workers`."""
        return {
            "version": self.version,
            "models": list(self.models),
            "block_size": self.cache.block_size,
            "capacity_tokens": self.cache.capacity_tokens,
            "prefix_caching": self.cache.prefix_caching,
            "kv_cache_dtype": self.cache.kv_cache_dtype,
        }


def open_engine(url: str) -> httpx.AsyncClient:
    """Opens a client for one engine; the caller closes it."""
    return httpx.AsyncClient(
        base_url=url,
        timeout=httpx.Timeout(5.0, connect=2.0),
        limits=httpx.Limits(max_connections=2, max_keepalive_connections=0),
        follow_redirects=False,
        trust_env=False,
    )


async def wait_ready(engine: httpx.AsyncClient, wait_seconds: float) -> EngineFacts:
    """Waits until the engine lists its models, with a line now and then; returns its facts.

    Raises `EngineUnusable` after `wait_seconds`, and at once when the engine asks for a key.
    """
    began = time.monotonic()
    next_line = began
    while True:
        try:
            return await read_facts(engine)
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
        now = time.monotonic()
        if now - began >= wait_seconds:
            raise EngineUnusable(
                f"no engine is ready at {_address(engine)} after {wait_seconds:g} s ({reason}): "
                "start vLLM there, or pass its address with --engine"
            )
        if now >= next_line:
            next_line = now + _PROGRESS_SECONDS
            _LOG.info("waiting for the engine at %s, %.0f s so far (%s)", _address(engine), now - began, reason)
        await asyncio.sleep(min(_READY_POLL_SECONDS, began + wait_seconds - now))


async def read_facts(engine: httpx.AsyncClient) -> EngineFacts:
    """Reads the facts; raises `httpx.HTTPError` while not ready, `EngineUnusable` if it asks for a key."""
    models = await _read_models(engine)
    version = await _fetch(engine, "/version")
    metrics = await _fetch(engine, "/metrics")
    exposition = "" if metrics is None else metrics.text
    stated = _read_object(version).get("version")
    return EngineFacts(
        # Without a start time each reading is a life of its own: too much is forgotten, never too little.
        incarnation=read_incarnation(exposition) or secrets.token_hex(6),
        version=stated if isinstance(stated, str) else None,
        models=models,
        cache=read_cache(exposition),
    )


class EngineWatch:
    """Follows one engine from life to life.

    `on_gone` is awaited when it stops answering, `on_back` with fresh facts when it answers again or has
    restarted between two polls; `facts` describe the life that is running at the start.
    """

    def __init__(
        self,
        engine: httpx.AsyncClient,
        facts: EngineFacts,
        *,
        on_gone: Callable[[], Awaitable[None]],
        on_back: Callable[[EngineFacts], Awaitable[None]],
        poll_seconds: float = 1.0,
    ) -> None:
        self._engine = engine
        self._incarnation: str | None = facts.incarnation
        self._on_gone = on_gone
        self._on_back = on_back
        self._poll_seconds = poll_seconds

    async def run(self) -> None:
        """Polls until cancelled; raises `EngineUnusable` when a new life asks for a key."""
        misses = polls = 0
        while True:
            await asyncio.sleep(self._poll_seconds)
            try:
                if self._incarnation is None:
                    await self._welcome()
                elif misses or polls % _LIFE_EVERY_POLLS == 0:
                    await self._compare_lives()
                else:
                    await _fetch(self._engine, "/health")
            except httpx.HTTPError as error:
                misses += 1
                if isinstance(error, httpx.ConnectError) or misses >= _PATIENCE_POLLS:
                    await self._lose(error)
            else:
                misses = 0
            polls += 1

    async def _compare_lives(self) -> None:
        """Notices a restart that fell between two polls."""
        metrics = await _fetch(self._engine, "/metrics")
        life = None if metrics is None else read_incarnation(metrics.text)
        if life is not None and life != self._incarnation:
            await self._welcome()

    async def _welcome(self) -> None:
        facts = await read_facts(self._engine)
        _LOG.info("the engine at %s is up (life %s)", _address(self._engine), facts.incarnation)
        self._incarnation = facts.incarnation
        await self._on_back(facts)

    async def _lose(self, error: httpx.HTTPError) -> None:
        if self._incarnation is None:
            return
        self._incarnation = None
        _LOG.info("the engine at %s is gone (%s)", _address(self._engine), str(error) or type(error).__name__)
        await self._on_gone()


async def _read_models(engine: httpx.AsyncClient) -> tuple[dict[str, object], ...]:
    models = _read_object(await _fetch(engine, "/v1/models")).get("data")
    if not isinstance(models, list) or not models or not all(isinstance(model, dict) for model in models):
        raise httpx.DecodingError("its /v1/models lists no model")
    return tuple(models)


async def _fetch(engine: httpx.AsyncClient, path: str) -> httpx.Response | None:
    """Gets one page, `None` when the engine has no such page."""
    answer = await engine.get(path)
    if answer.status_code == HTTPStatus.NOT_FOUND:
        return None
    if answer.status_code in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
        raise EngineUnusable(
            f"the engine at {_address(engine)} asks for a key at {path} ({answer.status_code}): "
            "start it without --api-key and keep its port reachable for the proxy alone"
        )
    if not answer.is_success:
        raise httpx.HTTPStatusError(f"{path} answered {answer.status_code}", request=answer.request, response=answer)
    return answer


def _address(engine: httpx.AsyncClient) -> str:
    return str(engine.base_url).rstrip("/")


def _read_object(answer: httpx.Response | None) -> dict[str, object]:
    """Reads a JSON object; anything else reads as an empty one."""
    try:
        fields = None if answer is None else answer.json()
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}
