"""Homing in front of real engines: the proxy and one agent for each engine, as processes, run by their own commands."""

import secrets
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.support.vllm.process import Child
from tests.support.vllm.worker import Engine, answers, free_port

READY_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Agent:
    """`homing-worker join` beside one engine. `worker` is the id that it registers."""

    worker: str
    engine: Engine
    child: Child


class Fleet:
    """A proxy with its workers. Leaving the `with` block ends the proxy and the agents, not the engines."""

    def __init__(self, folder: Path) -> None:
        """Logs and the embedded store go to `folder`."""
        self.url = f"http://127.0.0.1:{free_port()}"
        self.agents: dict[str, Agent] = {}
        self._folder = folder
        self._token = secrets.token_hex(16)
        self._stack = ExitStack()
        self._proxy: Child | None = None

    def start_proxy(self) -> None:
        """Starts the proxy on its address, after ending one that ran before, and waits until it answers."""
        if self._proxy is not None:
            self._proxy.stop()
        command = [sys.executable, "-m", "proxy", "serve", "--listen", self.url.removeprefix("http://")]
        command += ["--store-url", "embedded", "--state-dir", str(self._folder / "state")]
        self._proxy = self._start("proxy", command)
        self._proxy.wait_until(lambda: answers(f"{self.url}/livez"), time.monotonic() + READY_SECONDS)

    def join(self, worker: str, engine: Engine) -> Agent:
        """Starts the agent that registers `engine` as `worker`; it is not waited for."""
        command = [sys.executable, "-m", "workers", "join", "--proxy", self.url, "--engine", engine.url]
        command += ["--id", worker]
        self.agents[worker] = Agent(worker, engine, self._start(f"agent-{worker}", command))
        return self.agents[worker]

    def wait_ready(self) -> None:
        """Returns when the proxy holds every joined worker as ready; raises StartError after READY_SECONDS."""
        deadline = time.monotonic() + READY_SECONDS
        for agent in self.agents.values():
            agent.child.wait_until(lambda worker=agent.worker: self.states().get(worker) == "ready", deadline)

    def states(self) -> Mapping[str, str]:
        """Returns each worker's state by id, as `GET /workers` tells it."""
        listed = httpx.get(f"{self.url}/workers", timeout=30).raise_for_status().json()
        return {worker["id"]: worker["state"] for worker in listed["workers"]}

    def hit_tokens(self) -> dict[str, int]:
        """Returns by worker what its own engine counts as taken from cache since its start, in tokens."""
        return {worker: agent.engine.read_hit_tokens() for worker, agent in self.agents.items()}

    def close(self) -> None:
        """Ends agents and proxy, last started first."""
        self._stack.close()

    def _start(self, name: str, command: Sequence[str]) -> Child:
        environment = {"HOMING_JOIN_TOKEN": self._token, "PYTHONUNBUFFERED": "1"}
        return self._stack.enter_context(Child(name, command, self._folder / f"{name}.log", environment))


@contextmanager
def run_fleet(engines: Sequence[Engine], folder: Path) -> Iterator[Fleet]:
    """Yields a fleet whose workers `vllm-0`, `vllm-1`… are all ready."""
    fleet = Fleet(folder)
    try:
        fleet.start_proxy()
        for number, engine in enumerate(engines):
            fleet.join(f"vllm-{number}", engine)
        fleet.wait_ready()
        yield fleet
    finally:
        fleet.close()
