"""`homing-worker join`: a running engine, taken into a fleet and kept there.

The order is fixed: wait for the engine, read it, name the hardware, register, beat; at a signal drain, leave.
One line on stdout for each change of state; one line on stderr for the end that is not wanted.
"""

import asyncio
import ipaddress
import logging
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import SplitResult, urlsplit

import httpx

from workers.agent.engine import EngineFacts, EngineUnusable, EngineWatch, open_engine, wait_ready
from workers.agent.identity import Identity, identify
from workers.agent.membership import Membership, MembershipRefused, Registration

_LOG = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")

_Result = TypeVar("_Result")


class BadOption(ValueError):
    """A value on the command line cannot work; the message is one line."""


@dataclass(frozen=True, slots=True)
class JoinOptions:
    """What `join` is told: base URLs without a last slash, `advertise` as the proxy reaches the engine."""

    proxy: str
    engine: str
    advertise: str
    worker_id: str
    token: str
    wait_seconds: float = 600.0


def settle_options(
    *,
    proxy: str,
    engine: str,
    token: str | None,
    advertise: str | None = None,
    worker_id: str | None = None,
    wait_seconds: float = 600.0,
) -> JoinOptions:
    """Checks the values of the command line and fills in the defaults; raises `BadOption`."""
    proxy_parts, engine_parts = _split_url("--proxy", proxy), _split_url("--engine", engine)
    if advertise is None:
        if _is_loopback(engine_parts) and not _is_loopback(proxy_parts):
            raise BadOption(
                f"the engine's address {engine} means another machine to the proxy at {proxy}: "
                "pass --advertise with the address at which the proxy reaches this engine"
            )
        advertise = engine
    _split_url("--advertise", advertise)
    if worker_id is None:
        worker_id = _default_id(engine_parts)
    elif not _NAME.fullmatch(worker_id):
        raise BadOption(f"--id {worker_id!r} is no worker name: use 1 to 64 of A-Z a-z 0-9 . _ -")
    if not token:
        raise BadOption("no join token: set HOMING_JOIN_TOKEN to the value the proxy was started with")
    return JoinOptions(
        proxy=proxy.rstrip("/"),
        engine=engine.rstrip("/"),
        advertise=advertise.rstrip("/"),
        worker_id=worker_id,
        token=token,
        wait_seconds=wait_seconds,
    )


def run(options: JoinOptions) -> int:
    """Joins, stays until a signal, and returns the exit code: 0 left cleanly, 1 refused, 3 no engine."""
    print_states("join")
    return asyncio.run(_join(options))


def print_states(command: str) -> None:
    """Prints what the agent logs on stdout, a line each, introduced by the command's name."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter(f"homing-worker {command}: %(message)s"))
    logger = logging.getLogger("workers.agent")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


async def _join(options: JoinOptions) -> int:
    stop = asyncio.Event()
    heed_signals(stop)
    code = 0
    try:
        async with open_engine(options.engine) as engine:
            facts = await unless(stop, wait_ready(engine, options.wait_seconds))
            if facts is not None:
                await stay_joined(options, engine, facts, stop)
    except* MembershipRefused as refusals:
        code = complain("join", refusals, 1)
    except* EngineUnusable as failures:
        code = complain("join", failures, 3)
    return code


async def stay_joined(
    options: JoinOptions,
    engine: httpx.AsyncClient,
    facts: EngineFacts,
    stop: asyncio.Event,
    *,
    told: Mapping[str, object] | None = None,
    beside: Callable[[Membership], Coroutine[None, None, None]] | None = None,
) -> None:
    """Registers a ready engine and follows it from life to life until `stop` is set, then drains and leaves.

    `told` goes into the identity: facts that whoever started the engine knows. `beside` runs as long as the membership.
    Raises an exception group of `MembershipRefused` or `EngineUnusable`.
    """
    identity = await asyncio.to_thread(identify)
    membership = Membership(options.proxy, options.token, _compose(options, identity, facts, told))

    async def rejoin(fresh: EngineFacts) -> None:
        await membership.renew(_compose(options, identity, fresh, told))

    watch = EngineWatch(engine, facts, on_gone=membership.leave, on_back=rejoin)
    async with asyncio.TaskGroup() as group:
        working = [group.create_task(watch.run())]
        if beside is not None:
            working.append(group.create_task(beside(membership)))
        await membership.run(stop)
        for task in working:
            task.cancel()


def _compose(
    options: JoinOptions, identity: Identity, facts: EngineFacts, told: Mapping[str, object] | None
) -> Registration:
    """Puts one life of the engine into a registration; warns when affinity cannot help it."""
    if facts.cache.prefix_caching is False:
        _LOG.warning(
            "warning: prefix caching is off in the engine at %s, so no prompt is ever at home there: "
            "start vLLM with --enable-prefix-caching",
            options.engine,
        )
    return Registration(
        id=options.worker_id,
        url=options.advertise,
        incarnation=facts.incarnation,
        identity={**identity.body(), **(told or {})},
        engine=facts.body(),
    )


def heed_signals(stop: asyncio.Event, at_once: Callable[[], None] = lambda: None) -> None:
    """Makes the first SIGTERM or SIGINT set `stop`, and the second call `at_once` and end the process."""
    loop = asyncio.get_running_loop()

    def heed(number: int) -> None:
        if stop.is_set():
            at_once()
            sys.stdout.flush()
            os._exit(128 + number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, heed, number)


async def unless(stop: asyncio.Event, work: Coroutine[None, None, _Result]) -> _Result | None:
    """Returns what `work` returns, `None` when `stop` is set first."""
    working = asyncio.create_task(work)
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        stopping.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)


def complain(command: str, errors: BaseExceptionGroup[Exception], code: int) -> int:
    """Prints the first error as one line, and passes the exit code on."""
    first: BaseException = errors
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    sys.stderr.write(f"homing-worker {command}: {first}\n")
    return code


def _split_url(option: str, url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        sound = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0
    except ValueError:
        sound = False
    if not sound or parts.username is not None or parts.query or parts.fragment:
        raise BadOption(f"{option} {url!r} is no base URL: write it like http://10.0.0.7:8000")
    return parts


def _is_loopback(parts: SplitResult) -> bool:
    """Tells whether only this machine can mean itself by this address; the unspecified address counts."""
    host = parts.hostname or ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    return address.is_loopback or address.is_unspecified


def _default_id(engine: SplitResult) -> str:
    """Makes a name that stays the same over restarts: this host, and the engine's port on it."""
    port = str(engine.port or {"http": 80, "https": 443}[engine.scheme])
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())
    return f"{host[: 64 - len(port) - 1]}-{port}"
