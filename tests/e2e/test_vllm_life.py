"""The whole life of a worker on real vLLM: join, verify, serve, be killed, frozen or drained, and be gone.

One engine runs already and is joined; `homing-worker run` starts the other one itself. Each test leaves both ready.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.vllm.fleet import Fleet
from tests.support.vllm.process import Child
from tests.support.vllm.worker import (
    BLOCK_TOKENS,
    CONTEXT_TOKENS,
    ENVIRONMENT,
    KV_BYTES,
    MODEL,
    READY_SECONDS,
    Engine,
    answers,
    find_python,
    free_port,
    make_model,
    start_engine,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

JOINED, LAUNCHED = "vllm-joined", "vllm-launched"
FLAGS = [
    "--served-model-name", MODEL, "--host", "127.0.0.1", "--dtype", "bfloat16", "--enforce-eager",
    "--max-model-len", str(CONTEXT_TOKENS), "--max-num-seqs", "8", "--max-num-batched-tokens", "2048",
    "--block-size", str(BLOCK_TOKENS), "--kv-cache-memory-bytes", str(KV_BYTES),
]  # fmt: skip


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.1)


def family(pid: int) -> dict[int, str]:
    """A process and all below it, each with its command line; those that have ended but for their entry are left out."""
    parents, lines = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
            lines[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
        if state != "Z":
            parents[int(folder.name)] = int(parent)
    found, last = {pid} & parents.keys(), set()
    while found != last:
        last = set(found)
        found |= {one for one, parent in parents.items() if parent in found}
    return {one: lines[one] for one in found}


class Life:
    """The fleet of these tests."""

    def __init__(self, folder: Path, python: str, model: Path, engine: Engine) -> None:
        self.fleet = Fleet(folder)
        self.python = python
        self.model = model
        self.engine = engine
        self.launched: Child | None = None

    @property
    def url(self) -> str:
        return self.fleet.url

    def agent(self, name: str, *arguments: str, token: str | None = None) -> Child:
        """Starts `homing-worker` for this proxy."""
        self.fleet._token, kept = token or self.fleet._token, self.fleet._token
        try:
            return self.fleet._start(
                name, [sys.executable, "-m", "workers", *arguments[:1], "--proxy", self.url, *arguments[1:]]
            )
        finally:
            self.fleet._token = kept

    def launch(self) -> Child:
        """Starts `homing-worker run` around an engine of its own."""
        port, core = free_port(), max(os.sched_getaffinity(0))
        environment = {**ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND": str(core)}
        words = ["env", *(f"{name}={value}" for name, value in environment.items())]
        words += [self.python, "-m", "vllm.entrypoints.openai.api_server"]
        self.launched = self.agent(
            "run", "run", "--model", str(self.model), "--port", str(port), "--id", LAUNCHED, "--engine-command",
            " ".join(words), "--log", str(self.model.parent / "launched.log"), "--", *FLAGS,
        )  # fmt: skip
        return self.launched

    def make_whole(self) -> None:
        """Starts what is not running, and waits until both workers are ready."""
        if JOINED not in self.fleet.agents or self.fleet.agents[JOINED].child.exit_code is not None:
            self.fleet.join(JOINED, self.engine)
        if self.launched is None or self.launched.exit_code is not None:
            self.launch()
        self.launched.wait_until(
            lambda: self.states == {JOINED: "ready", LAUNCHED: "ready"}, time.monotonic() + READY_SECONDS
        )

    @property
    def states(self) -> dict[str, str]:
        return dict(self.fleet.states())

    def told(self, worker: str) -> dict:
        return httpx.get(f"{self.url}/workers/{worker}", timeout=30).raise_for_status().json()

    def place(self, text: str) -> str:
        """Sends one request and returns the worker that answered it."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 2}
        answer = httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=60)
        return answer.raise_for_status().headers["x-homing-worker"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Life]:
    folder = tmp_path_factory.mktemp("life")
    python = find_python()
    model = make_model(python, folder)
    engine = start_engine(python, model, min(os.sched_getaffinity(0)), folder / "joined.log")
    with engine.child:
        life = Life(folder, python, model, engine)
        try:
            life.fleet.start_proxy()
            life.launch()
            engine.child.wait_until(lambda: answers(f"{engine.url}/health"), time.monotonic() + READY_SECONDS)
            yield life
        finally:
            life.fleet.close()


@pytest.fixture
def life(built: Life) -> Life:
    built.make_whole()
    return built


