"""A worker's place in the fleet: taken, kept by heartbeats, given back by draining.

The wire is `docs/reference/registration.md`, and nothing else is sent.
A proxy that is away is waited for without end; a proxy that says no is never asked again.
Nothing here reads an engine or a GPU: what is registered arrives as plain values.
"""

import asyncio
import contextlib
import logging
import random
import time
from dataclasses import dataclass

from workers.agent.exchange import Exchange, MembershipRefused, ProxyAway

__all__ = ["Membership", "MembershipRefused", "Registration"]

_LOG = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS = 0.25
_LONGEST_PAUSE_SECONDS = 5.0
_DRAIN_POLL_SECONDS = 0.2
_DRAIN_PATIENCE = 3
"""Failed calls in a row after which a drain gives up: a proxy that is away has no request in flight here."""


@dataclass(frozen=True, slots=True)
class Registration:
    """What a worker says about itself: `identity` is its hardware, `engine` what the engine reports."""

    id: str
    url: str
    incarnation: str
    identity: dict[str, object]
    engine: dict[str, object]

    def body(self) -> dict[str, object]:
        """Returns the JSON body of `POST /workers`."""
        return {
            "id": self.id,
            "url": self.url,
            "incarnation": self.incarnation,
            "identity": self.identity,
            "engine": self.engine,
        }

    def summary(self) -> str:
        """Says in one clause what is offered: models, block, cache and hardware."""
        models = self.engine.get("models")
        names = [str(model.get("id")) for model in models] if isinstance(models, list) else []
        block = self.engine.get("block_size")
        capacity = self.engine.get("capacity_tokens")
        cache = f"{capacity:,} tokens of cache" if isinstance(capacity, int) else "cache size unknown"
        if self.identity.get("source") == "none":
            gpu = "none"
        else:
            gpu = str(self.identity.get("name") or self.identity.get("gpu_name") or "unknown")
        plural = "model" if len(names) == 1 else "models"
        return (
            f"{len(names)} {plural} ({', '.join(names)}), block {'unknown' if block is None else block}, "
            f"{cache}, GPU {gpu}"
        )


