"""One life of an engine as a process: started under its guard, its log kept, its end awaited.

The log is read through a pipe, so that each line is seen as it comes and the file cannot grow without bound.
Nothing here knows what a line means; the caller hears every line.
"""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from workers.agent.launch import guard

_POLL_SECONDS = 0.05
_TAIL_LINES = 25
_LONGEST_LINE = 16 * 1024
"""A longer line is cut: progress bars and dumped configurations are not read to their end."""

LOG_BYTES = 64 * 1024 * 1024
"""Size at which a log is put aside as `.1`: some weeks of vLLM's own lines, without one per request."""

STOP_SECONDS = 20.0
"""Between SIGTERM and SIGKILL: vLLM leaves in about 2 s, and in-flight requests were drained before."""

_BREAKS = re.compile(rb"[\r\n]+")


class EngineLog:
    """Keeps what an engine prints: all of it in a file of bounded size, its last lines in memory.

    Each start begins a new file; the one before stays beside it as `.1`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._open()

    def write(self, data: bytes) -> None:
        """Appends bytes as they came; rotates first when the file is full."""
        if self._file.tell() + len(data) > LOG_BYTES:
            self._file.close()
            self._file = self._open()
        self._file.write(data)
        self._file.flush()

    def close(self) -> None:
        """Closes the file; the tail stays readable."""
        self._file.close()

    def _open(self) -> BinaryIO:
        if self.path.exists():
            self.path.replace(self.path.with_name(f"{self.path.name}.1"))
        return self.path.open("wb")


class EngineProcess:
    """A running engine. `on_line` hears each line of its output; `run` returns its exit code.

    The exit code is 128 + N when signal N ended it.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: EngineLog,
        on_line: Callable[[str], None],
        *,
        stop_seconds: float = STOP_SECONDS,
    ) -> None:
        self._log = log
        self._on_line = on_line
        self._rest = b""
        self._guard = subprocess.Popen(  # noqa: S603 - our own interpreter and file, the owner's command line
            [sys.executable, "-I", "-S", guard.__file__, f"{stop_seconds:g}", *command],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """The guard's process id."""
        return self._guard.pid

    async def run(self) -> int:
        """Reads the log until the last process of the engine has gone; returns the exit code."""
        reading = asyncio.create_task(self._read())
        try:
            while self._guard.poll() is None:  # noqa: ASYNC110 - a process end sets no event on every system
                await asyncio.sleep(_POLL_SECONDS)
            await reading
        finally:
            reading.cancel()
            self._log.close()
            if self._guard.stdin is not None:
                self._guard.stdin.close()
        return self._guard.returncode or 0

    def stop(self) -> None:
        """Asks the engine to end, gently first; `run` returns when it has."""
        self._tell(b"stop\n")

    def kill(self) -> None:
        """Ends the whole engine at once."""
        self._tell(b"now\n")

    def _tell(self, word: bytes) -> None:
        if self._guard.stdin is not None and not self._guard.stdin.closed:
            # The guard is gone when its engine is: nothing is left to end.
            with contextlib.suppress(BrokenPipeError):
                self._guard.stdin.write(word)

    async def _read(self) -> None:
        if self._guard.stdout is None:
            return
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), self._guard.stdout)
        try:
            while data := await reader.read(65536):
                self._take(data)
            if self._rest:
                self._take(b"\n")
        finally:
            transport.close()

    def _take(self, data: bytes) -> None:
        """Writes what came to the file, and passes every whole line on; a progress bar's return ends a line too."""
        self._log.write(data)
        *lines, self._rest = _BREAKS.split(self._rest + data)
        if len(self._rest) > _LONGEST_LINE:
            lines.append(self._rest)
            self._rest = b""
        for raw in lines:
            line = raw[:_LONGEST_LINE].decode("utf-8", errors="replace").rstrip()
            if line:
                self._log.tail.append(line)
                self._on_line(line)


def engine_environment() -> dict[str, str]:
    """Returns this process's environment less Homing's own settings: the join token is not the engine's."""
    return {
        **{key: value for key, value in os.environ.items() if not key.startswith("HOMING_")},
        "PYTHONUNBUFFERED": "1",
    }


def describe_end(code: int) -> str:
    """Says in a clause how a process ended; the kernel's out-of-memory killer leaves no line of its own."""
    if code > 128 and code - 128 in {int(number) for number in signal.Signals}:
        name = signal.Signals(code - 128).name
        hint = " (the kernel's out-of-memory killer does that; see dmesg)" if name == "SIGKILL" else ""
        return f"was ended by {name}{hint}"
    return f"ended with exit code {code}"
