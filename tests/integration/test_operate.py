"""`homing workers …` as an operator types it: real processes, a real fleet of simulated engines, every exit code."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from tests.support.vllm.process import Child
from tests.support.vllm.worker import answers, free_port

TOKEN, KEY = "open-sesame", "the-key"
NOBODY = "http://127.0.0.1:1"


def until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.02)


class Fleet:
    """A proxy process and the simulated workers that joined it."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self.folder = folder
        self._stack = stack

    def start(self, name: str, *arguments: str, **environment: str) -> Child:
        secrets = {"HOMING_JOIN_TOKEN": TOKEN, "PYTHONUNBUFFERED": "1", **environment}
        command = [sys.executable, "-m", *arguments]
        return self._stack.enter_context(Child(name, command, self.folder / f"{name}.log", secrets))

    def serve(self) -> None:
        address = self.url.removeprefix("http://")
        self.start(
            "proxy", "proxy", "serve", "--listen", address, "--state-dir", str(self.folder), HOMING_ADMIN_KEY=KEY
        )
        until(lambda: answers(f"{self.url}/livez"))

    def sim(self, name: str, *arguments: str) -> Child:
        return self.start(
            name, "workers", "sim", "--listen", "127.0.0.1:0", "--identity", "H200 SXM", "--model", "tiny",
            "--block-size", "32", "--proxy", self.url, "--id", name, *arguments,
        )  # fmt: skip

    def workers(self, *arguments: str, key: str | None = KEY, url: str | None = None) -> subprocess.CompletedProcess:
        """Runs `homing workers …` to its end."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HOMING_")}
        environment |= {"HOMING_URL": url or self.url, "COLUMNS": "200"}
        if key is not None:
            environment["HOMING_ADMIN_KEY"] = key
        command = [sys.executable, "-m", "proxy", "workers", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)

    def told(self, *arguments: str) -> str:
        """What a command that must go well prints."""
        done = self.workers(*arguments)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    def listed(self) -> dict[str, dict]:
        headers = {"authorization": f"Bearer {KEY}"}
        found = httpx.get(f"{self.url}/workers", headers=headers, timeout=10).raise_for_status().json()["workers"]
        return {worker["id"]: worker for worker in found}

    def states(self) -> dict[str, str]:
        return {name: worker["state"] for name, worker in self.listed().items()}

    def place(self, text: str) -> str:
        """Sends one request and returns the worker that answered."""
        body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 1}
        answer = httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=30)
        return answer.raise_for_status().headers["x-homing-worker"]

    @contextmanager
    def stream(self, tokens: int) -> Iterator[httpx.Response]:
        """Holds a stream of so many tokens open."""
        body = {"model": "tiny", "messages": [{"role": "user", "content": "go on"}], "stream": True}
        body |= {"max_tokens": tokens, "ignore_eos": True}
        with httpx.stream("POST", f"{self.url}/v1/chat/completions", json=body, timeout=60) as response:
            assert response.status_code == 200
            yield response


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with ExitStack() as stack:
        fleet = Fleet(stack, tmp_path_factory.mktemp("operate"))
        fleet.serve()
        fleet.sim("a")
        fleet.sim("b")
        until(lambda: fleet.states() == {"a": "ready", "b": "ready"})
        yield fleet


@pytest.fixture(autouse=True)
def whole(fleet: Fleet) -> Iterator[None]:
    """Each test leaves both workers ready."""
    yield
    for name, state in fleet.states().items():
        if state in ("cordoned", "draining"):
            fleet.workers("uncordon", name)
    until(lambda: fleet.states() == {"a": "ready", "b": "ready"})


def test_list_shows_what_is_known(fleet: Fleet) -> None:
    head, *rows = fleet.told("list").splitlines()
    for title in ("worker", "state", "hardware", "models", "recipe", "in flight", "view / capacity", "trust", "life"):
        assert f" {title} " in f" {head} "
    assert sorted(row.split()[:5] for row in rows) == [[name, "ready", "H200", "SXM", "tiny"] for name in ("a", "b")]
    lives = {name: worker["incarnation"] for name, worker in fleet.listed().items()}
    assert all(row.rstrip().endswith(lives[row.split()[0]]) for row in rows)
    assert all(" / 1,209,244 " in row and " inferred" in row for row in rows)


def test_list_and_show_print_json(fleet: Fleet) -> None:
    listed = {worker["id"]: worker for worker in json.loads(fleet.told("list", "--output", "json"))["workers"]}
    assert set(listed) == {"a", "b"}
    shown = json.loads(fleet.told("show", "a"))
    assert (shown["id"], shown["identity"]["name"], shown["incarnation"]) == (
        "a",
        "H200 SXM",
        listed["a"]["incarnation"],
    )
    verification = shown["verification"]
    assert (verification["passed"], verification["trust"]) == (True, "inferred")
    assert 0 < verification["cached_tokens"] < verification["prompt_tokens"]
    assert shown["speed"]["base"] > 0


def test_a_cordoned_worker_gets_nothing_new_and_its_stream_goes_on(fleet: Fleet) -> None:
    with fleet.stream(300) as stream:
        home = stream.headers["x-homing-worker"]
        (other,) = {"a", "b"} - {home}
        assert fleet.told("cordon", home) == f"{home}: cordoned, 1 in flight\n"
        assert {fleet.place(f"after the cordon {number}") for number in range(4)} == {other}
        events = [line for line in stream.iter_lines() if line.startswith("data: ")]
        assert events[-1] == "data: [DONE]"
        assert sum('"content"' in event for event in events) >= 300
    assert fleet.states()[home] == "cordoned"
    assert fleet.told("uncordon", home).startswith(f"{home}: joining")
    until(lambda: fleet.states()[home] == "ready")
    verified = fleet.listed()[home]["verification"]["incarnation"]
    assert verified == fleet.listed()[home]["incarnation"]


def test_a_cordon_survives_registering_again(fleet: Fleet) -> None:
    worker = fleet.listed()["a"]
    fleet.told("cordon", "a")
    body = {name: worker[name] for name in ("id", "url", "incarnation", "identity")}
    body["engine"] = {"models": [{"id": name} for name in worker["engine"]["models"]]}
    headers = {"authorization": f"Bearer {TOKEN}"}
    httpx.post(f"{fleet.url}/workers", json=body, headers=headers, timeout=10).raise_for_status()
    assert fleet.states()["a"] == "cordoned"


def test_drain_waits_until_nothing_runs(fleet: Fleet) -> None:
    with fleet.stream(300) as stream:
        home = stream.headers["x-homing-worker"]
        done = fleet.workers("drain", home, "--wait", "0.1")
        assert (done.returncode, done.stdout) == (1, f"{home}: draining, 1 in flight\n")
        assert done.stderr == f"homing: {home} still has 1 in flight after 0.1 s\n"
        waiting = fleet.start(
            "drain", "proxy", "workers", "drain", home, "--wait", "60", "--url", fleet.url, HOMING_ADMIN_KEY=KEY
        )
        until(lambda: "draining" in waiting.log.read_text())
        assert waiting.exit_code is None
        assert list(stream.iter_lines())[-2] == "data: [DONE]"
    assert waiting.wait(30) == 0
    assert fleet.states()[home] == "draining"


def test_a_removed_worker_that_goes_on_registering_comes_back(fleet: Fleet) -> None:
    before = fleet.listed()["a"]
    assert fleet.told("remove", "a") == ""
    until(lambda: fleet.states().get("a") == "ready")
    assert fleet.listed()["a"]["incarnation"] == before["incarnation"]


def test_a_removed_worker_that_is_gone_stays_gone(fleet: Fleet) -> None:
    stray = fleet.sim("c")
    until(lambda: fleet.states().get("c") == "ready")
    stray.kill()
    fleet.told("remove", "c")
    assert "c" not in fleet.states()
    assert fleet.workers("show", "c").returncode == 1


@pytest.mark.parametrize(
    ("arguments", "key", "url", "code", "said"),
    [
        (["cordon", "nobody"], KEY, None, 1, "homing: there is no worker 'nobody'; GET /workers lists the fleet"),
        (["drain", "nobody", "--wait", "1"], KEY, None, 1, "homing: there is no worker 'nobody'"),
        (["remove", "nobody"], KEY, None, 1, "homing: there is no worker 'nobody'"),
        (["show", "nobody"], KEY, None, 1, "homing: There is no worker 'nobody'"),
        (["list"], None, None, 1, "homing: The admin key is missing"),
        (["cordon", "a"], None, None, 1, "homing: The admin key is missing"),
        (["cordon", "a"], "wrong", None, 1, "homing: The admin key is not the one this proxy was started with"),
        (["remove", "a"], "wrong", None, 1, "homing: The admin key is not the one"),
        (["list"], KEY, NOBODY, 3, f"homing: no proxy answers at {NOBODY} (ConnectError)"),
        (["cordon", "a"], KEY, NOBODY, 3, f"homing: no proxy answers at {NOBODY} (ConnectError)"),
        (["list"], KEY, "nonsense", 2, "homing: --url 'nonsense'"),
        (["list", "--output", "yaml"], KEY, None, 2, "--output"),
        (["drain", "a", "--wait", "soon"], KEY, None, 2, "--wait"),
        (["cordon", "a/../b"], KEY, None, 1, "homing: there is no worker 'a/../b'"),
        (["remove", ".."], KEY, None, 1, "homing: there is no worker '..'"),
        (["show", "a?b"], KEY, None, 1, "homing: There is no worker 'a?b'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else None,
)  # fmt: skip
def test_what_cannot_be_done_is_said_in_one_line(fleet: Fleet, arguments, key, url, code, said) -> None:
    done = fleet.workers(*arguments, key=key, url=url)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    if code != 2:
        assert done.stderr.count("\n") == 1
    assert fleet.states() == {"a": "ready", "b": "ready"}


def test_an_address_that_is_no_proxy_is_said_in_one_line(fleet: Fleet) -> None:
    engine = fleet.listed()["a"]["url"]
    for arguments in (["list"], ["cordon", "a"]):
        done = fleet.workers(*arguments, url=engine)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == f"homing: {engine} answered 404 and not as a Homing proxy does; check --url\n"


def test_a_second_worker_under_a_living_id_ends_with_one_line(fleet: Fleet) -> None:
    home = fleet.listed()["a"]["url"]
    second = fleet.sim("a-again", "--id", "a")
    assert second.wait(30) == 1
    lines = [line for line in second.log.read_text().splitlines() if "already has a live worker" in line]
    assert len(lines) == 1
    assert "pass another --id, or stop that worker first" in lines[0]
    assert "Traceback" not in second.log.read_text()
    assert fleet.listed()["a"]["url"] == home


def test_a_worker_that_reports_no_hits_serves_and_the_list_says_why_it_is_blind(fleet: Fleet) -> None:
    blind = fleet.sim("blind", "--no-prompt-tokens-details")
    until(lambda: fleet.states().get("blind") == "ready")
    done = fleet.workers("list")
    assert done.returncode == 0
    row = next(row for row in done.stdout.splitlines() if row.startswith("blind"))
    assert row.split()[-2] == "blind"
    assert done.stderr == "blind: it reports no cached tokens; start the engine with --enable-prompt-tokens-details\n"
    blind.terminate()
    assert blind.wait(30) == 0
    assert "blind" not in fleet.states()


HOPPER = (
    "RuntimeError: For FP16/BF16 input, output must have the same dtype as inputs. "
    "For FP8 input, output must have dtype BF16"
)


def launch(fleet: Fleet, name: str, lives: list[dict], *arguments: str) -> Child:
    """Starts `homing-worker run` around a scripted engine, for the fleet's proxy."""
    script = fleet.folder / f"{name}.json"
    script.write_text(json.dumps({"lives": lives}))
    engine = f"{sys.executable} {Path(__file__).parents[1] / 'support' / 'scripted_engine.py'} {script}"
    return fleet.start(
        f"run-{name}", "workers", "run", "--model", "tiny", "--port", str(free_port()), "--no-preflight", "--proxy",
        fleet.url, "--id", name, "--engine-command", engine, "--log", str(fleet.folder / f"{name}.log"), *arguments,
    )  # fmt: skip