class Membership:
    """Keeps one worker registered with one proxy until told to stop.

    `token` is the bearer (`None` sends none); `drain_seconds` bounds the last wait for requests in flight.
    State lines go to this module's logger, one for each change.
    """

    def __init__(
        self, proxy_url: str, token: str | None, registration: Registration, *, drain_seconds: float = 30.0
    ) -> None:
        self._exchange = Exchange(proxy_url, token)
        self._drain_seconds = drain_seconds
        self._wanted: Registration | None = registration
        self._latest = registration
        self._offered: Registration | None = None
        """What the proxy may hold of this worker: sent, perhaps never answered."""
        self._joined: Registration | None = None
        """What the proxy holds, as far as its last answer tells."""
        self._heartbeat_seconds = _LONGEST_PAUSE_SECONDS
        self._lease_seconds = 2 * _LONGEST_PAUSE_SECONDS
        self._beaten_at = 0.0
        self._failures = 0
        self._state: str | None = None
        self._woken = asyncio.Event()

    def __repr__(self) -> str:
        wanted = "away" if self._wanted is None else f"{self._wanted.id} life {self._wanted.incarnation}"
        held = "joined" if self._joined is not None and self._joined is self._wanted else "not joined"
        return f"<Membership of {wanted} at {self._exchange.proxy_url}, {held}>"

    async def run(self, stop: asyncio.Event) -> int:
        """Registers and beats until `stop` is set, then drains, deregisters and returns 0.

        Raises `MembershipRefused` as soon as the proxy says no.
        """
        async with self._exchange:
            keeping = asyncio.create_task(self._keep())
            stopping = asyncio.create_task(stop.wait())
            try:
                await asyncio.wait({keeping, stopping}, return_when=asyncio.FIRST_COMPLETED)
                if keeping.done():
                    await keeping
            finally:
                keeping.cancel()
                stopping.cancel()
                await asyncio.gather(keeping, stopping, return_exceptions=True)
            await self._part()
        return 0

    async def renew(self, registration: Registration) -> None:
        """Replaces the registration, as after a restart of the engine; the proxy is told at once by `run`."""
        self._wanted = self._latest = registration
        self._woken.set()

    async def leave(self) -> None:
        """Takes the worker out of the fleet until `renew`: its engine is gone, and so is its cache."""
        self._wanted = None
        self._woken.set()

    async def come_back(self) -> None:
        """Takes the place again that `leave` gave up, as the same life: the engine was only frozen."""
        await self.renew(self._latest)

    async def _keep(self) -> None:
        """Brings the proxy's view to what is wanted, again and again."""
        while True:
            self._woken.clear()
            began = time.monotonic()
            try:
                await self._step()
            except ProxyAway as away:
                pause = self._note_failure(away)
            else:
                self._note_success()
                spent = time.monotonic() - began
                pause = max(self._heartbeat_seconds - spent, self._heartbeat_seconds / 4) * random.uniform(0.9, 1.0)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._woken.wait(), pause)

    async def _step(self) -> None:
        """Makes the one call that is due: leave, register or beat."""
        wanted = self._wanted
        if wanted is None:
            await self._withdraw()
            return
        if self._joined is wanted:
            if await self._beat(wanted):
                return
            _LOG.info("the proxy does not know this life of %s; registering again", wanted.id)
        self._joined = None
        self._offered = wanted
        grant = await self._exchange.register(wanted.body())
        self._joined = wanted
        self._heartbeat_seconds = grant.heartbeat_seconds
        self._lease_seconds = grant.lease_seconds
        self._beaten_at = time.monotonic()
        self._state = None
        _LOG.info("registered as %s at %s; %s", wanted.id, self._exchange.proxy_url, wanted.summary())

    async def _beat(self, held: Registration) -> bool:
        """Renews the lease; tells whether the proxy still knows this life."""
        self._beaten_at = time.monotonic()
        # After a third of the lease without an answer, two more tries still fit in it.
        state = await self._exchange.heartbeat(held.id, held.incarnation, within=self._lease_seconds / 3)
        if state is not None and state != self._state:
            _LOG.info("%s is %s", held.id, state)
            self._state = state
        return state is not None

    async def _withdraw(self) -> None:
        """Removes what the proxy may hold; when it cannot be told, the lease runs out on its own."""
        held, self._offered, self._joined = self._offered, None, None
        if held is None:
            return
        try:
            await self._exchange.remove(held.id, held.incarnation)
        except ProxyAway as away:
            _LOG.info("%s; the lease of %s runs out on its own", away, held.id)
        else:
            _LOG.info("%s has left %s", held.id, self._exchange.proxy_url)

    def _note_failure(self, away: ProxyAway) -> float:
        """Says when failing starts; returns the seconds to wait, growing and jittered to spread a fleet."""
        if self._failures == 0:
            _LOG.info("%s; trying again until it answers", away)
        longest = min(self._heartbeat_seconds, _LONGEST_PAUSE_SECONDS)
        pause = min(_FIRST_PAUSE_SECONDS * 2.0 ** min(self._failures, 8), longest)
        self._failures += 1
        return pause * random.uniform(0.5, 1.0)

    def _note_success(self) -> None:
        if self._failures:
            _LOG.info("the proxy at %s answers again", self._exchange.proxy_url)
        self._failures = 0

    async def _part(self) -> None:
        """Waits for the requests in flight, then removes the worker."""
        held = self._offered
        if held is None:
            return
        _LOG.info("draining %s", held.id)
        if await self._drain(held):
            await self._withdraw()

    async def _drain(self, held: Registration) -> bool:
        """Waits until nothing is in flight or time is up; tells whether something is left to remove."""
        deadline = time.monotonic() + self._drain_seconds
        inflight: int | None = None
        failures = 0
        while time.monotonic() < deadline and failures < _DRAIN_PATIENCE:
            try:
                inflight = await self._exchange.drain(held.id, held.incarnation)
                if not inflight:
                    return inflight is not None
                # A lease that ran out in a long drain would cut the streams that the drain is for.
                overdue = time.monotonic() - self._beaten_at >= self._heartbeat_seconds
                if overdue and not await self._beat(held):
                    return False
                failures = 0
            except ProxyAway:
                failures += 1
            await asyncio.sleep(_DRAIN_POLL_SECONDS)
        if inflight:
            _LOG.info(
                "%s still has %d in flight after %g s; leaving all the same",
                held.id,
                inflight,
                self._drain_seconds,
            )
        return True
