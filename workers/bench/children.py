"""The demo's own child processes: started with a log each, watched, and never left behind.

Every child leads its own session and process group. A guard process (``guard.py``) knows the groups and ends
them when this process closes its pipe or dies, so there is one way to stop and no way to forget.
"""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from workers.bench import guard
from workers.bench.errors import BenchError

_SET_DEATH_SIGNAL = 1
"""Number of `prctl` in Linux's `linux/prctl.h`."""


class Children:
    """Child processes by name, with their logs in ``folder``. A context manager: leaving it ends them all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        self._guard = subprocess.Popen(  # noqa: S603 - our own interpreter and file
            [sys.executable, "-I", "-S", guard.__file__],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, name: str, arguments: Sequence[str], extra_environment: Mapping[str, str]) -> None:
        """Starts ``python -m ARGUMENTS`` as ``name``; the caller's ``HOMING_*`` settings do not reach it."""
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("HOMING_")}
        parent = os.getpid()

        def die_with_parent() -> None:
            # Until the guard knows of a child, only the kernel can end it with us (Linux; elsewhere it may stay).
            if sys.platform == "linux":
                ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
                if os.getppid() != parent:
                    os._exit(1)

        with self._log(name).open("wb") as log:
            child = subprocess.Popen(  # noqa: S603 - our own interpreter and modules
                [sys.executable, "-m", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**inherited, **extra_environment, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
                preexec_fn=die_with_parent,  # noqa: PLW1509 - runs before any thread is started
            )
        self._running[name] = child
        if self._guard.stdin is None:
            raise BenchError("the guard process has no pipe; start the demo again")
        self._guard.stdin.write(f"{child.pid}\n".encode())
        self._guard.stdin.flush()

    def check(self) -> None:
        """Raises ``BenchError`` with the end of its log when a child has died."""
        for name, child in self._running.items():
            code = child.poll()
            if code is not None:
                raise BenchError(f"{name} {_ending(code)}: {self._last_words(name)} (log: {self._log(name)})")

    def stop(self) -> None:
        """Ends every child and waits until none is left; harmless when called again."""
        if self._guard.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._guard.stdin.close()
        for child in self._running.values():
            child.wait()
        self._guard.wait()

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def _last_words(self, name: str) -> str:
        lines = self._log(name).read_text(encoding="utf-8", errors="replace").split("\n")
        said = [line.strip() for line in lines if line.strip()]
        return " / ".join(said[-2:])[-400:] or "it said nothing"


def _ending(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"stopped with exit code {code}"


def free_ports(count: int) -> list[int]:
    """Returns ``count`` different TCP ports that are free on the loopback at this moment."""
    with contextlib.ExitStack() as held:
        listeners = [held.enter_context(socket.socket()) for _ in range(count)]
        for listener in listeners:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in listeners]


def claim_address(listen: str) -> str:
    """Returns ``listen`` (HOST:PORT), port 0 replaced by a free one; ``BenchError`` when it is taken."""
    host, colon, port = listen.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise BenchError(f"--listen {listen!r} is not HOST:PORT; give for example 127.0.0.1:8080")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        # A server that has just stopped leaves connections in TIME_WAIT; they do not make the port taken.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host.strip("[]"), int(port)))
        except OSError as error:
            reason = error.strerror or str(error)
            raise BenchError(f"cannot listen on {listen}: {reason}; choose another with --listen HOST:PORT") from None
        return f"{host}:{listener.getsockname()[1]}"
