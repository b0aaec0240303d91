"""The form of a rule, and the examination that applies a table of them."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from string import Template

from workers.agent.preflight.findings import Finding, Severity, WayOut
from workers.agent.preflight.situation import Missing, Situation


@dataclass(frozen=True, slots=True)
class Fires:
    """A condition that holds: the values for the explanation, and the ways out that depend on them."""

    values: Mapping[str, object] = field(default_factory=dict)
    ways_out: tuple[WayOut, ...] = ()


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that can be wrong.

    `condition` returns what fires, `None` when all is well, and raises `Missing` when it cannot tell.
    `explanation` is one sentence with a `$name` for each value; `ways_out` hold in every case, before the computed.
    """

    id: str
    severity: Severity
    condition: Callable[[Situation], Fires | None]
    explanation: str
    ways_out: tuple[WayOut, ...] = ()

    def apply(self, situation: Situation) -> Finding | None:
        """Returns what the rule says of a situation; an unknown fact is a finding too."""
        try:
            fires = self.condition(situation)
        except Missing as missing:
            return Finding(self.id, Severity.UNKNOWN, f"not checked, for want of {missing}")
        if fires is None:
            return None
        message = Template(self.explanation).substitute({key: _show(value) for key, value in fires.values.items()})
        return Finding(self.id, self.severity, message, (*self.ways_out, *fires.ways_out))


def apply_all(rules: Iterable[Rule], situation: Situation) -> tuple[Finding, ...]:
    """Returns what the rules say, worst first."""
    findings = [finding for rule in rules if (finding := rule.apply(situation)) is not None]
    return tuple(sorted(findings, key=lambda finding: list(Severity).index(finding.severity)))


def _show(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