def test_both_are_verified_before_they_serve(life: Life) -> None:
    for name in (JOINED, LAUNCHED):
        told = life.told(name)
        verification = told["verification"]
        assert (verification["passed"], verification["trust"], verification["reason"]) == (True, "inferred", None)
        assert verification["incarnation"] == told["incarnation"]
        whole_blocks = (verification["prompt_tokens"] - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        assert verification["cached_tokens"] == whole_blocks > 0
        assert min(verification["first_seconds"], verification["second_seconds"]) > 0
        assert (told["engine"]["block_size"], told["engine"]["prefix_caching"]) == (BLOCK_TOKENS, True)
        assert told["engine"]["models"] == [MODEL]
    assert {life.place(f"{number} a request of its own") for number in range(8)} == {JOINED, LAUNCHED}


def test_run_tells_the_phases_of_the_start_in_their_order(life: Life) -> None:
    said = life.launched.log.read_text()
    places = [
        said.find(f"homing-worker run: {phase} (after")
        for phase in ("launching", "loading weights", "warming", "ready")
    ]
    assert -1 not in places
    assert places == sorted(places)
    assert f"registered as {LAUNCHED}" in said


def test_a_drained_worker_finishes_its_stream_and_is_gone(life: Life) -> None:
    agent = life.fleet.agents[JOINED].child
    httpx.post(f"{life.url}/fleet/workers/{LAUNCHED}/cordon", timeout=30).raise_for_status()
    with httpx.stream("POST", f"{life.url}/v1/chat/completions", timeout=60, json=stream_body("drain")) as stream:
        assert stream.headers["x-homing-worker"] == JOINED
        httpx.post(f"{life.url}/fleet/workers/{LAUNCHED}/uncordon", timeout=30).raise_for_status()
        until(lambda: life.states[LAUNCHED] == "ready")
        agent.terminate()
        until(lambda: life.states[JOINED] == "draining")
        assert life.place("while it drains") == LAUNCHED
        lines = [line for line in stream.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in lines[-2]
    assert agent.wait(60) == 0
    assert life.states == {LAUNCHED: "ready"}
    assert answers(f"{life.engine.url}/health")
    before = life.engine.read_hit_tokens()
    life.make_whole()
    assert life.engine.read_hit_tokens() > before, "a worker that comes back is verified again"


def stream_body(text: str, tokens: int = 1500) -> dict[str, object]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "stream": True}
    return body | {"max_tokens": tokens, "ignore_eos": True}


def test_a_killed_engine_loses_its_place_at_once_and_comes_back_as_another_life(life: Life) -> None:
    before = life.told(LAUNCHED)
    agent = life.launched._process.pid
    # The agent and its guard have the engine's command in their own lines.
    (engine,) = [pid for pid, line in family(agent).items() if line.startswith(f"{life.python} -m vllm")]
    os.kill(engine, signal.SIGKILL)
    until(lambda: life.states.get(LAUNCHED) != "ready", 10)
    assert {life.place(f"{number} after the kill") for number in range(4)} == {JOINED}
    life.make_whole()
    after = life.told(LAUNCHED)
    assert after["incarnation"] != before["incarnation"]
    assert after["verification"]["incarnation"] == after["incarnation"]
    assert life.launched._process.pid == agent
    assert "the engine was ended by SIGKILL" in life.launched.log.read_text()


def test_a_stopped_engine_core_is_out_until_it_goes_on(life: Life) -> None:
    (core,) = [pid for pid, line in family(life.launched._process.pid).items() if "EngineCore" in line]
    incarnation = life.told(LAUNCHED)["incarnation"]
    os.kill(core, signal.SIGSTOP)
    try:
        until(lambda: LAUNCHED not in life.states)
        assert {life.place(f"{number} while it is stopped") for number in range(4)} == {JOINED}
    finally:
        os.kill(core, signal.SIGCONT)
    until(lambda: life.states.get(LAUNCHED) == "ready")
    assert life.told(LAUNCHED)["incarnation"] == incarnation


def test_a_joined_engine_that_is_stopped_as_a_whole_is_out_until_it_goes_on(life: Life) -> None:
    group = life.engine.child._process.pid
    os.killpg(group, signal.SIGSTOP)
    try:
        until(lambda: life.states.get(JOINED) != "ready")
        assert {life.place(f"{number} while all of it is stopped") for number in range(4)} == {LAUNCHED}
    finally:
        os.killpg(group, signal.SIGCONT)
    until(lambda: life.states.get(JOINED) == "ready")


@pytest.mark.parametrize(
    ("token", "worker", "said"),
    [
        ("wrong", "stranger", "does not accept this join token"),
        (None, LAUNCHED, f"already has a live worker '{LAUNCHED}'"),
    ],
    ids=["wrong-token", "same-id"],
)
def test_a_worker_that_is_refused_ends_with_one_line_and_changes_nothing(life: Life, token, worker, said) -> None:
    before = life.told(LAUNCHED)["url"]
    agent = life.agent("refused", "join", "--engine", life.engine.url, "--id", worker, token=token)
    assert agent.wait(60) == 1
    (line,) = agent.log.read_text().splitlines()
    assert said in line
    assert life.states == {JOINED: "ready", LAUNCHED: "ready"}
    assert life.told(LAUNCHED)["url"] == before


def test_sigterm_ends_the_engine_that_run_started_and_leaves_no_process(life: Life) -> None:
    processes = family(life.launched._process.pid)
    assert any("EngineCore" in line for line in processes.values())
    life.launched.terminate()
    assert life.launched.wait(90) == 0
    until(lambda: not any(pid in family(pid) for pid in processes))
    assert life.states == {JOINED: "ready"}
    assert life.place("after it has gone") == JOINED
