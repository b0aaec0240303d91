"""Child processes of the demo: watched while they live, gone when their parent goes, however it goes."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from workers.bench.children import Children, claim_address
from workers.bench.errors import BenchError

ROOT = Path(__file__).parents[2]

SLEEPER = """
import pathlib, signal, subprocess, sys, time
{prelude}
inner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
pathlib.Path(sys.argv[0]).with_suffix(".pids").write_text(f"{{inner.pid}} {{__import__('os').getpid()}} ")
time.sleep(60)
"""


def module(folder: Path, name: str, source: str) -> str:
    (folder / f"{name}.py").write_text(source)
    return name


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def eventually(condition, seconds: float = 20.0):
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.02)
    return result


def pids(folder: Path, name: str) -> list[int]:
    path = folder / f"{name}.pids"
    eventually(lambda: path.exists() and path.read_text().endswith(" "))
    return [int(pid) for pid in path.read_text().split()]


def test_leaving_ends_children_and_grandchildren(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    name = module(tmp_path, "sleeper", SLEEPER.format(prelude=""))
    with Children(tmp_path / "logs") as children:
        children.start("sleeper", [name], {})
        started = pids(tmp_path, name)
        assert all(alive(pid) for pid in started)
        children.check()
    assert not [pid for pid in started if alive(pid)]


def test_a_killed_parent_leaves_nothing(tmp_path):
    name = module(tmp_path, "sleeper", SLEEPER.format(prelude=""))
    program = (
        "import pathlib, time; from workers.bench.children import Children\n"
        f"with Children(pathlib.Path({str(tmp_path)!r})) as c: c.start('sleeper', [{name!r}], {{}}); time.sleep(60)"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    parent = subprocess.Popen([sys.executable, "-c", program], env=environment, cwd=tmp_path)
    started = pids(tmp_path, name)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    eventually(lambda: not [pid for pid in started if alive(pid)])


def test_a_child_that_ignores_sigterm_is_killed(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    name = module(tmp_path, "deaf", SLEEPER.format(prelude="signal.signal(signal.SIGTERM, signal.SIG_IGN)"))
    with Children(tmp_path / "logs") as children:
        children.start("deaf", [name], {})
        started = pids(tmp_path, name)
    assert not [pid for pid in started if alive(pid)]


def test_a_dead_child_is_told_with_its_last_words(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    name = module(tmp_path, "doomed", "import sys; print('no room for the cache'); sys.exit(3)")
    with Children(tmp_path / "logs") as children:
        children.start("doomed", [name], {})

        def told() -> str:
            try:
                children.check()
            except BenchError as error:
                return str(error)
            return ""

        said = eventually(told)
    assert said.startswith("doomed stopped with exit code 3: no room for the cache (log: ")


def test_settings_of_the_caller_do_not_reach_children(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("HOMING_ADMIN_KEY", "outer")
    source = "import os; print(sorted(x for x in os.environ.items() if x[0].startswith('HOMING_')), flush=True)"
    name = module(tmp_path, "teller", source)
    log = tmp_path / "logs" / "teller.log"
    with Children(tmp_path / "logs") as children:
        children.start("teller", [name], {"HOMING_JOIN_TOKEN": "inner"})
        eventually(lambda: "\n" in log.read_text())
    assert log.read_text() == "[('HOMING_JOIN_TOKEN', 'inner')]\n"


def test_an_address_in_use_is_one_clear_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(BenchError, match=f"cannot listen on {address}: Address already in use; choose another"):
            claim_address(address)


@pytest.mark.parametrize("listen", ["8080", "127.0.0.1:", "127.0.0.1:http", "127.0.0.1:70000", ":80"])
def test_an_address_that_is_none_is_refused(listen):
    with pytest.raises(BenchError, match="is not HOST:PORT"):
        claim_address(listen)


def test_port_zero_becomes_a_free_port():
    host, _, port = claim_address("127.0.0.1:0").rpartition(":")
    assert host == "127.0.0.1"
    assert int(port) > 0
