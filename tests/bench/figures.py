"""From what the load printed to medians, ratios and the bars."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from workers.bench.bars import Bar

from .cells import ROUTERS

STORE = "valkey-server"
"""The embedded store runs beside Homing on the same core; its CPU and memory are reported apart from the proxy's."""
TOLERATED = 0.001
"""A run with a larger share of failed answers than this is no measurement and is left out."""

Result = dict[str, Any]
Figure = Callable[[Result], float | None]


def cpu(result: Result, *, is_store: bool = False) -> float:
    """CPU seconds of a target's own processes, or of its embedded store."""
    return sum(float(row["cpu_s"]) for row in result["processes"] if (row["name"] == STORE) is is_store)


def per_request(result: Result, *, is_store: bool = False) -> float | None:
    """CPU microseconds for each answered request; None for the bare worker, whose processes are not counted."""
    return (
        cpu(result, is_store=is_store) / result["requests"] * 1e6
        if result["requests"] and result["processes"]
        else None
    )


def per_million_chunks(result: Result) -> float | None:
    """CPU seconds for a million delivered content chunks; None as above."""
    return cpu(result) / result["chunks"] * 1e6 if result["chunks"] and result["processes"] else None


def at(kind: str, percentile: str) -> Figure:
    """A percentile in milliseconds of ``latency``, ``first`` or ``delay``."""
    return lambda result: result[f"{kind}_ms"][percentile] if result[f"{kind}_ms"] else None


def rate(name: str) -> Figure:
    """``rps`` or ``chunks_per_s``."""
    return lambda result: float(result[name])


def is_sound(result: Result) -> bool:
    """Whether nearly all answers of a run were whole and right."""
    failed = result["errors"] + result["short"]
    return bool(failed <= TOLERATED * max(result["requests"], result["chunks"], 1))


class Results:
    """All sound runs, by cell and target."""

    def __init__(self) -> None:
        self._runs: dict[tuple[str, str], list[Result]] = defaultdict(list)

    def add(self, cell: str, target: str, result: Result) -> None:
        """Takes in one run."""
        self._runs[cell, target].append(result)

    def median(self, cell: str, target: str, figure: Figure) -> float | None:
        """The median over rounds; None when it was never measured."""
        values = [value for run in self._runs[cell, target] if (value := figure(run)) is not None]
        return statistics.median(values) if values else None

    def spread(self, cell: str, target: str, figure: Figure) -> float | None:
        """Largest distance of a round from the median, as a share of it; None with fewer than two rounds."""
        values = [value for run in self._runs[cell, target] if (value := figure(run)) is not None]
        middle = statistics.median(values) if len(values) > 1 else 0.0
        return max(abs(value - middle) for value in values) / middle if middle else None


def judge(results: Results, resident_bytes: int | None) -> list[Bar]:
    """Builds every bar of the data plane; a value is None where a part of it was not measured."""

    def over_peer(cell: str, figure: Figure, choose: Callable[[list[float]], float]) -> float | None:
        better = best((results.median(cell, router, figure) for router in ROUTERS), choose)
        return divide(results.median(cell, "homing", figure), better)

    def over_nginx(cell: str, figure: Figure) -> float | None:
        return divide(results.median(cell, "homing", figure), results.median(cell, "nginx", figure))

    def added(cell: str, figure: Figure) -> float | None:
        mine, bare = results.median(cell, "homing", figure), results.median(cell, "direct", figure)
        return None if mine is None or bare is None else mine - bare

    first_p99 = at("first", "p99")
    bars = [
        Bar("small_cpu_over_better_peer", over_peer("small", per_request, min), "<=", 0.35, "ratio"),
        Bar("small_cpu_over_nginx", over_nginx("small", per_request), "<=", 2.5, "ratio"),
        Bar("large_rate_over_better_peer", over_peer("large", rate("rps"), max), ">=", 2.0, "ratio"),
        Bar("large_added_latency_p50", added("large1", at("latency", "p50")), "<=", 1.0, "ms"),
    ]
    for cell in ("streams64", "streams512"):
        bars += [
            Bar(f"{cell}_cpu_over_better_peer", over_peer(cell, per_million_chunks, min), "<=", 0.85, "ratio"),
            Bar(f"{cell}_cpu_over_nginx", over_nginx(cell, per_million_chunks), "<=", 1.3, "ratio"),
        ]
    flat_first = results.median("flat512", "homing", first_p99)
    resident = None if resident_bytes is None else resident_bytes / 1e6
    bars += [
        Bar("streams512_added_first_chunk_p99", added("streams512", first_p99), "<=", 5.0, "ms"),
        Bar("flat512_chunk_rate_over_better_peer", over_peer("flat512", rate("chunks_per_s"), max), ">=", 1.0, "ratio"),
        Bar("flat512_first_chunk_p99", flat_first, "<=", 60.0, "ms"),
        Bar("resident_memory", resident, "<=", 120.0, "MB"),
    ]
    return bars


def best(values: Iterable[float | None], choose: Callable[[list[float]], float]) -> float | None:
    """The best of all values; None as soon as one is missing, for then nobody knows which is better."""
    known = list(values)
    return choose([value for value in known if value is not None]) if known and None not in known else None


def divide(value: float | None, by: float | None) -> float | None:
    """A ratio; None when a part of it is missing."""
    return None if value is None or not by else value / by
