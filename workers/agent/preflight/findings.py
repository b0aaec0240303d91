"""What an examination says: findings, each with its severity and its ways out."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Severity(StrEnum):
    """How bad a finding is, worst first."""

    ERROR = "error"
    """The engine will not start, or the proxy will hold it out."""
    WARNING = "warning"
    """It starts, but something that matters is wrong."""
    UNKNOWN = "unknown"
    """A rule could not be applied, because a fact is missing."""
    NOTE = "note"
    """Worth knowing; nothing is wrong."""


@dataclass(frozen=True, slots=True)
class WayOut:
    """One thing to do about a finding; a boolean flag's value is `None`.

    A way out without flags is for a person to take.
    """

    description: str
    set_flags: Mapping[str, str | None] = field(default_factory=dict)
    remove_flags: tuple[str, ...] = ()

    def body(self) -> dict[str, object]:
        """Returns the way out as JSON."""
        return {
            "description": self.description,
            "set_flags": dict(self.set_flags),
            "remove_flags": list(self.remove_flags),
        }


@dataclass(frozen=True, slots=True)
class Finding:
    """What one rule says of one situation."""

    rule: str
    severity: Severity
    message: str
    ways_out: tuple[WayOut, ...] = ()

    def body(self) -> dict[str, object]:
        """Returns the finding as JSON."""
        return {
            "rule": self.rule,
            "severity": self.severity.value,
            "message": self.message,
            "ways_out": [way.body() for way in self.ways_out],
        }


def choose_exit_code(findings: tuple[Finding, ...]) -> int:
    """Returns 1 when an error is among them, 4 when a warning or an unknown is, else 0."""
    worst = {finding.severity for finding in findings}
    if Severity.ERROR in worst:
        return 1
    return 4 if worst & {Severity.WARNING, Severity.UNKNOWN} else 0
