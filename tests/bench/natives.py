"""The stand-in worker and the load, compiled from ``native/`` when their sources are newer."""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from workers.bench.errors import BenchError

ROOT = Path(__file__).parents[2]
SOURCES = Path(__file__).parent / "native"
PARTS = {"upstream": ("upstream.c", "answers.c"), "load": ("load.c", "census.c")}


@dataclass(frozen=True, slots=True)
class Natives:
    """Paths of the two programs; the head of each one's main source says how it is called."""

    upstream: Path
    load: Path


def build(folder: Path = ROOT / "build" / "bench") -> Natives:
    """Compiles into ``folder`` what is not there or older than a source; ``BenchError`` without a C compiler."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise BenchError("no C compiler found; install one (Debian: gcc and libc6-dev) or name it in CC")
    folder.mkdir(parents=True, exist_ok=True)
    newest = max(source.stat().st_mtime for source in SOURCES.iterdir())
    for name, parts in PARTS.items():
        program = folder / name
        if program.exists() and program.stat().st_mtime > newest:
            continue
        # Renamed into place, so that a run that starts meanwhile sees the old program or the new one, whole.
        fresh = folder / f".{name}.{os.getpid()}"
        command = [compiler, "-O2", "-Wall", "-Wextra", "-o", str(fresh), *(str(SOURCES / part) for part in parts)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BenchError(f"{name} does not compile: {(done.stderr.strip().splitlines() or ['no message'])[0]}")
        fresh.rename(program)
    return Natives(upstream=folder / "upstream", load=folder / "load")
