"""Keeps one engine running: started, perhaps mended once, started again after each crash, ended at the end.

A first start that fails ends the command: somebody is there to read why. Later ones are tried without end,
after 1 s, 2 s, … 60 s; ten minutes of health begin that count anew.
An engine that hangs with requests in it is killed and so restarted; one that somebody stopped is only reported, and
leaves the fleet until it goes on.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from workers.agent.engine import EngineFacts
from workers.agent.launch.command import compose_argv
from workers.agent.launch.failures import Failure, describe_flags
from workers.agent.launch.freeze import STALL_SECONDS, Freeze, FreezeWatch
from workers.agent.launch.life import EngineLife, StartFailed
from workers.agent.launch.phases import PHASES, Phase
from workers.agent.launch.process import STOP_SECONDS
from workers.agent.launch.progress import PlainProgress, Progress, open_progress
from workers.agent.membership import Membership
from workers.agent.preflight.findings import WayOut
from workers.agent.recipe import BadFlag, CommandLine

_LOG = logging.getLogger(__name__)

_LONGEST_PAUSE_SECONDS = 60.0
_HEALTHY_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """What to start and how long to wait for it; all times in seconds, `port` is where the engine will listen."""

    program: list[str]
    line: CommandLine
    profile: str | None
    port: int
    log: Path
    apply_fix: bool = False
    start_seconds: float = 1800.0
    stop_seconds: float = STOP_SECONDS
    stall_seconds: float = STALL_SECONDS
    freeze_poll_seconds: float = 5.0
    first_pause_seconds: float = 1.0
    phases: Sequence[Phase] = PHASES


@dataclass(frozen=True, slots=True)
class AppliedFix:
    """The way out that was taken, and the rule that offered it."""

    rule: str
    way: WayOut

    def body(self) -> dict[str, object]:
        """Returns the fix as the registration holds it."""
        return {"rule": self.rule, **self.way.body()}


class Supervisor:
    """Owns the engine of one plan; `stop` is awaited in the end, whatever happened before."""

    def __init__(self, plan: LaunchPlan, engine: httpx.AsyncClient) -> None:
        self._plan = plan
        self._engine = engine
        self._line = plan.line
        self._applied: AppliedFix | None = None
        self._life: EngineLife | None = None

    def tell(self) -> dict[str, object]:
        """Returns what the worker's identity holds because the engine was started here: its recipe, and its GPUs."""
        recipe = {
            "model": self._line.model,
            "profile": self._plan.profile,
            "flags": [{"argv": flag.tokens, "source": flag.source} for flag in self._line.flags],
            "applied_fix": None if self._applied is None else self._applied.body(),
        }
        # vLLM's default is one GPU.
        stated = self._line.value("--tensor-parallel-size") or "1"
        return {"tensor_parallel_size": int(stated) if stated.isdecimal() else None, "recipe": recipe}

    async def start(self) -> EngineFacts:
        """Starts the engine and returns its facts once it is ready.

        With `apply_fix` a failure that is known is mended once. Raises `StartFailed`.
        """
        try:
            return await self._begin(open_progress())
        except StartFailed as failed:
            fix = self._find_fix(failed.failure)
            if fix is None:
                raise
            if not self._plan.apply_fix:
                lines = [*str(failed).splitlines(), f"  --apply-fix starts once more {describe_flags(fix[0].way)}"]
                raise StartFailed(lines, failed.failure) from None
            _say(failed)
        self._applied, self._line = fix
        _LOG.info("starting once more %s", describe_flags(self._applied.way))
        return await self._begin(open_progress())

    async def keep(self, membership: Membership | None, stop: asyncio.Event) -> None:
        """Starts the engine again whenever it ends, as long as `stop` is not set."""
        pause = self._plan.first_pause_seconds
        while True:
            ready_at = time.monotonic()
            how = await self._outlive(membership)
            if stop.is_set():
                return
            if membership is not None:
                await membership.leave()
            self._report(how)
            if time.monotonic() - ready_at >= _HEALTHY_SECONDS:
                pause = self._plan.first_pause_seconds
            ready = False
            while not ready:
                _LOG.info("starting the engine again in %g s", pause)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
                try:
                    await self._begin(PlainProgress())
                    ready = True
                except StartFailed as failed:
                    _say(failed)

    async def stop(self) -> None:
        """Ends the engine, if one runs, and returns when its last process has gone."""
        if self._life is not None:
            await self._life.stop()

    def kill(self) -> None:
        """Ends the engine, if one runs, without waiting."""
        if self._life is not None:
            self._life.kill()

    async def _begin(self, progress: Progress) -> EngineFacts:
        """Starts one life; when it does not become ready, nothing of it is left."""
        self._claim_port()
        self._life = EngineLife(
            compose_argv(self._plan.program, self._line),
            self._plan.log,
            progress,
            phases=self._plan.phases,
            stop_seconds=self._plan.stop_seconds,
        )
        try:
            return await self._life.wait_ready(self._engine, self._plan.start_seconds)
        except BaseException:
            await self._life.stop()
            raise

    def _claim_port(self) -> None:
        """Raises `StartFailed` when somebody listens there: that engine would be taken for this one."""
        with socket.socket() as probe:
            # A server that has just stopped leaves connections in TIME_WAIT; they do not make the port taken.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", self._plan.port))
            except OSError as error:
                line = (
                    f"port {self._plan.port} is taken ({error.strerror}): stop what listens there, take another "
                    f"with --port, or join a running engine with --attach http://127.0.0.1:{self._plan.port}"
                )
                raise StartFailed([line], None) from None

    def _find_fix(self, failure: Failure | None) -> tuple[AppliedFix, CommandLine] | None:
        """Returns the first way out that changes the command line, and the line that it makes."""
        if failure is None:
            return None
        for way in failure.ways_out:
            try:
                line = self._line.amend(way.set_flags, way.remove_flags, f"fix {failure.rule}")
            except BadFlag:
                continue
            if line.tokens != self._line.tokens:
                return AppliedFix(failure.rule, way), line
        return None

    async def _outlive(self, membership: Membership | None) -> str:
        """Waits for the end of this life, and says how it ended; watches for a freeze meanwhile."""
        life = self._life
        if life is None:
            raise RuntimeError("an engine is kept only after it was started")

        async def freeze(found: Freeze) -> None:
            _LOG.warning("the engine is frozen: %s", found.reason)
            if membership is not None:
                await membership.leave()
            if not found.by_hand:
                life.kill()

        async def thaw() -> None:
            _LOG.info("the engine goes on")
            if membership is not None:
                await membership.come_back()

        watch = FreezeWatch(
            self._engine,
            life.pid,
            on_freeze=freeze,
            on_thaw=thaw,
            poll_seconds=self._plan.freeze_poll_seconds,
            stall_seconds=self._plan.stall_seconds,
        )
        watching = asyncio.create_task(watch.run())
        try:
            return await life.ended()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    def _report(self, how: str) -> None:
        failure = None if self._life is None else self._life.explain()
        cause = "" if failure is None else f": {failure.title} (rule {failure.rule})"
        _LOG.warning("the engine %s%s; its log is kept as %s.1", how, cause, self._plan.log)


def _say(failed: StartFailed) -> None:
    for line in str(failed).splitlines():
        _LOG.warning("%s", line)
