"""The fast transport: HTTP/1.1 on asyncio and httptools, a pool of kept-alive connections per worker.

No task, future or timer per call once a connection is there: bytes go from one socket's callback to the other's. The
pool has no bound, so a cancelled call cannot leak a slot of one. One sweep a second looks after all time limits.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from urllib.parse import urlsplit

from ...errors import ConnectFailed, FirstByteTimeout, HomingError, WorkerDied
from ..ports import Call, Exchange, Sink
from .connection import Connection
from .limits import KEEP_ALIVE_SECONDS, Limits, describe

SWEEP_SECONDS = 1.0


class WireTransport:
    """Carries calls over connections of its own."""

    def __init__(self, limits: Limits, tls: ssl.SSLContext | None = None) -> None:
        self.limits = limits
        self._tls = tls
        self._pools: dict[str, Pool] = {}
        self._sweeper: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        pools = self._pools.values()
        busy, idle = sum(len(pool.busy) for pool in pools), sum(len(pool.idle) for pool in pools)
        return f"<WireTransport {busy} busy, {idle} idle>"

    def open(self, worker_id: str, call: Call, sink: Sink) -> Exchange:
        """Starts a call; what comes of it is told to `sink`, never before this returns."""
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().call_later(SWEEP_SECONDS, self._sweep)
        pool = self._pools.get(call.base_url)
        if pool is None:
            pool = self._pools[call.base_url] = Pool(call.base_url, self.limits, self._tls)
        return pool.open(worker_id, call, sink)

    async def close(self) -> None:
        """Closes every connection; running calls are told that the worker died."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        pools, self._pools = self._pools, {}
        for pool in pools.values():
            pool.close()
        await asyncio.sleep(0)

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for base_url, pool in list(self._pools.items()):
            pool.sweep(now)
            if not pool.busy and not pool.idle:
                del self._pools[base_url]
        self._sweeper = loop.call_later(SWEEP_SECONDS, self._sweep) if self._pools else None


class Pool:
    """The connections to one worker."""

    def __init__(self, base_url: str, limits: Limits, tls: ssl.SSLContext | None) -> None:
        parts = urlsplit(base_url)
        self.limits = limits
        self.host = parts.hostname or ""
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.tls = (tls or ssl.create_default_context()) if parts.scheme == "https" else None
        self.authority = parts.netloc.encode("latin-1")
        self.prefix = parts.path.encode("latin-1")
        self.idle: deque[Connection] = deque()
        self.busy: set[WireCall] = set()

    def open(self, worker_id: str, call: Call, sink: Sink) -> WireCall:
        """Sends a call on an idle connection, or dials."""
        running = WireCall(self, worker_id, call, sink)
        self.busy.add(running)
        while self.idle:
            connection = self.idle.pop()
            if not connection.transport.is_closing():
                connection.start(running, is_reused=True)
                return running
        running.dialling = asyncio.get_running_loop().create_task(self._dial(running))
        return running

    async def _dial(self, running: WireCall) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.limits.connect):
                _, connection = await loop.create_connection(
                    lambda: Connection(self), self.host, self.port, ssl=self.tls
                )
        except (OSError, ValueError, TimeoutError) as problem:  # ValueError: the host is no host name
            what = describe(problem) if str(problem) else f"no connection within {self.limits.connect:g} s"
            running.fail(ConnectFailed(f"worker {running.worker_id} cannot be reached ({what}); try again later"))
            return
        running.dialling = None
        connection.start(running, is_reused=False)

    def sweep(self, now: float) -> None:
        """Ends what is over its time: silent calls, and connections idle for too long."""
        for running in list(self.busy):
            running.check(now, self.limits)
        while self.idle and now - self.idle[0].idle_since > KEEP_ALIVE_SECONDS:
            self.idle.popleft().transport.close()

    def drop_idle(self) -> None:
        """Ends the connections that wait for a call."""
        for connection in self.idle:
            connection.transport.abort()
        self.idle.clear()

    def close(self) -> None:
        """Ends everything."""
        self.drop_idle()
        for running in list(self.busy):
            running.fail(WorkerDied(f"the proxy closed its call to worker {running.worker_id}"))


class WireCall:
    """One running call: an `Exchange`. After `abort` or the end its sink hears nothing more."""

    __slots__ = ("call", "connection", "dialling", "is_paused", "last", "pool", "sink", "touched", "worker_id")

    def __init__(self, pool: Pool, worker_id: str, call: Call, sink: Sink) -> None:
        self.pool = pool
        self.worker_id = worker_id
        self.call = call
        self.sink: Sink | None = sink
        self.connection: Connection | None = None
        self.dialling: asyncio.Task[None] | None = None
        self.is_paused = False
        self.touched = True
        self.last = 0.0

    def pause(self) -> None:
        """Stops reading from the worker until `resume`."""
        self.is_paused = True
        if self.connection is not None and not self.connection.transport.is_closing():
            self.connection.transport.pause_reading()

    def resume(self) -> None:
        """Reads again."""
        self.is_paused = False
        self.touched = True
        if self.connection is not None and not self.connection.transport.is_closing():
            self.connection.transport.resume_reading()

    def abort(self) -> None:
        """Ends the call; the worker sees its connection close."""
        self.sink = None
        self.pool.busy.discard(self)
        if self.dialling is not None:
            self.dialling.cancel()
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.running = None
            connection.transport.abort()

    def fail(self, fault: HomingError) -> None:
        """Ends the call and tells why."""
        sink = self.sink
        self.abort()
        if sink is not None:
            sink.on_fault(fault)

    def release(self) -> Sink | None:
        """Ends the call at the end of its answer; returns whom to tell."""
        sink, self.sink = self.sink, None
        self.connection = None
        self.pool.busy.discard(self)
        return sink

    def check(self, now: float, limits: Limits) -> None:
        """Fails the call when the worker has been silent for too long."""
        if self.touched or self.is_paused:
            self.touched, self.last = False, now
            return
        if self.connection is None:
            return  # still dialling, which has its own limit
        silent = now - self.last
        if not self.connection.has_heard and silent > limits.first_byte:
            fault: HomingError = FirstByteTimeout(
                f"worker {self.worker_id} sent no byte within {limits.first_byte:g} s; try again later"
            )
            self.fail(fault)
        elif self.connection.has_heard and silent > limits.idle:
            self.fail(WorkerDied(f"worker {self.worker_id} was silent for {limits.idle:g} s inside its answer"))
