"""`python -m proxy` as a real process, with its stderr in a file and its state in a short folder of its own."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.clients import Response, ask, chat, request
from tests.support.scripted import until


def environment(**extra: str) -> dict[str, str]:
    """This process's environment, less what would set up a proxy."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HOMING_", "XDG_"))}
    return kept | {"COLUMNS": "200"} | extra


def run(*arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """Runs `homing …` to its end."""
    command = [sys.executable, "-m", "proxy", *arguments]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(**extra),
        check=False,
        stdin=subprocess.DEVNULL,
    )


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def short_folder() -> Iterator[Path]:
    """A folder whose path leaves room for a unix socket's name."""
    with tempfile.TemporaryDirectory(prefix="homing-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


class Serving:
    """A running `homing serve`."""

    def __init__(self, state: Path, port: int, *arguments: str, **extra: str) -> None:
        self.state = state
        self.port = port
        self.log = state / f"stderr-{time.monotonic_ns()}"
        command = [sys.executable, "-m", "proxy", "serve", "--listen", f"127.0.0.1:{port}", *arguments]
        if "--store-url" not in arguments:
            command += ["--state-dir", str(state)]
        with self.log.open("wb") as stderr:
            self.process = subprocess.Popen(
                command, env=environment(**extra), stdin=subprocess.DEVNULL, stdout=stderr, stderr=stderr
            )

    @property
    def stderr(self) -> str:
        return self.log.read_text()

    async def ready(self) -> None:
        """Waits until a worker can be reached through it."""
        await until(lambda: self._answers() or self.process.poll() is not None, 30)
        assert self.process.poll() is None, self.stderr
        deadline = time.monotonic() + 30
        while (await ask(self.port, request(b"", "/readyz", (), "GET"))).status != 200:
            assert time.monotonic() < deadline, self.stderr

    async def up(self) -> None:
        """Waits until it answers."""
        await until(lambda: self._answers() or self.process.poll() is not None, 30)
        assert self.process.poll() is None, self.stderr
        assert (await ask(self.port, request(b"", "/livez", (), "GET"), 30)).status == 200

    def _answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    async def ask(self, body: bytes | None = None) -> Response:
        return await ask(self.port, request(chat() if body is None else body))

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def end(self, seconds: float = 20.0) -> int:
        """Waits for its end; returns the exit code. Nothing it wrote is a traceback."""
        await until(lambda: self.process.poll() is not None, seconds)
        assert "Traceback" not in self.stderr, self.stderr
        return int(self.process.returncode)

    def stores(self) -> list[int]:
        """The ids of the Valkeys that run in its folder (Linux)."""
        found = []
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                line = entry.read_bytes()
            except OSError:
                continue
            if b"valkey" in line and bytes(self.state) in line:
                found.append(int(entry.parent.name))
        return found


@contextmanager
def serving(state: Path, port: int, *arguments: str, **extra: str) -> Iterator[Serving]:
    """Starts `homing serve`, and leaves nothing of it behind."""
    proxy = Serving(state, port, *arguments, **extra)
    try:
        yield proxy
    finally:
        if proxy.process.poll() is None:
            proxy.process.kill()
        proxy.process.wait()
