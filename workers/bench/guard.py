"""Ends process groups when its parent is gone, in whatever way the parent went.

Run as a script, on the standard library alone. It reads process group ids from standard input, one a line,
until the pipe closes: the parent has closed it, or the parent is dead, SIGKILL included. Then it sends
SIGTERM to every group, gives them ``GRACE`` seconds, and sends SIGKILL to those that remain.
This is the one way in which children are ended.
"""

import os
import signal
import sys
import time

GRACE = 8.0
"""Seconds between SIGTERM and SIGKILL: a proxy drains its requests and stops its own store in less."""


def main() -> None:
    """Waits for the pipe to close, then ends the groups that it named."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups = {int(line) for line in sys.stdin}
    alive = _send(groups, signal.SIGTERM)
    deadline = time.monotonic() + GRACE
    while alive and time.monotonic() < deadline:
        time.sleep(0.02)
        alive = _send(alive, 0)
    _send(alive, signal.SIGKILL)


def _send(groups: set[int], number: int) -> set[int]:
    """Sends ``number`` to each group and returns those that still have a process."""
    alive = set()
    for group in groups:
        try:
            os.killpg(group, number)
        except (ProcessLookupError, PermissionError):
            continue
        alive.add(group)
    return alive


if __name__ == "__main__":
    main()
