"""A simulated worker's place in the fleet: what it says about itself, for as long as it lives.

The hardware is declared, not read; the membership itself is the agent's.
"""

import asyncio
import logging
import sys

from workers.agent.identity import Identity, read_host_os
from workers.agent.membership import Membership, MembershipRefused, Registration
from workers.sim import wire
from workers.sim.app import Application
from workers.sim.options import SimOptions

__all__ = ["MembershipRefused", "belong", "describe_worker"]


async def belong(proxy: str, options: SimOptions, app: Application, url: str, stop: asyncio.Event) -> int:
    """Registers `app`, served at `url`, and keeps it registered until `stop`, then drains and leaves.

    Returns the exit code; raises `MembershipRefused` when the proxy says no.
    """
    _show_membership()
    return await Membership(proxy, options.join_token, describe_worker(options, app, url)).run(stop)


def describe_worker(options: SimOptions, app: Application, url: str) -> Registration:
    """Says what this worker is, in the words of the registration wire.

    Its default name is the identity and the port of `url`.
    """
    hardware = app.shape.hardware
    slug = "-".join(hardware.name.lower().split())
    return Registration(
        id=options.worker_id or f"{slug}-{url.rpartition(':')[2]}",
        url=options.advertise or url,
        incarnation=app.meters.incarnation,
        identity=Identity(
            name=hardware.edition.name,
            gpu_name=hardware.edition.gpu_name,
            gpu_count=1,
            memory_bytes=hardware.edition.memory_bytes,
            compute_capability=hardware.edition.compute_capability,
            host_os=read_host_os(),
            source="declared",
        ).body(),
        engine={
            "version": wire.VERSION,
            "models": app.models["data"],
            "block_size": app.shape.block_size,
            "capacity_tokens": app.shape.capacity_tokens,
            "prefix_caching": True,
            "kv_cache_dtype": "auto",
        },
    )


def _show_membership() -> None:
    """Prints the membership's state lines as this command's own."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("homing-worker sim: %(message)s"))
    logger = logging.getLogger("workers.agent")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False