def test_an_engine_that_fails_at_its_start_is_never_in_the_fleet(fleet: Fleet) -> None:
    run = launch(fleet, "hopper", [{"log": [HOPPER], "exit": 1}])
    assert run.wait(30) == 1
    assert "(rule hopper-fp8-float16)" in run.log.read_text()
    assert "registered" not in run.log.read_text()
    assert fleet.states() == {"a": "ready", "b": "ready"}


def test_a_mended_start_joins_and_an_engine_that_cannot_answer_is_held_out_with_the_reason(fleet: Fleet) -> None:
    run = launch(fleet, "mended", [{"log": [HOPPER], "exit": 1}, {}], "--apply-fix")
    until(lambda: (fleet.listed().get("mended") or {}).get("verification"))
    worker = json.loads(fleet.told("show", "mended"))
    assert worker["state"] == "joining"
    assert worker["verification"]["reason"] == "it answered a probe completion with 501"
    assert worker["identity"]["recipe"]["applied_fix"]["rule"] == "hopper-fp8-float16"
    assert fleet.workers("list").stderr == "mended: it answered a probe completion with 501\n"
    assert "mended" not in {fleet.place(f"{number} while it is held out") for number in range(4)}
    run.terminate()
    assert run.wait(30) == 0
    assert "mended" not in fleet.states()
