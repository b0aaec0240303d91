"""What is measured: the cells, the targets, and the plan of a run read from the environment."""

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from workers.bench.errors import BenchError

STEP_SECONDS = 0.02
"""Time between two chunks of a paced stream: 50 tokens a second, as people see them come."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One kind of traffic. ``seconds`` is the measured window, ``warm`` what comes before it."""

    name: str
    title: str
    connections: int
    body: int
    seconds: float
    warm: float
    chunks: int = 0
    is_paced: bool = False

    @property
    def is_stream(self) -> bool:
        """Whether answers are streamed, so that costs are counted by the chunk."""
        return self.is_paced or self.chunks > 0

    def options(self, seconds: float | None) -> list[str]:
        """Words for the load. A paced stream lasts as long as the window, so each connection begins one inside it."""
        window = seconds or self.seconds
        words = [f"connections={self.connections}", f"body={self.body}", f"seconds={window}", f"warm={self.warm}"]
        # Distinct long prompts take memory by their length; sixteen short ones are enough to spread.
        words.append(f"prompts={8 if self.body > 100_000 else 16}")
        if self.is_paced:
            chunks = max(1, round(window / STEP_SECONDS))
            words += [f"stream={chunks}", f"step_us={round(STEP_SECONDS * 1e6)}", f"ramp={self.warm * 2 / 3:.3f}"]
        elif self.chunks:
            words.append(f"stream={self.chunks}")
        return words


CELLS = {
    cell.name: cell
    for cell in (
        Cell("small", "1 KB requests, 32 connections", 32, 1024, 1.6, 0.4),
        Cell("large", "800 KB requests, 32 connections", 32, 800_000, 2.2, 0.8),
        Cell("large1", "800 KB requests, 1 connection", 1, 800_000, 1.5, 0.4),
        Cell("streams64", "64 streams, a chunk per 20 ms each", 64, 1024, 2.6, 0.6, is_paced=True),
        Cell("streams512", "512 streams, a chunk per 20 ms each", 512, 1024, 2.6, 0.6, is_paced=True),
        Cell("flat512", "512 streams, unpaced", 512, 1024, 2.2, 1.2, chunks=128),
    )
}
TARGETS = ("direct", "homing", "nginx", "vllm-router", "sglang-router")
ROUTERS = ("vllm-router", "sglang-router")
"""The peers that route by cache affinity: the better of these two is what the bars call the better peer."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One run. ``seconds`` replaces every cell's window when given."""

    cells: tuple[Cell, ...]
    targets: tuple[str, ...]
    rounds: int
    seconds: float | None

    @property
    def has_all_cells(self) -> bool:
        """Whether the suite is run, so that what is left after it (memory) means something."""
        return len(self.cells) == len(CELLS)

    @property
    def is_whole(self) -> bool:
        """Whether this run may stand in the docs: everything, five rounds or more, windows as they are meant."""
        all_targets = set(self.targets) == set(TARGETS)
        return self.has_all_cells and all_targets and self.rounds >= 5 and not self.seconds


def read_plan(environ: Mapping[str, str]) -> Plan:
    """Reads CELLS, TARGETS (comma-separated; all by default), ROUNDS (5) and SECONDS; ``BenchError`` names a bad one."""
    cells = _choose("CELLS", environ, tuple(CELLS))
    return Plan(
        cells=tuple(CELLS[name] for name in cells),
        targets=_choose("TARGETS", environ, TARGETS),
        rounds=int(_number("ROUNDS", environ, "5")),
        seconds=_number("SECONDS", environ, "0") or None,
    )


def command_line(environ: Mapping[str, str] = os.environ) -> str:
    """The command that repeats this run."""
    given = [
        f"{name}={shlex.quote(environ[name])}"
        for name in ("CELLS", "TARGETS", "ROUNDS", "SECONDS")
        if environ.get(name)
    ]
    return " ".join(["make bench", *given])


def _choose(name: str, environ: Mapping[str, str], known: tuple[str, ...]) -> tuple[str, ...]:
    wanted = tuple(word.strip() for word in environ.get(name, "").split(",") if word.strip())
    for word in wanted:
        if word not in known:
            raise BenchError(f"{name}={environ[name]}: {word} is not one of {', '.join(known)}")
    return tuple(word for word in known if word in wanted) if wanted else known


def _number(name: str, environ: Mapping[str, str], default: str) -> float:
    text = environ.get(name) or default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if value < 0 or (name == "ROUNDS" and (value < 1 or value != int(value))):
        raise BenchError(f"{name}={text} is not a number that can be used; give for example {name}={default}")
    return value
