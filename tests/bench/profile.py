"""``python -m tests.bench.profile``: where Homing's time goes under small requests; writes build/bench-profile.txt."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

from workers.bench.errors import BenchError

from .cells import CELLS, read_plan
from .natives import ROOT, build
from .peers import install
from .rig import Rig

TOP = 25
SAMPLES_PER_SECOND = 250


def main() -> int:
    """Profiles and returns the exit code. SECONDS and CELLS (the first one counts) are as for the comparison."""
    try:
        plan = read_plan(os.environ)
        cell = plan.cells[0] if os.environ.get("CELLS") else CELLS["small"]
        path = ROOT / "build" / "bench-profile.txt"
        path.write_text(profile(cell.name, plan.seconds or 5.0), encoding="utf-8")
    except BenchError as problem:
        print(f"bench: {problem}", file=sys.stderr)
        return 1
    print(path.read_text(encoding="utf-8"))
    return 0


def profile(cell: str, seconds: float) -> str:
    """Samples Homing's stacks for ``seconds`` under one cell's load and returns the report."""
    natives, peers = build(), install()
    if peers.python is None:
        raise BenchError(f"py-spy is missing: {peers.missing[0]}")
    stacks = ROOT / "build" / "bench" / "stacks.txt"
    with Rig(natives, peers, ("homing",)) as rig:
        pid = rig.targets["homing"].pid
        load = rig.load("homing", CELLS[cell].options(seconds + 2))
        before = times(pid)
        spy = [
            str(peers.python.parent / "py-spy"),
            "record",
            "--pid",
            str(pid),
            "--format",
            "raw",
            "--output",
            str(stacks),
        ]
        spy += [
            "--duration",
            str(max(1, round(seconds))),
            "--rate",
            str(SAMPLES_PER_SECOND),
            "--nonblocking",
            "--function",
        ]
        done = subprocess.run(spy, capture_output=True, text=True, check=False)
        after = times(pid)
        load.terminate()
        load.wait()
    if done.returncode:
        raise BenchError(f"py-spy: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    user, system = after[0] - before[0], after[1] - before[1]
    head = f"{CELLS[cell].title}: {system / max(user + system, 1):.0%} of the CPU time is the kernel's.\n"
    return head + report(stacks.read_text(encoding="utf-8"))


def report(stacks: str) -> str:
    """Counts folded stacks: what is at the top of them (self), and what is anywhere in them (total)."""
    own: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for line in stacks.splitlines():
        frames, _, count = line.rpartition(" ")
        names = frames.split(";")
        own[names[-1]] += int(count)
        for name in dict.fromkeys(names):
            total[name] += int(count)
    samples = max(sum(own.values()), 1)
    for name in [name for name, count in total.items() if count > 0.98 * samples]:
        del total[name]  # the way from the command line to the event loop, in every stack
    lines: list[str] = []
    for title, counts in (("self", own), ("total", total)):
        lines += ["", f"{title:>6}  function", *(f"{n / samples:6.1%}  {name}" for name, n in counts.most_common(TOP))]
    return "\n".join(lines) + "\n"


def times(pid: int | None) -> tuple[int, int]:
    """Clock ticks that a process spent in its own code and in the kernel."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]), int(fields[12])


if __name__ == "__main__":
    sys.exit(main())
