"""``python -m tests.bench.compare``: Homing and its peers side by side, cell by cell, round by round.

CELLS, TARGETS, ROUNDS and SECONDS in the environment choose a part; STRICT=1 makes a missed bar an exit code of 1.
Writes build/bench.json; a whole run also renews the tables in docs/performance.md.
"""

import os
import platform
import signal
import sys
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from workers.bench.bars import exit_code, write_bars
from workers.bench.errors import BenchError

from .cells import Cell, Plan, command_line, read_plan
from .figures import STORE, Results, is_sound, judge, per_request
from .natives import ROOT, build
from .peers import Peers, install
from .rig import Rig
from .tables import make_tables, text, write_docs


def main() -> int:
    """Runs the comparison and returns the exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
    try:
        plan = read_plan(os.environ)
    except BenchError as problem:
        print(f"bench: {problem}", file=sys.stderr)
        return 2
    try:
        return compare(plan)
    except BenchError as problem:
        print(f"bench: {problem}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def compare(plan: Plan) -> int:
    """Measures what ``plan`` asks for, writes bars and tables, and returns the exit code."""
    natives, peers = build(), install()
    results = Results()
    with Rig(natives, peers, plan.targets) as rig:
        for line in peers.missing:
            print(f"bench: not measured: {line}", file=sys.stderr)
        for place in range(plan.rounds):
            for cell in plan.cells:
                measure(rig, plan, place, cell, results)
        memory = {name: rig.memory(name) for name in rig.targets}
    own = {name: sum(size for process, size in sizes.items() if process != STORE) for name, sizes in memory.items()}
    bars = judge(results, own.get("homing") if plan.has_all_cells else None)
    tables = make_tables(results, bars, own, plan.targets)
    facts = describe(plan, peers, results, memory)
    write_bars(ROOT / "build" / "bench.json", bars, environment(plan, peers))
    console = Console(width=None if sys.stdout.isatty() else 180)
    for table in tables:
        table.show(console)
    for fact in facts:
        console.print(f"- {fact}", markup=False, highlight=False)
    page = ROOT / "docs" / "performance.md"
    if plan.is_whole and not peers.missing and not write_docs(page, tables, facts):
        print(f"bench: {page.name} has no bench markers; its tables were not renewed", file=sys.stderr)
    return exit_code(bars)


def measure(rig: Rig, plan: Plan, place: int, cell: Cell, results: Results) -> None:
    """Runs one cell against every target, beginning with another one in each round."""
    names = list(rig.targets)
    first = place % len(names)
    for name in names[first:] + names[:first]:
        try:
            result = rig.measure(name, cell, plan.seconds)
        except BenchError as problem:
            print(f"bench: round {place + 1}: {problem}", file=sys.stderr)
            continue
        figure = f"{result['chunks_per_s']:,.0f} chunks/s" if cell.is_stream else f"{result['rps']:,.0f} requests/s"
        failed = result["errors"] + result["short"]
        wrong = f", {failed} failed: {result['said'][:120]}" if failed else ""
        print(f"round {place + 1}/{plan.rounds}  {cell.name:10}  {name:13}  {figure}{wrong}", file=sys.stderr)
        if is_sound(result):
            results.add(cell.name, name, result)


def describe(plan: Plan, peers: Peers, results: Results, memory: dict[str, dict[str, int]]) -> list[str]:
    """What must be known beside the tables, a sentence each."""
    versions = ", ".join(f"{name} {version}" for name, version in peers.versions.items() if name in plan.targets)
    rounds = "one round" if plan.rounds == 1 else f"{plan.rounds} interleaved rounds"
    store = results.median("small", "homing", lambda result: per_request(result, is_store=True))
    resident = memory.get("homing", {}).get(STORE)
    beside = f"{text(store, 1)} µs a small request, {text(resident / 1e6 if resident else None, 0)} MB"
    return [
        f"{datetime.now(UTC):%Y-%m-%d}, `{command_line()}`: medians of {rounds} (±: the round farthest from its median).",
        f"{processor()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}, Python {platform.python_version()}.",
        f"Routers with affinity on (policy `cache_aware`), nginx as a plain reverse proxy: {versions or 'none of them'}.",
        "Each target alone on one core, the others stopped; two workers and the load on another.",
        "CPU is that of all threads and children inside the measured window.",
        f"Homing's metrics, receipt headers and log line are on. Its embedded store is counted apart: {beside}.",
    ]


def environment(plan: Plan, peers: Peers) -> dict[str, object]:
    """What travels with the bars."""
    return {
        "command": command_line(),
        "rounds": plan.rounds,
        "cells": [cell.name for cell in plan.cells],
        "targets": list(plan.targets),
        "cpu": processor(),
        "peers": peers.versions,
        "missing": peers.missing,
    }


def processor() -> str:
    """The processor as the kernel names it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


if __name__ == "__main__":
    sys.exit(main())
