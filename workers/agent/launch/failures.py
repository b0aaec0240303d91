"""Recognises a known failure in an engine's log, and explains it in one short block.

Pure: lines in, a finding out. It hears every line of a life, since tracebacks bury the cause far above the end.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from workers.agent.launch.rules import RULES, FailureRule
from workers.agent.preflight.findings import WayOut

_MARK = re.compile(r"\b(?:[A-Z]\w*(?:Error|Exception)|error): ")


@dataclass(frozen=True, slots=True)
class Failure:
    """A recognised failure: the rule's words with this log's values in them, and the `line` that told."""

    rule: str
    title: str
    explanation: str
    ways_out: tuple[WayOut, ...]
    line: str

    def explain(self) -> list[str]:
        """Returns the block for a person, a line each."""
        ways = [f"  way out {number}: {advise(way)}" for number, way in enumerate(self.ways_out, start=1)]
        return [f"{self.title} (rule {self.rule})", f"  {self.explanation}", f"  the log says: {self.line}", *ways]


class Recogniser:
    """Hears one life of an engine, line by line; `verdict` names the first rule in rank that matched."""

    def __init__(self, rules: Sequence[FailureRule] = RULES) -> None:
        self._rules = rules
        self._found: dict[int, tuple[re.Match[str], str]] = {}

    def hear(self, line: str, phase: str) -> None:
        """Tries every rule that has not matched yet; `phase` is the start-up phase that the line falls in."""
        for rank, rule in enumerate(self._rules):
            if rank in self._found or (rule.within and phase not in rule.within):
                continue
            match = _search(rule.patterns, line)
            if match is not None:
                self._found[rank] = match, line

    def verdict(self) -> Failure | None:
        """Returns the failure, `None` when no rule matched."""
        if not self._found:
            return None
        rank = min(self._found)
        match, line = self._found[rank]
        rule = self._rules[rank]
        values = {name: value or "?" for name, value in match.groupdict().items()}
        return Failure(
            rule=rule.id,
            title=rule.title.format_map(values),
            explanation=rule.explanation.format_map(values),
            ways_out=tuple(_fill(way, values) for way in rule.ways_out),
            line=_shorten(line),
        )


def advise(way: WayOut) -> str:
    """Says a way out in one clause, its flags first."""
    flags = describe_flags(way)
    return f"{flags} ({way.description})" if flags else way.description


def describe_flags(way: WayOut) -> str:
    """Says in one clause what a way out changes; empty when it is for a person to take."""
    sets = [f"with {flag if value is None else f'{flag} {value}'}" for flag, value in way.set_flags.items()]
    return ", ".join([*sets, *(f"without {flag}" for flag in way.remove_flags)])


def _fill(way: WayOut, values: Mapping[str, str]) -> WayOut:
    """Puts the log's values into a way out's flags."""
    return replace(
        way,
        set_flags={flag: None if value is None else value.format_map(values) for flag, value in way.set_flags.items()},
        remove_flags=tuple(flag.format_map(values) for flag in way.remove_flags),
    )


def _search(patterns: Iterable[re.Pattern[str]], line: str) -> re.Match[str] | None:
    return next((match for pattern in patterns if (match := pattern.search(line))), None)


def _shorten(line: str) -> str:
    """Leaves out the log's prefix, up to the error's name."""
    mark = _MARK.search(line)
    return line[mark.start() if mark else 0 :].strip()[:300]
