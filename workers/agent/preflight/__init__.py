"""Whether a command line can work on a machine, said before an engine spends minutes on finding out.

Here live the rules, the reader of a model's config.json, and the estimate of what fits into a GPU's memory.
Nothing here starts an engine, asks a network, or changes a command line: a finding only says how it could be changed.
`workers.cli` and `workers.agent.launch` call `survey_situation` and `examine`.
"""

from workers.agent.preflight.examination import RULES, examine
from workers.agent.preflight.findings import Finding, Severity, WayOut, choose_exit_code
from workers.agent.preflight.situation import Situation
from workers.agent.preflight.surroundings import survey_situation

__all__ = [
    "RULES",
    "Finding",
    "Severity",
    "Situation",
    "WayOut",
    "choose_exit_code",
    "examine",
    "survey_situation",
]
