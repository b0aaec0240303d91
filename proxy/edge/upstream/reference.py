"""The reference transport, over httpx: what is right by a well-kept library's word, and slow.

One client per worker, so that a worker that hangs holds up nobody else, and no bound on a client's connections, since
cancelled requests leak slots of a bounded pool.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from typing import Any

import httpx

from ...errors import ConnectFailed, FirstByteTimeout, HomingError, ReuseFailed, WorkerDied
from ..ports import Call, Exchange, Sink
from .limits import KEEP_ALIVE_SECONDS, Limits, describe


class HttpxTransport:
    """Carries calls over httpx.

    Args:
        limits: the time limits.
        proxy: an HTTP proxy to reach workers through, or None.
        uds: a unix socket that all workers are behind, or None.
    """

    def __init__(self, limits: Limits, *, proxy: str | None = None, uds: str | None = None) -> None:
        self.limits = limits
        self._proxy = proxy
        self._uds = uds
        self._clients: dict[str, httpx.AsyncClient] = {}
        self._retired: list[httpx.AsyncClient] = []
        self._running: set[HttpxCall] = set()
        # Loading the certificates takes tens of milliseconds of the event loop: once, not once per worker.
        self._tls = ssl.create_default_context()

    def open(self, worker_id: str, call: Call, sink: Sink) -> Exchange:
        """Starts a call; what comes of it is told to `sink`."""
        client = self._clients.get(call.base_url)
        if client is None:
            client = self._clients[call.base_url] = self._make_client()
        running = HttpxCall(self, worker_id, client, call, sink)
        self._running.add(running)
        running.task.add_done_callback(lambda _: self._running.discard(running))
        return running

    def retire(self, base_url: str) -> None:
        """Sets the idle connections to a worker aside: one of them was dead, and the others are no younger."""
        client = self._clients.pop(base_url, None)
        if client is not None:
            self._retired.append(client)

    def _make_client(self) -> httpx.AsyncClient:
        bounds = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEP_ALIVE_SECONDS)
        transport = httpx.AsyncHTTPTransport(verify=self._tls, limits=bounds, proxy=self._proxy, uds=self._uds)
        return httpx.AsyncClient(transport=transport, trust_env=False, follow_redirects=False)

    async def close(self) -> None:
        """Closes every connection; running calls are told that the worker died."""
        for running in list(self._running):
            running.fail(WorkerDied(f"the proxy closed its call to worker {running.worker_id}"))
        await asyncio.gather(*(running.task for running in list(self._running)), return_exceptions=True)
        clients = [*self._clients.values(), *self._retired]
        self._clients, self._retired = {}, []
        for client in clients:
            await client.aclose()


class HttpxCall:
    """One running call: an `Exchange`."""

    def __init__(
        self, transport: HttpxTransport, worker_id: str, client: httpx.AsyncClient, call: Call, sink: Sink
    ) -> None:
        self.worker_id = worker_id
        self._transport = transport
        self._client = client
        self._call = call
        self._sink: Sink | None = sink
        self._limits = transport.limits
        self._may_read = asyncio.Event()
        self._may_read.set()
        self.task = asyncio.get_running_loop().create_task(self._run())

    def pause(self) -> None:
        """Stops reading from the worker until `resume`."""
        self._may_read.clear()

    def resume(self) -> None:
        """Reads again."""
        self._may_read.set()

    def abort(self) -> None:
        """Ends the call; the worker sees its connection close."""
        self._sink = None
        self.task.cancel()

    def fail(self, fault: HomingError) -> None:
        """Ends the call and tells why."""
        sink = self._sink
        self.abort()
        if sink is not None:
            sink.on_fault(fault)

    async def _run(self) -> None:
        try:
            await self._exchange()
        except HomingError as fault:
            if isinstance(fault, ReuseFailed):
                self._transport.retire(self._call.base_url)
            sink, self._sink = self._sink, None
            if sink is not None:
                sink.on_fault(fault)
            return
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.on_end()

    async def _exchange(self) -> None:
        response = await self._send()
        try:
            if self._sink is not None:
                self._sink.on_head(
                    response.status_code, [(name.lower(), value) for name, value in response.headers.raw]
                )
            async for chunk in self._chunks(response):
                if self._sink is not None and chunk:
                    self._sink.on_data(chunk)
                await self._may_read.wait()
        finally:
            await response.aclose()

    async def _send(self) -> httpx.Response:
        steps: list[str] = []

        async def trace(name: str, _: dict[str, Any]) -> None:
            steps.append(name)

        limits = self._limits
        timeout = httpx.Timeout(connect=limits.connect, read=None, write=limits.idle, pool=None)
        headers = [*self._call.headers, (b"content-length", str(len(self._call.body)).encode())]
        request = httpx.Request(
            "POST",
            self._call.base_url + self._call.target.decode("latin-1"),
            headers=headers,
            content=self._call.body,
            extensions={"trace": trace, "timeout": timeout.as_dict()},
        )
        try:
            async with asyncio.timeout(limits.first_byte):
                return await self._client.send(request, stream=True)
        except TimeoutError:
            raise FirstByteTimeout(
                f"worker {self.worker_id} sent no byte within {limits.first_byte:g} s; try again later"
            ) from None
        except (httpx.TransportError, OSError) as problem:
            raise as_fault(self.worker_id, problem, steps) from None

    async def _chunks(self, response: httpx.Response) -> AsyncIterator[bytes]:
        """Yields raw bytes: nothing is decoded, so nothing is altered."""
        pieces = response.aiter_raw()
        while True:
            try:
                async with asyncio.timeout(self._limits.idle):
                    piece = await anext(pieces)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise WorkerDied(
                    f"worker {self.worker_id} was silent for {self._limits.idle:g} s inside its answer"
                ) from None
            except (httpx.TransportError, OSError) as problem:
                raise WorkerDied(f"worker {self.worker_id} broke off its answer ({describe(problem)})") from None
            yield piece


def as_fault(worker_id: str, problem: Exception, steps: list[str]) -> HomingError:
    """Maps what httpx raised before the head had come to what it means for a second attempt."""
    if isinstance(problem, httpx.ConnectError | httpx.ConnectTimeout):
        return ConnectFailed(f"worker {worker_id} cannot be reached ({describe(problem)}); try again later")
    is_fresh = any(step.startswith("connection.connect") for step in steps)
    heard = any(step == "http11.receive_response_headers.complete" for step in steps)
    if not is_fresh and not heard:
        return ReuseFailed(f"worker {worker_id} closed an idle connection ({describe(problem)})")
    return WorkerDied(f"worker {worker_id} broke the connection before it answered ({describe(problem)})")
