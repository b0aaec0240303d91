"""`homing-worker demo`: an agent load through Homing and round robin side by side, a table, then service.

The composition root of this package: the proxy and the workers are child processes, reached over sockets.
"""

import asyncio
import contextlib
import signal
import tempfile
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from workers.bench import bars, fleet, report
from workers.bench.children import Children
from workers.bench.errors import BenchError
from workers.bench.fleet import Fleets
from workers.bench.load import Load, Sample, drive
from workers.bench.progress import Progress
from workers.bench.sessions import plan

LOAD_SECONDS = 25.0
TIME_SCALE = 12.0
"""The default load is 300 GPU seconds long: short enough to watch. Much faster, and the 0.3 s that a cached prompt
takes would shrink to the time that three processes need to pass it on."""
GAP_SECONDS = 4.0
"""GPU seconds between two arrivals. A first request is some 3 s of prefill on the fastest card, so the fleet keeps
up and first requests seldom wait for one another."""
PAUSE_SECONDS = 80.0
"""GPU seconds between an answer and the next request, on average: tools run, a person looks."""
TICK_SECONDS = 0.25
BUILD = Path("build")
_INTERRUPTED = 130
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the command line says. ``seconds`` set = run the load that long and exit; None = serve afterwards.

    ``time_scale`` is how much faster than real GPUs the simulated ones run; None = ``TIME_SCALE``.
    ``listen`` is the proxy's HOST:PORT; port 0 takes any free one.
    """

    seconds: float | None = None
    conversations: int = 40
    time_scale: float | None = None
    seed: int = 0
    listen: str = "127.0.0.1:8080"


class _Stopped(Exception):
    """A signal asked for the end."""


def run(options: DemoOptions) -> int:
    """Runs the demo and returns its exit code; whatever way it ends, no process of its own is left.

    0 done, or stopped while serving; 1 with one line on standard error when it cannot go on, or when a bar is
    missed under ``STRICT=1``; 130 when stopped before the table.
    """
    console = Console()
    try:
        return asyncio.run(_run(options, console))
    except BenchError as error:
        Console(stderr=True).print(f"homing-worker demo: {error}", markup=False, highlight=False, soft_wrap=True)
        return 1
    except (_Stopped, KeyboardInterrupt):
        console.print("stopped")
        return _INTERRUPTED


async def _run(options: DemoOptions, console: Console) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    scale = options.time_scale or TIME_SCALE
    # The store's folder holds a socket, whose path must be short: the system's own temporary folder, not build/.
    with tempfile.TemporaryDirectory(prefix="homing-demo-") as state, Children(BUILD / "demo") as children:
        fleets = fleet.start(children, options.listen, Path(state), options.seed, scale)
        console.print("starting the proxy and two equal fleets of three simulated GPUs")
        planning = asyncio.to_thread(plan, options.conversations, options.seed)
        conversations, _ = await _unless(stop, asyncio.gather(planning, fleet.ready(children, fleets)))
        seconds = options.seconds or LOAD_SECONDS
        load = Load(conversations, fleet.MODEL, seconds, GAP_SECONDS / scale, PAUSE_SECONDS / scale)
        homing, round_robin = await _unless(stop, _run_both(load, scale, children, fleets, console))
        measured = _tell(homing, round_robin, scale, console)
        facts = {"seed": options.seed, "time_scale": scale, "seconds": seconds}
        bars.write_bars(BUILD / "demo.json", measured, {**facts, "conversations": options.conversations})
        if options.seconds is None:
            _invite(fleets, console)
            await _serve(stop, children)
            console.print("stopping")
    return bars.exit_code(measured)


async def _run_both(
    load: Load, scale: float, children: Children, fleets: Fleets, console: Console
) -> tuple[list[Sample], list[Sample]]:
    """Runs the load through Homing and round robin at once; returns what each side's client saw."""
    homing: list[Sample] = []
    round_robin: list[Sample] = []
    planned = sum(conversation.requests for conversation in load.conversations)
    progress = Progress(console, {"Homing": homing, "round robin": round_robin}, planned, scale)
    running = asyncio.gather(
        drive(load, (fleets.proxy,), homing.append),
        drive(load, fleets.direct, round_robin.append),
    )
    try:
        with progress.shown():
            while not running.done():
                children.check()
                progress.update()
                await asyncio.wait([running], timeout=TICK_SECONDS)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    running.result()
    return homing, round_robin


def _tell(homing: Sequence[Sample], round_robin: Sequence[Sample], scale: float, console: Console) -> list[bars.Bar]:
    """Prints the table, its notes, the bars and the first failures; returns the bars."""
    compared = report.compare(homing, round_robin, scale)
    console.print(report.table(compared))
    console.print(report.notes(compared, scale), highlight=False, style="dim")
    measured = report.bars(compared)
    for bar in measured:
        value = "not measured" if bar.value is None else f"{bar.value:.3g}"
        said = f"{'kept' if bar.ok else 'MISSED':6}  {bar.id}: {value} (limit {bar.op} {bar.limit:g})"
        console.print(said, highlight=False)
    for failed in [sample for sample in (*homing, *round_robin) if sample.error is not None][:3]:
        console.print(f"failed: {failed.error}", markup=False, highlight=False)
    return measured


def _invite(fleets: Fleets, console: Console) -> None:
    """Says how to use what keeps running. Lines are never wrapped, so that each can be pasted."""
    request = f'{{"model":"{fleet.MODEL}","messages":[{{"role":"user","content":"hello"}}],"max_tokens":16}}'
    post = f"curl -s {fleets.proxy}/v1/chat/completions -H 'content-type: application/json'"
    lines = (
        "",
        f"base URL  {fleets.proxy}/v1",
        f"metrics   {fleets.proxy}/metrics",
        f"workers   {fleets.proxy}/workers",
        "",
        f"{post} -d '{request}'",
        "",
        "Serving until Ctrl-C.",
    )
    for line in lines:
        console.print(line, soft_wrap=True, markup=False, highlight=False)


async def _serve(stop: asyncio.Event, children: Children) -> None:
    """Returns when ``stop`` is set; raises ``BenchError`` when a child dies."""
    while not stop.is_set():
        children.check()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), TICK_SECONDS)


async def _unless(stop: asyncio.Event, work: Awaitable[_T]) -> _T:
    """Awaits ``work`` and returns its result; raises ``_Stopped`` as soon as ``stop`` is set."""
    doing = asyncio.ensure_future(work)
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((doing, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise _Stopped
        return doing.result()
    finally:
        stopping.cancel()
        doing.cancel()
        await asyncio.gather(doing, stopping, return_exceptions=True)
