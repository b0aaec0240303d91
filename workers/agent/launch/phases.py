"""The phases of an engine's start, told from its log, each with the time it may take.

Pure: lines and times in, phases out. The markers are vLLM's own log lines (0.22 to 0.33, GPU and CPU workers).
A phase may be skipped (an eager engine captures no graphs) and never comes back.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Phase:
    """One stretch of a start; `marker` is the line that begins it, `None` = no line does.

    `limit_seconds` bounds the phase alone; `None` = only the whole start is bounded.
    """

    name: str
    marker: re.Pattern[str] | None
    limit_seconds: float | None


PHASES = (
    # Imports in three processes one after the other: half a minute warm, minutes from a cold network disk.
    Phase("launching", None, 600.0),
    # A first start downloads the weights here, at a speed that nobody knows beforehand.
    Phase(
        "loading weights", re.compile(r"Starting to load model |Loading \w+ checkpoint shards|Loading model from"), None
    ),
    Phase(
        "compiling",
        re.compile(
            r"Starting torch\.compile|for vLLM's torch\.compile|Dynamo bytecode transform time|"
            r"Compiling a graph for|Directly load the|Warming up model for the compilation"
        ),
        900.0,
    ),
    Phase("capturing graphs", re.compile(r"Profiling CUDA graph memory|Capturing [\w -]*(?:CUDA|cuda) ?graph"), 600.0),
    Phase(
        "warming",
        re.compile(
            r"Graph capturing finished|init engine \(profile|Starting vLLM (?:API )?server|"
            r"Waiting for application startup"
        ),
        600.0,
    ),
)
READY = "ready"


class PhaseClock:
    """Follows one start; `now` is seconds on any steady clock, the same one throughout."""

    def __init__(self, now: float, phases: Sequence[Phase] = PHASES) -> None:
        self._phases = phases
        self._index = 0
        self._began = now

    @property
    def current(self) -> Phase:
        """The phase that is running."""
        return self._phases[self._index]

    def hear(self, line: str, now: float) -> Phase | None:
        """Returns the phase that `line` begins, `None` when it begins none that is still to come."""
        for index in range(len(self._phases) - 1, self._index, -1):
            marker = self._phases[index].marker
            if marker is not None and marker.search(line):
                self._index, self._began = index, now
                return self._phases[index]
        return None

    def overdue(self, now: float) -> bool:
        """Tells whether the running phase has taken longer than it may."""
        limit = self.current.limit_seconds
        return limit is not None and now - self._began > limit
