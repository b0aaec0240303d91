"""Notices an engine that is alive and does nothing, which its `/health` does not tell.

Two signs, both read from outside: a process of the engine is stopped (Linux's `/proc`), or requests are in the
engine and none of its figures moves. An engine that is idle and hangs shows neither until a request comes.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import httpx

from workers.agent.exposition import read_work

_POLL_SECONDS = 5.0

STALL_SECONDS = 180.0
"""Longer than any one step of a model: the figures move with each, a chunk of a long prefill included."""


@dataclass(frozen=True, slots=True)
class Freeze:
    """Why an engine counts as frozen; `by_hand` = somebody stopped it, and may let it go on."""

    reason: str
    by_hand: bool


class FreezeWatch:
    """Watches one life, whose guard has the process id `guard`.

    `on_freeze` and `on_thaw` are awaited once for each change.
    """

    def __init__(
        self,
        engine: httpx.AsyncClient,
        guard: int,
        *,
        on_freeze: Callable[[Freeze], Awaitable[None]],
        on_thaw: Callable[[], Awaitable[None]],
        poll_seconds: float = _POLL_SECONDS,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        self._engine = engine
        self._guard = guard
        self._on_freeze = on_freeze
        self._on_thaw = on_thaw
        self._poll_seconds = poll_seconds
        self._stall_seconds = stall_seconds
        self._mark: tuple[float, ...] | None = None
        self._moved_at = time.monotonic()
        self._stopped_polls = 0

    async def run(self) -> None:
        """Polls until cancelled."""
        frozen = False
        while True:
            await asyncio.sleep(self._poll_seconds)
            freeze = await self._look()
            if freeze is not None and not frozen:
                await self._on_freeze(freeze)
            elif freeze is None and frozen:
                await self._on_thaw()
            frozen = freeze is not None

    async def _look(self) -> Freeze | None:
        stopped = find_stopped(self._guard)
        # Once may be a debugger that attaches; twice in a row is a stop.
        self._stopped_polls = self._stopped_polls + 1 if stopped else 0
        if self._stopped_polls >= 2:
            self._moved_at = time.monotonic()
            return Freeze(f"its process {stopped[0]} is stopped; `kill -CONT {stopped[0]}` lets it go on", by_hand=True)
        with contextlib.suppress(httpx.HTTPError):
            answer = await self._engine.get("/metrics")
            self._note(answer.text if answer.is_success else "")
        still = time.monotonic() - self._moved_at
        if still > self._stall_seconds:
            return Freeze(f"it holds requests and has computed nothing for {still:.0f} s", by_hand=False)
        return None

    def _note(self, exposition: str) -> None:
        """Takes the time whenever the engine is idle or has moved; a page without figures says nothing."""
        work = read_work(exposition)
        if work is None or not work.requests or work.mark != self._mark:
            self._moved_at = time.monotonic()
        self._mark = None if work is None else work.mark


def find_stopped(guard: int, proc: Path = Path("/proc")) -> list[int]:
    """Returns the stopped processes of the session that the guard's child leads; none where there is no `/proc`."""
    stats = [stat for folder in proc.glob("[0-9]*") if (stat := _read_stat(folder)) is not None]
    leaders = {pid for pid, _, parent, _ in stats if parent == guard}
    return [pid for pid, state, _, session in stats if session in leaders and state in {"T", "t"}]


def _read_stat(folder: Path) -> tuple[int, str, int, int] | None:
    """Returns process id, state, parent and session, the fields 1, 3, 4 and 6 of proc(5)'s `stat`."""
    try:
        # The name in brackets may hold anything, brackets included.
        _, _, fields = (folder / "stat").read_text(errors="replace").rpartition(")")
    except OSError:
        return None
    state, parent, _, session, *_ = fields.split()
    return int(folder.name), state, int(parent), int(session)
