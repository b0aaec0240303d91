"""Every series, declared in one table, and the one place where an outcome becomes numbers.

A hit rate is a quotient of two counters over the same requests, so `coverage` says on both sides whether the engine
reported `cached_tokens`: absent is unknown, and unknown requests must not dilute the rate.
Labels are bounded: only models that the fleet is known to serve, only workers and hardware that joined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .. import __version__
from ..core.types import Placement, Usage
from .series import Counter, Histogram

# OpenTelemetry's GenAI buckets for time to first token, carried on to ten minutes: long prompts on slow cards.
TTFT_BUCKETS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    30,
    60,
    120,
    600,
)
OVERHEAD_BUCKETS = (
    0.00001,
    0.000025,
    0.00005,
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.1,
    1,
)


@dataclass(frozen=True, slots=True)
class Series:
    """One row of the table. `absent` says when the series does not exist or does not move."""

    name: str
    kind: str
    unit: str
    labels: tuple[str, ...]
    help: str
    absent: str = "never"
    buckets: tuple[float, ...] = ()


TABLE = (
    Series(
        "homing_requests",
        "counter",
        "requests",
        ("dialect", "model", "result"),
        "Settled inference requests.",
    ),
    Series(
        "homing_prompt_tokens",
        "counter",
        "tokens",
        ("model", "coverage"),
        "Prompt tokens of answered requests: the engine's count, or the proxy's estimate where coverage is unknown.",
    ),
    Series(
        "homing_expected_hit_tokens",
        "counter",
        "tokens",
        ("model", "coverage"),
        "Prompt tokens that the proxy expected the chosen worker to hold, at the moment of choice.",
    ),
    Series(
        "homing_delivered_hit_tokens",
        "counter",
        "tokens",
        ("model",),
        "Prompt tokens that engines report to have served from their prefix cache.",
        absent="no engine reports cached_tokens",
    ),
    Series(
        "homing_delivered_coverage",
        "counter",
        "requests",
        ("model", "coverage"),
        "Answered requests by whether the engine reported cached_tokens (known) or not (unknown).",
    ),
    Series(
        "homing_ttft_seconds",
        "histogram",
        "seconds",
        ("model", "hardware", "reuse", "hit"),
        "Request received to first content token sent. reuse: first or repeat request of its prefix; hit: what the "
        "engine delivered (full: every block that can hit did).",
        buckets=TTFT_BUCKETS,
    ),
    Series(
        "homing_second_request_ttft_seconds",
        "histogram",
        "seconds",
        ("model", "hardware"),
        "The same for the second request of each prefix alone.",
        absent="no conversation has come a second time",
        buckets=TTFT_BUCKETS,
    ),
    Series(
        "homing_overhead_seconds",
        "histogram",
        "seconds",
        ("stage",),
        "Time inside the proxy by stage: read, hash, index, place. read waits for the client's bytes.",
        buckets=OVERHEAD_BUCKETS,
    ),
    Series("homing_placements", "counter", "placements", ("worker", "reason"), "Where requests went, and why."),
    Series(
        "homing_attempts",
        "counter",
        "attempts",
        (),
        "Tries at a worker; more than requests when some were repeated.",
    ),
)


class Told(Protocol):
    """What is read of an outcome."""

    dialect: str
    model: str | None
    is_known_model: bool
    result: str
    placement: Placement | None
    hardware: str | None
    block_tokens: int | None
    turn: int
    attempts: int
    usage: Usage
    ttft: float | None
    stages: dict[str, float]


class Metrics:
    """The exporter's registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._counters = {row.name: Counter(row.name, row.help, row.labels) for row in TABLE if row.kind == "counter"}
        self._histograms = {
            row.name: Histogram(row.name, row.help, row.labels, row.buckets) for row in TABLE if row.kind == "histogram"
        }
        self.registry.register(Families([*self._counters.values(), *self._histograms.values()]))

    def render(self) -> tuple[bytes, str]:
        """Renders the page and names its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    def watch(self, read: Callable[[], Iterable[Gauge]]) -> None:
        """Adds gauges that are read when the page is asked for."""
        self.registry.register(Gauges(read))

    def observe(self, told: Told) -> None:
        """Takes in one settled request."""
        count = self._counters
        model = (told.model or "none") if told.is_known_model else "other"
        count["homing_requests"].values[told.dialect, model, told.result] += 1
        count["homing_attempts"].values[()] += told.attempts
        overhead = self._histograms["homing_overhead_seconds"]
        for stage, seconds in told.stages.items():
            overhead.observe((stage,), seconds)
        if told.placement is not None:
            count["homing_placements"].values[told.placement.winner.worker, told.placement.reason.value] += 1
            if told.ttft is not None:
                self._observe_answered(told, told.placement, told.ttft, model)

    def _observe_answered(self, told: Told, placement: Placement, ttft: float, model: str) -> None:
        count, usage = self._counters, told.usage
        prompt, cached = usage.prompt_tokens, usage.cached_tokens
        coverage = "unknown" if cached is None or prompt is None else "known"
        by_coverage = (model, coverage)
        count["homing_prompt_tokens"].values[by_coverage] += placement.prompt_tokens if prompt is None else prompt
        count["homing_expected_hit_tokens"].values[by_coverage] += placement.winner.expected_tokens
        count["homing_delivered_coverage"].values[by_coverage] += 1
        if coverage == "known":
            count["homing_delivered_hit_tokens"].values[model,] += cached or 0
        hardware = told.hardware or "unknown"
        reuse = "first" if told.turn == 1 else "repeat"
        hit = hit_class(usage, told.block_tokens)
        self._histograms["homing_ttft_seconds"].observe((model, hardware, reuse, hit), ttft)
        if told.turn == 2:
            self._histograms["homing_second_request_ttft_seconds"].observe((model, hardware), ttft)


class Families(Collector):
    """Renders the table's series."""

    def __init__(self, series: Sequence[Counter | Histogram]) -> None:
        self._series = series

    def collect(self) -> Iterator[Metric]:
        """Yields a family per series."""
        for one in self._series:
            yield one.family()


@dataclass(frozen=True, slots=True)
class Gauge:
    """A value that is read when asked for; `rows` are (label values, value)."""

    name: str
    help: str
    labels: tuple[str, ...]
    rows: tuple[tuple[tuple[str, ...], float], ...]


class Gauges(Collector):
    """Reads gauges at scrape time."""

    def __init__(self, read: Callable[[], Iterable[Gauge]]) -> None:
        self._read = read

    def describe(self) -> list[GaugeMetricFamily]:
        """Names nothing in advance: the registry must not call `read` before the fleet exists."""
        return []

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Yields every gauge."""
        for gauge in self._read():
            family = GaugeMetricFamily(gauge.name, gauge.help, labels=gauge.labels)
            for labels, value in gauge.rows:
                family.add_metric(labels, value)
            yield family
        build = GaugeMetricFamily("homing_build_info", "Always 1; the version is a label.", labels=("version",))
        build.add_metric((__version__,), 1)
        yield build


def hit_class(usage: Usage, block_tokens: int | None) -> str:
    """Names what was delivered: none, partial, full, or unknown.

    Full is every block that can hit: the engine always computes the last token, so that is
    `floor((prompt − 1) / block) · block`; a prompt shorter than a block that hit nothing is `none`.
    """
    if usage.cached_tokens is None or usage.prompt_tokens is None:
        return "unknown"
    if usage.cached_tokens == 0:
        return "none"
    block = block_tokens or 1
    return "full" if usage.cached_tokens >= (usage.prompt_tokens - 1) // block * block else "partial"
