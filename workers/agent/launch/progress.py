"""Shows a person how far an engine's start has come: a live line on a terminal, one plain line per phase elsewhere."""

import logging
import sys
from typing import Protocol

from workers.agent.launch.phases import READY

_LOG = logging.getLogger(__name__)


class Progress(Protocol):
    """What a start reports to; `seconds` count from the start of the engine."""

    def enter(self, phase: str, seconds: float) -> None:
        """A phase begins."""

    def hear(self, line: str) -> None:
        """The engine printed a line."""

    def close(self) -> None:
        """The start is over, well or not; nothing is reported after it."""


class PlainProgress:
    """One line for each phase, as every other change of state has one."""

    def enter(self, phase: str, seconds: float) -> None:
        """Writes the line."""
        _LOG.info("%s (after %.0f s)", phase, seconds)

    def hear(self, line: str) -> None:
        """Does nothing: the log has its file."""

    def close(self) -> None:
        """Does nothing: nothing is held."""


class LiveProgress:
    """A line that moves: the phase, its clock and the engine's last line; each finished phase stays above it."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(highlight=False)
        self._status = self._console.status("launching")
        self._status.start()
        self._phase: str | None = None
        self._began = 0.0

    def enter(self, phase: str, seconds: float) -> None:
        """Leaves the finished phase with its time, and shows the next."""
        if self._phase is not None:
            self._console.print(f"  [green]✓[/] {self._phase} [dim]{seconds - self._began:.0f} s[/]")
        self._phase, self._began = phase, seconds
        self._status.update(f"{phase} …")
        if phase == READY:
            self._console.print(f"  [green]✓[/] {phase} [dim]after {seconds:.0f} s[/]")

    def hear(self, line: str) -> None:
        """Shows the line, cut to the terminal."""
        from rich.markup import escape

        width = max(20, self._console.width - len(self._phase or "") - 8)
        self._status.update(f"{self._phase} [dim]{escape(line[-width:])}[/]")

    def close(self) -> None:
        """Takes the moving line away."""
        self._status.stop()


def open_progress() -> Progress:
    """Returns the live form on a terminal, the plain one elsewhere."""
    return LiveProgress() if sys.stdout.isatty() else PlainProgress()
