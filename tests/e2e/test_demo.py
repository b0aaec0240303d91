"""The demo as a person runs it: a real process, its table, its bar file, and nothing left behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@contextmanager
def demo(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Starts the demo in `folder`; `PYTHONPATH` holds a mark by which every process of it can be found."""
    environment = {k: v for k, v in os.environ.items() if k != "STRICT"}
    environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{folder}"
    with subprocess.Popen(
        [sys.executable, "-m", "workers", "demo", "--listen", "127.0.0.1:0", *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def relatives(folder: Path) -> dict[int, str]:
    """Returns the command lines, by process id, of all that lives and inherited the demo's environment."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environment = (entry / "environ").read_bytes()
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if f"{os.pathsep}{folder}\0".encode() in environment + b"\0" and command:
            found[int(entry.name)] = command.replace(b"\0", b" ").decode()
    return found


def gone(folder: Path) -> bool:
    deadline = time.monotonic() + 20
    while relatives(folder):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def read_until(process: subprocess.Popen[str], mark: str) -> str:
    said = ""
    for line in process.stdout:
        said += line
        if mark in line:
            return said
    raise AssertionError(f"{mark!r} was never said:\n{said}")


def test_a_timed_run_prints_the_table_writes_the_bars_and_ends(tmp_path):
    with demo(tmp_path, "--seconds", "6", "--conversations", "8", "--time-scale", "40") as process:
        said, _ = process.communicate(timeout=150)
    assert process.returncode == 0, said
    for row in ("delivered hit rate", "second request TTFT p50", "time saved"):
        assert row in said
    assert " s  Homing " in said
    packet = json.loads((tmp_path / "build" / "demo.json").read_text())
    bars = {bar["id"]: bar for bar in packet["bars"]}
    assert bars.keys() == {"delivered_hit_ratio", "second_request_ttft_p50_ratio", "failed_requests"}
    assert bars["failed_requests"] == {
        "id": "failed_requests",
        "value": 0,
        "op": "<=",
        "limit": 0,
        "unit": "requests",
        "ok": True,
    }
    assert bars["delivered_hit_ratio"]["value"] > 1
    assert bars["second_request_ttft_p50_ratio"]["value"] > 0
    assert packet["environment"]["conversations"] == 8
    assert gone(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_a_signal_and_leaves_no_process(tmp_path, number):
    with demo(tmp_path, "--conversations", "3", "--time-scale", "60") as process:
        said = read_until(process, "Serving until Ctrl-C")
        assert len(relatives(tmp_path)) >= 9
        pasted = next(line for line in said.splitlines() if line.startswith("curl "))
        answer = subprocess.run(["bash", "-c", pasted], capture_output=True, text=True, timeout=30)
        assert json.loads(answer.stdout)["object"] == "chat.completion"
        metrics = next(line.split()[1] for line in said.splitlines() if line.startswith("metrics "))
        assert "homing_requests_total" in httpx.get(metrics, trust_env=False).text
        process.send_signal(number)
        rest, _ = process.communicate(timeout=30)
    assert process.returncode == 0, rest
    assert gone(tmp_path)


def test_a_dead_child_is_one_line_and_exit_one(tmp_path):
    with demo(tmp_path) as process:
        read_until(process, " s  Homing ")
        victim = next(pid for pid, command in relatives(tmp_path).items() if "--id h200" in command)
        os.kill(victim, signal.SIGKILL)
        rest, _ = process.communicate(timeout=30)
    assert process.returncode == 1
    told = [line for line in rest.splitlines() if " s  Homing " not in line]
    assert len(told) == 1
    assert told[0].startswith("homing-worker demo: h200 was ended by SIGKILL: ")
    assert gone(tmp_path)


def test_a_killed_demo_leaves_no_process(tmp_path):
    with demo(tmp_path) as process:
        while len(relatives(tmp_path)) < 8:
            assert process.poll() is None, process.stdout.read()
            time.sleep(0.02)
        process.kill()
    assert gone(tmp_path)


def test_a_signal_before_the_table_is_an_interruption(tmp_path):
    with demo(tmp_path, "--conversations", "3") as process:
        read_until(process, " s  Homing ")
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in rest
    assert gone(tmp_path)


def test_a_taken_address_is_one_line_and_exit_one(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with demo(tmp_path, "--listen", address) as process:
            said, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert said == (
        f"homing-worker demo: cannot listen on {address}: Address already in use; choose another with --listen HOST:PORT\n"
    )
    assert gone(tmp_path)
