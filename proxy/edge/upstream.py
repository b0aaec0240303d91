"""The transport to workers, in its httpx form: the reference that a faster one is held against.

One client per worker, so that a worker that hangs holds up nobody else, and no bound on a client's connections, since
cancelled requests leak slots of a bounded pool. No total time limit: a long answer is a healthy one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx

from ..errors import ConnectFailed, FirstByteTimeout, HomingError, ReuseFailed, WorkerDied
from .ports import Answer, Call


class HttpxTransport:
    """Carries calls over httpx. Times are in seconds.

    Args:
        connect: limit for making a connection.
        first_byte: limit from the request's last byte to the answer's first; prefill of a long prompt lies in it.
        idle: limit between two pieces of an answer.
    """

    def __init__(self, connect: float = 5.0, first_byte: float = 600.0, idle: float = 300.0) -> None:
        self._timeout = httpx.Timeout(connect=connect, read=None, write=idle, pool=None)
        self._first_byte = first_byte
        self._idle = idle
        self._clients: dict[str, httpx.AsyncClient] = {}

    async def open(self, worker_id: str, call: Call) -> Answer:
        """Sends a call and reads the head of the answer; see `ports.Transport`."""
        client = self._clients.get(worker_id)
        if client is None:
            # An idle connection is dropped before the engine's own 5 s limit, so that reuse rarely meets a closing one.
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=4.0)
            client = self._clients[worker_id] = httpx.AsyncClient(
                timeout=self._timeout, limits=limits, trust_env=False, follow_redirects=False
            )
        steps: list[str] = []

        async def trace(name: str, _: dict[str, Any]) -> None:
            steps.append(name)

        request = httpx.Request(
            "POST",
            call.url,
            headers=list(call.headers),
            content=call.body,
            extensions={"trace": trace, "timeout": self._timeout.as_dict()},
        )
        try:
            async with asyncio.timeout(self._first_byte):
                response = await client.send(request, stream=True)
        except TimeoutError:
            raise FirstByteTimeout(
                f"worker {worker_id} sent no byte within {self._first_byte:g} s; try again later"
            ) from None
        except (httpx.TransportError, OSError) as problem:
            raise as_fault(worker_id, problem, steps) from None
        return HttpxAnswer(worker_id, response, self._idle)

    async def close(self) -> None:
        """Closes every connection."""
        clients, self._clients = self._clients, {}
        for client in clients.values():
            await client.aclose()


class HttpxAnswer:
    """An answer whose head has come."""

    def __init__(self, worker_id: str, response: httpx.Response, idle: float) -> None:
        self._worker_id = worker_id
        self._response = response
        self._idle = idle
        self.status = response.status_code
        self.headers: Sequence[tuple[bytes, bytes]] = response.headers.raw

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yields raw bytes: nothing is decoded, so nothing is altered."""
        pieces = self._response.aiter_raw()
        while True:
            try:
                async with asyncio.timeout(self._idle):
                    piece = await anext(pieces)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise WorkerDied(
                    f"worker {self._worker_id} was silent for {self._idle:g} s inside its answer"
                ) from None
            except (httpx.TransportError, OSError) as problem:
                raise WorkerDied(f"worker {self._worker_id} broke off its answer ({describe(problem)})") from None
            yield piece

    async def close(self) -> None:
        """Ends the exchange."""
        await self._response.aclose()


def as_fault(worker_id: str, problem: Exception, steps: list[str]) -> HomingError:
    """Maps what httpx raised before the head had come to what it means for a second attempt."""
    if isinstance(problem, httpx.ConnectError | httpx.ConnectTimeout):
        return ConnectFailed(f"worker {worker_id} cannot be reached ({describe(problem)}); try again later")
    is_fresh = any(step.startswith("connection.connect") for step in steps)
    heard = any(step == "http11.receive_response_headers.complete" for step in steps)
    if not is_fresh and not heard:
        return ReuseFailed(f"worker {worker_id} closed an idle connection ({describe(problem)})")
    return WorkerDied(f"worker {worker_id} broke the connection before it answered ({describe(problem)})")


def describe(problem: Exception) -> str:
    """Names an exception even when it has no text."""
    text = str(problem)
    return f"{type(problem).__name__}: {text}" if text else type(problem).__name__
