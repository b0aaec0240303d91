"""`homing-worker check`: every finding on a command line, as text or JSON, and an exit code by the worst of them."""

import json
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from workers.agent.ledger import UnknownEdition
from workers.agent.preflight.examination import RULES, examine
from workers.agent.preflight.findings import Finding, Severity, WayOut, choose_exit_code
from workers.agent.preflight.memory import Estimate, estimate
from workers.agent.preflight.situation import Missing, Situation
from workers.agent.preflight.surroundings import survey_situation
from workers.agent.recipe import BadFlag, BadRecipe, build, choose_host

_GIB = 1024**3


def run(
    model: str,
    profile: str | None,
    hardware: str | None,
    file: Path | None,
    extra: Sequence[str],
    as_json: bool,
) -> int:
    """Prints the findings; returns 0 when there is nothing but notes, 1 with an error, 2 for wrong usage, 4 otherwise.

    4 = a warning, or a rule that could not be applied because a fact is missing.
    """
    try:
        host = choose_host(hardware)
        situation = survey_situation(build(model, profile, host, file, extra), host, profile)
    except (BadFlag, BadRecipe, UnknownEdition) as error:
        sys.stderr.write(f"homing-worker check: {error}\n")
        return 2
    findings = examine(situation)
    room = _estimate(situation)
    sys.stdout.write(render_json(situation, findings, room) if as_json else render(situation, findings, room))
    return choose_exit_code(findings)


def render(situation: Situation, findings: Iterable[Finding], room: Estimate | None) -> str:
    """Returns the findings as text, those that wait for the same fact in one entry."""
    parts = [f"{situation.line.model} on {situation.host.describe()}"]
    if room is not None:
        parts.append(
            f"estimate: weights {room.weights_bytes / _GIB:.1f} GiB, rest {room.overhead_bytes / _GIB:.1f} GiB, "
            f"cache {room.cache_bytes / _GIB:.1f} GiB = {room.capacity_tokens:,} tokens in blocks of "
            f"{room.block_tokens:,}, {room.windows:.1f} × {room.context:,}"
        )
    counted = list(findings)
    waiting: dict[str, list[str]] = {}
    for finding in counted:
        if finding.severity is Severity.UNKNOWN:
            waiting.setdefault(finding.message, []).append(finding.rule)
        else:
            parts.append(f"\n{finding.severity.value} {finding.rule}: {finding.message}")
            parts += [f"  - {_describe(way)}" for way in finding.ways_out]
    parts += [f"\nunknown {', '.join(rules)}: {message}" for message, rules in waiting.items()]
    tally = ", ".join(
        f"{count} {severity.value}"
        for severity in Severity
        if (count := _count(counted, severity)) or _is_bad(severity)
    )
    return "\n".join([*parts, f"\n{len(RULES)} rules: {tally}"]) + "\n"


def render_json(situation: Situation, findings: Iterable[Finding], room: Estimate | None) -> str:
    """Returns the command, the findings and the estimate as one JSON object; bytes and tokens as numbers."""
    body = {
        "model": situation.line.model,
        "command": situation.line.argv,
        "findings": [finding.body() for finding in findings],
        "estimate": None
        if room is None
        else {
            "memory_bytes": room.memory_bytes,
            "weights_bytes": room.weights_bytes,
            "overhead_bytes": room.overhead_bytes,
            "cache_bytes": room.cache_bytes,
            "capacity_tokens": room.capacity_tokens,
            "block_tokens": room.block_tokens,
            "windows": round(room.windows, 2),
        },
    }
    return json.dumps(body, indent=2, ensure_ascii=False) + "\n"


def _estimate(situation: Situation) -> Estimate | None:
    try:
        return estimate(situation)
    except Missing:
        return None


def _describe(way: WayOut) -> str:
    """Returns a way out with the flags that it means."""
    added = [token for name, value in way.set_flags.items() for token in ([name] if value is None else [name, value])]
    given = shlex.join(added)
    removed = " ".join(f"without {name}" for name in way.remove_flags)
    flags = ", ".join(part for part in (given, removed) if part)
    return f"{way.description}: {flags}" if flags else way.description


def _count(findings: Iterable[Finding], severity: Severity) -> int:
    return sum(finding.severity is severity for finding in findings)


def _is_bad(severity: Severity) -> bool:
    return severity in {Severity.ERROR, Severity.WARNING}
