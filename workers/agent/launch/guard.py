"""Runs one engine in a process group of its own, and ends the whole group however its parent goes.

Run as a script, on the standard library alone: `guard.py GRACE PROGRAM ARGUMENT…`, GRACE in seconds.
The parent holds the other end of standard input. When it writes `stop` or the pipe closes, because the parent is
dead (SIGKILL included), the group gets SIGTERM, GRACE seconds, then SIGKILL; `now` skips the wait.
On Linux the engine dies with the guard, and processes that lose their parent fall to the guard, which reaps them.
Exits as the engine did, 128 + N after signal N, and only when no process of the group is left.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

_SET_DEATH_SIGNAL = 1
_SET_CHILD_SUBREAPER = 36
"""Numbers of `prctl` in Linux's `linux/prctl.h`; elsewhere the pipe alone watches the parent."""

_POLL_SECONDS = 0.02


def main() -> int:
    """Starts the engine, waits for its end or the parent's, and returns the exit code."""
    grace, command = float(sys.argv[1]), sys.argv[2:]
    _control(_SET_CHILD_SUBREAPER, 1)
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    guard = os.getpid()

    def die_with_guard() -> None:
        _control(_SET_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(1)

    try:
        engine = subprocess.Popen(  # noqa: S603 - the caller's own command line
            command,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_guard,  # noqa: PLW1509 - the guard has one thread
        )
    except OSError as error:
        sys.stdout.write(f"cannot start {command[0]}: {error.strerror}\n")
        return 127
    # Ignored only from here on: a program inherits what is ignored.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    patience = _wait_for_the_end(engine, woken, grace)
    _end_group(engine, patience)
    code = engine.wait()
    return code if code >= 0 else 128 - code


def _wait_for_the_end(engine: "subprocess.Popen[bytes]", woken: int, grace: float) -> float:
    """Returns when the engine or the parent has gone, with the seconds that the group may still take."""
    while engine.poll() is None:
        ready, _, _ = select.select([0, woken], [], [])
        if 0 in ready:
            return 0.0 if b"now" in os.read(0, 64) else grace
        with contextlib.suppress(BlockingIOError):
            os.read(woken, 64)
    # What an engine leaves behind when it ends by itself serves nobody, and holds the GPU's memory.
    return 0.0


def _end_group(engine: "subprocess.Popen[bytes]", patience: float) -> None:
    """Sends SIGTERM, then SIGKILL after `patience` seconds, to all that is left of the engine's group."""
    deadline = time.monotonic() + patience
    left = _send(engine, signal.SIGTERM if patience else signal.SIGKILL)
    # A stopped process takes no SIGTERM until it goes on.
    _send(engine, signal.SIGCONT)
    while left and time.monotonic() < deadline:
        if select.select([0], [], [], _POLL_SECONDS)[0] and b"now" in os.read(0, 64):
            break
        left = _send(engine, 0)
        time.sleep(_POLL_SECONDS)
    _send(engine, signal.SIGKILL)
    while _send(engine, 0):
        time.sleep(_POLL_SECONDS)


def _send(engine: "subprocess.Popen[bytes]", number: int) -> bool:
    """Sends `number` to the group; tells whether it still has a process."""
    _reap(engine)
    try:
        os.killpg(engine.pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _reap(engine: "subprocess.Popen[bytes]") -> None:
    """Takes the exit status of every process that has ended, the engine's own first."""
    if engine.poll() is None:
        return
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _control(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
