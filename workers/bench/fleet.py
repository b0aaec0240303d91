"""The two fleets of the demo: a proxy with its workers, and equal workers alone."""

import asyncio
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

import httpx

from workers.bench.children import Children, claim_address, free_ports
from workers.bench.errors import BenchError

MODEL = "Qwen3.8-27B"
IDENTITIES = {
    "h200": "H200 SXM",
    "rtx-pro-6000": "RTX PRO 6000 Blackwell Workstation Edition",
    "rtx-5090": "GeForce RTX 5090",
}
"""Worker ids and the hardware identities that they simulate, by the ledger's names."""
READY_SECONDS = 90.0
"""Seven interpreters start at once; a slow machine takes its time, a broken one is told within this."""


@dataclass(frozen=True, slots=True)
class Fleets:
    """Base URLs: the proxy, and the workers that stand without one."""

    proxy: str
    direct: tuple[str, ...]


def start(children: Children, listen: str, state: Path, seed: int, time_scale: float) -> Fleets:
    """Starts the proxy on ``listen`` (port 0 = any free one), its three workers, and three more without it.

    ``state`` is an empty folder for the proxy's store. ``ready`` says when they serve.
    Raises ``BenchError`` when ``listen`` cannot be had.
    """
    listen = claim_address(listen)
    host, _, port = listen.rpartition(":")
    proxy = f"http://{'127.0.0.1' if host in ('0.0.0.0', '[::]') else host}:{port}"  # noqa: S104 - read, not bound
    token = {"HOMING_JOIN_TOKEN": secrets.token_urlsafe(24)}
    store = ["--store-url", "embedded", "--state-dir", str(state)]
    children.start("proxy", ["proxy", "serve", "--listen", listen, *store], token)
    direct = []
    ports = iter(free_ports(2 * len(IDENTITIES)))
    for number, (name, identity) in enumerate(IDENTITIES.items()):
        simulator = ["workers", "sim", "--identity", identity, "--model", MODEL]
        simulator += ["--seed", str(seed + number), "--time-scale", f"{time_scale:g}"]
        joined = ["--id", name, "--listen", f"127.0.0.1:{next(ports)}", "--proxy", proxy]
        children.start(name, [*simulator, *joined], token)
        alone = f"127.0.0.1:{next(ports)}"
        children.start(f"{name}-round-robin", [*simulator, "--listen", alone], {})
        direct.append(f"http://{alone}")
    return Fleets(proxy, tuple(direct))


async def ready(children: Children, fleets: Fleets) -> None:
    """Waits until the proxy serves all its workers and the others answer; ``BenchError`` when they do not."""
    deadline = time.monotonic() + READY_SECONDS
    async with httpx.AsyncClient(timeout=2.0, trust_env=False) as client:
        while missing := await _missing(client, fleets):
            children.check()
            if time.monotonic() > deadline:
                raise BenchError(f"not ready after {READY_SECONDS:.0f} s: {missing}; see the logs in {children.folder}")
            await asyncio.sleep(0.1)


async def _missing(client: httpx.AsyncClient, fleets: Fleets) -> str | None:
    """Says what does not serve yet, None when all does."""
    for url in (*(f"{base}/health" for base in fleets.direct), f"{fleets.proxy}/readyz"):
        try:
            answer = await client.get(url)
        except httpx.HTTPError as error:
            return f"{url} does not answer ({type(error).__name__})"
        if answer.status_code != httpx.codes.OK:
            return f"{url} answers {answer.status_code}"
    try:
        listed = (await client.get(f"{fleets.proxy}/workers")).raise_for_status().json()["workers"]
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        return f"{fleets.proxy}/workers does not list workers ({error})"
    states = {worker["id"]: worker["state"] for worker in listed}
    absent = [f"{name} is {states.get(name, 'absent')}" for name in IDENTITIES if states.get(name) != "ready"]
    return ", ".join(absent) or None
