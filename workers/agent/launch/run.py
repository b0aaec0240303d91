"""`homing-worker run`: one command from a model's name to a worker in the fleet, and out of it again.

The order is fixed: recipe, preflight, start, ready, join as `join` does; at a signal drain, leave, end the engine.
One line on stdout for each change of state; on stderr, in one block, the end that is not wanted.
"""

import asyncio
import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from workers.agent.engine import EngineUnusable, open_engine
from workers.agent.join import (
    BadOption,
    JoinOptions,
    complain,
    heed_signals,
    print_states,
    settle_options,
    stay_joined,
    unless,
)
from workers.agent.launch.command import NoProgram, find_program
from workers.agent.launch.failures import advise
from workers.agent.launch.life import StartFailed
from workers.agent.launch.supervisor import LaunchPlan, Supervisor
from workers.agent.membership import MembershipRefused
from workers.agent.preflight import Finding, Severity, examine, survey_situation
from workers.agent.recipe import BadFlag, BadRecipe, HostFacts, build, choose_host

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What `run` is told beside the proxy: `extra` are the owner's own flags for vLLM, which win over all others."""

    model: str
    profile: str | None = None
    recipe: Path | None = None
    engine_command: str | None = None
    port: int = 8000
    extra: tuple[str, ...] = ()
    apply_fix: bool = False
    preflight: bool = True
    start_seconds: float = 1800.0
    log: Path | None = None


def run(options: RunOptions, joining: JoinOptions | None) -> int:
    """Starts an engine and keeps it in the fleet until a signal; `joining` is `None` without a proxy.

    Returns 0 when it left cleanly, 1 when the engine did not start, preflight found an error or the proxy said no,
    2 for a value that cannot work, 3 for an engine that does not speak to us.
    """
    try:
        host = choose_host(None)
        plan = _make_plan(options, host)
    except (BadFlag, BadOption, BadRecipe, NoProgram) as error:
        sys.stderr.write(f"homing-worker run: {error}\n")
        return 2
    print_states("run")
    if options.preflight and not _examine(plan, host):
        return 1
    sys.stdout.write(f"homing-worker run: engine log: {plan.log}\n")
    sys.stdout.flush()
    return asyncio.run(supervise(plan, joining))


def settle_joining(
    *, proxy: str | None, port: int, token: str | None, advertise: str | None, worker_id: str | None
) -> JoinOptions | None:
    """Checks the values for joining as `join` checks them; `None` without a proxy. Raises `BadOption`."""
    if proxy is None:
        return None
    engine = f"http://127.0.0.1:{port}"
    return settle_options(proxy=proxy, engine=engine, token=token, advertise=advertise, worker_id=worker_id)


async def supervise(plan: LaunchPlan, joining: JoinOptions | None) -> int:
    """Runs one plan to its end and returns the exit code; nothing that it started outlives it."""
    stop = asyncio.Event()
    code = 0
    try:
        async with open_engine(f"http://127.0.0.1:{plan.port}") as engine:
            supervisor = Supervisor(plan, engine)
            heed_signals(stop, supervisor.kill)
            try:
                facts = await unless(stop, supervisor.start())
                if facts is not None and joining is None:
                    await unless(stop, supervisor.keep(None, stop))
                elif facts is not None and joining is not None:
                    await stay_joined(
                        joining,
                        engine,
                        facts,
                        stop,
                        told=supervisor.tell(),
                        beside=lambda membership: supervisor.keep(membership, stop),
                    )
            finally:
                await supervisor.stop()
    except* (StartFailed, MembershipRefused) as failures:
        code = complain("run", failures, 1)
    except* EngineUnusable as failures:
        code = complain("run", failures, 3)
    return code


def _make_plan(options: RunOptions, host: HostFacts) -> LaunchPlan:
    """Builds the command line for this machine; raises what each part of it raises, in one line."""
    line = build(options.model, options.profile, host, options.recipe, options.extra)
    stated = line.value("--port")
    if stated is not None and stated != str(options.port):
        raise BadOption(f"--port {stated} stands among vLLM's flags: pass it as homing-worker's own --port {stated}")
    line = line.amend({"--port": str(options.port)}, (), "homing-worker run")
    return LaunchPlan(
        program=find_program(options.engine_command),
        line=line,
        profile=options.profile,
        port=options.port,
        log=options.log or _default_log(options.port),
        apply_fix=options.apply_fix,
        start_seconds=options.start_seconds,
    )


def _examine(plan: LaunchPlan, host: HostFacts) -> bool:
    """Says what preflight finds, and whether the engine may start: no error is among it."""
    findings = examine(survey_situation(plan.line, host, plan.profile))
    errors = [finding for finding in findings if finding.severity is Severity.ERROR]
    for finding in findings:
        if finding.severity is Severity.WARNING:
            _LOG.warning("preflight: %s", "; ".join(_describe(finding)))
    if unknown := sum(finding.severity is Severity.UNKNOWN for finding in findings):
        _LOG.info("preflight: %d rules want facts that are not known here; `homing-worker check` names them", unknown)
    if errors:
        lines = [line for finding in errors for line in _describe(finding)]
        lines += ["nothing was started; --no-preflight starts it all the same"]
        sys.stderr.write("homing-worker run: preflight: " + "\n  ".join(lines) + "\n")
    return not errors


def _describe(finding: Finding) -> list[str]:
    ways = [f"way out {number}: {advise(way)}" for number, way in enumerate(finding.ways_out, start=1)]
    return [f"{finding.message} (rule {finding.rule})", *ways]


def _default_log(port: int) -> Path:
    """Returns a place in the user's state folder, by the XDG base directory rules."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "homing" / f"engine-{port}.log"
