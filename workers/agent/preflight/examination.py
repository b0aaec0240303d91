"""The whole table of rules, and the examination by it."""

from workers.agent.preflight import capacity, precision, serving
from workers.agent.preflight.findings import Finding
from workers.agent.preflight.rule import apply_all
from workers.agent.preflight.situation import Situation

RULES = (*precision.RULES, *capacity.RULES, *serving.RULES)


def examine(situation: Situation) -> tuple[Finding, ...]:
    """Returns every finding on a situation, worst first."""
    return apply_all(RULES, situation)
