"""The rig: two workers and the load on one core, the targets on another, and only one of those awake at a time."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from workers.bench import guard
from workers.bench.children import free_ports
from workers.bench.errors import BenchError

from .cells import Cell
from .natives import ROOT, Natives
from .peers import Peers
from .targets import MODEL, command

START_SECONDS = 60.0
IDLE_SECONDS = 10.0
IDLE_SPAN = 0.2
"""A target counts as idle when it uses at most one clock tick (10 ms) in this many seconds."""
QUESTION = {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": "Are you there?"}]}


@dataclass(frozen=True, slots=True)
class Target:
    """A target that runs: where it listens, and its process (None: the worker itself)."""

    name: str
    port: int
    pid: int | None


class Rig:
    """A context manager: entering starts workers and targets, leaving ends every process, however it is left."""

    def __init__(self, natives: Natives, peers: Peers, names: tuple[str, ...]) -> None:
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) < 2:
            raise BenchError("one core is not enough: the target has one to itself, workers and load another")
        if not shutil.which("taskset"):
            raise BenchError("taskset is not on the PATH; install util-linux")
        self.target_core, self.load_core = cores[0], cores[1]
        self._natives, self._peers, self._names = natives, peers, names
        self._folder = Path(tempfile.mkdtemp(prefix="homing-bench-"))
        self._running: list[subprocess.Popen[bytes]] = []
        self.targets: dict[str, Target] = {}

    def __enter__(self) -> Self:
        guarding = [sys.executable, "-I", "-S", guard.__file__]
        self._guard = subprocess.Popen(guarding, stdin=subprocess.PIPE, start_new_session=True)
        try:
            self._start_all()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Wakes and ends everything, and removes the folder with all logs."""
        for child in self._running:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGCONT)
        if self._guard.stdin is not None:
            self._guard.stdin.close()
        for child in (*self._running, self._guard):
            child.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def measure(self, name: str, cell: Cell, seconds: float | None) -> dict[str, Any]:
        """Wakes a target, runs one cell against it, lets it come to rest, and stops it again.

        Returns what the load printed (``native/load.c``).
        """
        target = self.targets[name]
        self._wake(target)
        words = [str(self._natives.load), f"port={target.port}", f"model={MODEL}", *cell.options(seconds)]
        if target.pid is not None:
            words.append(f"processes={target.pid}")
        done = subprocess.run(self._pinned(words, self.load_core), capture_output=True, text=True, check=False)
        self._stop(target)
        if done.returncode:
            raise BenchError(f"{name}, {cell.name}: {(done.stderr.strip().splitlines() or ['no result'])[-1]}")
        result: dict[str, Any] = json.loads(done.stdout)
        result["said"] = done.stderr.strip()
        return result

    def memory(self, name: str) -> dict[str, int]:
        """Resident bytes by process name, a target and its children."""
        found: dict[str, int] = {}
        pid = self.targets[name].pid
        for member in [] if pid is None else descend(pid):
            status = dict(line.split(":\t", 1) for line in _read(member, "status").splitlines() if ":\t" in line)
            if "VmRSS" in status:
                found[status["Name"]] = found.get(status["Name"], 0) + int(status["VmRSS"].split()[0]) * 1024
        return found

    def load(self, name: str, words: list[str]) -> subprocess.Popen[bytes]:
        """Starts the load against a woken target and returns it, for whoever looks at the target meanwhile."""
        target = self.targets[name]
        self._wake(target)
        load = [str(self._natives.load), f"port={target.port}", f"model={MODEL}", *words]
        return subprocess.Popen(self._pinned(load, self.load_core), stdout=subprocess.DEVNULL)

    def _start_all(self) -> None:
        ports = free_ports(2 + 2 * len(self._names))
        workers = [str(port) for port in ports[:2]]
        self._start("workers", [str(self._natives.upstream), "-m", MODEL, *workers], self.load_core)
        self._await("workers", ports[0])
        urls = [f"http://127.0.0.1:{port}" for port in workers]
        for place, name in enumerate(self._names):
            if name == "direct":
                self.targets[name] = Target(name, ports[0], None)
                continue
            folder = self._folder / name
            folder.mkdir()
            words = command(name, (ports[2 + 2 * place], ports[3 + 2 * place]), urls, folder, self._peers)
            if words is None:
                continue
            child = self._start(name, words, self.target_core)
            target = Target(name, ports[2 + 2 * place], child.pid)
            try:
                self._await(name, target.port)
            except BenchError as problem:
                if name == "homing":
                    raise
                self._peers.missing.append(str(problem))
            else:
                self.targets[name] = target
            self._stop(target)

    def _start(self, name: str, words: list[str], core: int) -> subprocess.Popen[bytes]:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("HOMING_")}
        with self._log(name).open("wb") as log:
            child = subprocess.Popen(
                self._pinned(words, core),
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        self._running.append(child)
        if self._guard.stdin is not None:
            self._guard.stdin.write(f"{child.pid}\n".encode())
            self._guard.stdin.flush()
        return child

    def _await(self, name: str, port: int) -> None:
        """Waits until a request comes through."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self._running[-1].poll() is None:
            try:
                url = f"http://127.0.0.1:{port}/v1/chat/completions"
                if httpx.post(url, json=QUESTION, trust_env=False, timeout=2).is_success:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.05)
        said = self._log(name).read_text(errors="replace").strip().splitlines()
        raise BenchError(f"{name} does not answer: {(said or ['it said nothing'])[-1][-300:]}")

    def _wake(self, target: Target) -> None:
        if target.pid is not None:
            os.killpg(target.pid, signal.SIGCONT)
            self._await(target.name, target.port)
            rest(target.pid)

    def _stop(self, target: Target) -> None:
        """Stops a target when it has nothing left to do: what it still cleans up would cost the next one."""
        if target.pid is not None:
            rest(target.pid)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(target.pid, signal.SIGSTOP)

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    @staticmethod
    def _pinned(words: list[str], core: int) -> list[str]:
        return ["taskset", "-c", str(core), *words]


def rest(pid: int) -> None:
    """Waits until a process and its descendants are idle, ten seconds at most."""
    deadline = time.monotonic() + IDLE_SECONDS
    while time.monotonic() < deadline:
        before = _ticks(pid)
        time.sleep(IDLE_SPAN)
        if _ticks(pid) - before <= 1:
            return


def descend(pid: int) -> list[int]:
    """A process and all its descendants."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*"):
        found += [
            member for child in _read(pid, f"task/{task.name}/children").split() for member in descend(int(child))
        ]
    return found


def _ticks(pid: int) -> int:
    fields = [_read(member, "stat").rpartition(")")[2].split() for member in descend(pid)]
    return sum(int(row[11]) + int(row[12]) for row in fields if row)


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except OSError:
        return ""
