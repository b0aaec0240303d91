"""One life of an engine that this agent started: up to ready, and to its end.

What it prints is followed twice: for the phase that the start is in, and for a failure that is known by rule.
Ready is what the engine says over HTTP, never what its log says.
"""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from workers.agent.engine import EngineFacts, read_facts
from workers.agent.launch.failures import Failure, Recogniser
from workers.agent.launch.phases import PHASES, READY, Phase, PhaseClock
from workers.agent.launch.process import STOP_SECONDS, EngineLog, EngineProcess, describe_end, engine_environment
from workers.agent.launch.progress import Progress

_POLL_SECONDS = 0.25


class StartFailed(Exception):
    """The engine did not become ready; the message is a short block of lines, `failure` the rule that matched."""

    def __init__(self, lines: Sequence[str], failure: Failure | None) -> None:
        super().__init__("\n".join(lines))
        self.failure = failure


class EngineLife:
    """A started engine. Its owner awaits `stop` in the end, whatever happens in between."""

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        progress: Progress,
        *,
        phases: Sequence[Phase] = PHASES,
        stop_seconds: float = STOP_SECONDS,
    ) -> None:
        self._progress = progress
        self._began = time.monotonic()
        self._clock = PhaseClock(self._began, phases)
        self._phase = self._clock.current.name
        self._recogniser = Recogniser()
        self._log = EngineLog(log)
        progress.enter(self._phase, 0.0)
        self._process = EngineProcess(command, engine_environment(), self._log, self._hear, stop_seconds=stop_seconds)
        self._running = asyncio.create_task(self._process.run())

    @property
    def pid(self) -> int:
        """The guard's process id: the engine is its only child."""
        return self._process.pid

    async def wait_ready(self, engine: httpx.AsyncClient, start_seconds: float) -> EngineFacts:
        """Returns the engine's facts once it lists its models.

        Raises `StartFailed` when it ends, or a phase or the whole start takes too long.
        """
        try:
            while True:
                if self._running.done():
                    raise StartFailed(*self._account(describe_end(self._running.result()), "the engine did not start"))
                try:
                    facts = await read_facts(engine)
                except httpx.HTTPError:
                    self._check_clock(start_seconds)
                    await asyncio.wait({self._running}, timeout=_POLL_SECONDS)
                else:
                    self._enter(READY)
                    return facts
        finally:
            self._progress.close()

    async def ended(self) -> str:
        """Waits for the engine's end, and says in a clause how it ended."""
        return describe_end(await asyncio.shield(self._running))

    def explain(self) -> Failure | None:
        """Returns the known failure that the log shows, `None` when it shows none."""
        return self._recogniser.verdict()

    async def stop(self) -> None:
        """Ends the engine, gently first, and returns when its last process has gone."""
        self._process.stop()
        await asyncio.shield(self._running)

    def kill(self) -> None:
        """Ends the engine at once, without waiting for it."""
        self._process.kill()

    def _hear(self, line: str) -> None:
        self._recogniser.hear(line, self._phase)
        if self._phase == READY:
            return
        phase = self._clock.hear(line, time.monotonic())
        if phase is not None:
            self._enter(phase.name)
        self._progress.hear(line)

    def _enter(self, phase: str) -> None:
        self._phase = phase
        self._progress.enter(phase, time.monotonic() - self._began)

    def _check_clock(self, start_seconds: float) -> None:
        now = time.monotonic()
        if self._clock.overdue(now):
            limit = self._clock.current.limit_seconds
            raise StartFailed(
                *self._account(f"spent more than {limit:g} s in the phase {self._phase!r}", "the engine hangs")
            )
        if now - self._began > start_seconds:
            said = f"was not ready after {start_seconds:g} s, in the phase {self._phase!r}"
            raise StartFailed(*self._account(said, "raise --start-seconds if it only needs longer"))

    def _account(self, how: str, otherwise: str) -> tuple[list[str], Failure | None]:
        """Puts the known cause into words, or shows the log's last lines when none is known."""
        failure = self.explain()
        whole = f"  whole log: {self._log.path}"
        if failure is not None:
            head, *rest = failure.explain()
            return [f"the engine {how}: {head}", *rest, whole], failure
        tail = [f"  | {line}" for line in self._log.tail]
        return [f"the engine {how}, for no reason that is known by rule ({otherwise})", *tail, whole], None
