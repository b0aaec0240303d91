"""One child process with a log file, started in a process group of its own and never left behind."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

STOP_SECONDS = 20.0  # vLLM leaves in about 2 s; an agent first drains its worker
POLL_SECONDS = 0.2


class StartError(RuntimeError):
    """A process of the run did not come up; the message ends with its log's last lines."""


class Child:
    """A running command. Leaving the `with` block stops it and everything that it started."""

    def __init__(self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        """Starts `command` at once. `environment` is added to this process's own, less its HOMING_ settings."""
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("HOMING_")}
        self.name = name
        self.log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**inherited, **environment},
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def exit_code(self) -> int | None:
        """The exit code, or None while it runs."""
        return self._process.poll()

    def terminate(self) -> None:
        """Sends SIGTERM to the process alone; what it started is its own to end."""
        self._process.terminate()

    def wait(self, seconds: float) -> int:
        """Returns the exit code within `seconds`, else raises `subprocess.TimeoutExpired`."""
        return self._process.wait(seconds)

    def stop(self) -> None:
        """Asks it to end, waits, then kills what is left of its process group. Harmless when it has ended."""
        try:
            if self._process.poll() is None:
                self._process.terminate()
                self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self.kill()

    def kill(self) -> None:
        """Kills the whole process group at once and reaps the process."""
        # No such group: it has gone with its last process.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def wait_until(self, ready: Callable[[], bool], deadline: float) -> None:
        """Returns once `ready()` holds; raises StartError if it ends first or at `deadline` (monotonic s)."""
        while not ready():
            if self.exit_code is not None:
                raise StartError(f"{self.name} ended with code {self.exit_code} while starting{self._tail()}")
            if time.monotonic() > deadline:
                raise StartError(f"{self.name} was not ready in time{self._tail()}")
            time.sleep(POLL_SECONDS)

    def _tail(self, lines: int = 25) -> str:
        """Returns the log's last lines, introduced by the log's path."""
        last = self.log.read_text("utf-8", errors="replace").splitlines()[-lines:]
        return "\n".join([f"; the last lines of {self.log}:", *last])
