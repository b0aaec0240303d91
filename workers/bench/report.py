"""From samples to figures, and from figures to the table.

Rates and percentiles of a side are over all that it answered. Time saved is over the requests that both answered,
since a side that answers less also waits for less.
All figures are in GPU seconds: wall-clock seconds multiplied by the simulators' time scale.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rich.table import Table

from workers.bench.bars import Bar
from workers.bench.load import Sample

HIT_RATIO_LEAST = 2.0
SECOND_TO_FIRST_MOST = 0.2


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and 95th percentile in seconds; None when nothing was measured."""

    p50: float | None
    p95: float | None


@dataclass(frozen=True, slots=True)
class Side:
    """The figures of one side. Hit rates are shares (0 to 1) of prompt tokens; None = unknown.

    ``coverage`` is the share of answered requests whose worker reported cached tokens; the others are left out of
    ``delivered``. ``waited`` sums the times to first token over the requests that both sides answered.
    """

    answered: int
    failed: int
    expected: float | None
    delivered: float | None
    coverage: float | None
    first: Spread
    second: Spread
    later: Spread
    waited: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both sides, and how many requests both of them answered."""

    both: int
    homing: Side
    round_robin: Side


def compare(homing: Sequence[Sample], round_robin: Sequence[Sample], time_scale: float) -> Comparison:
    """Returns the figures of both sides from their samples."""
    both = _answered(homing).keys() & _answered(round_robin).keys()
    return Comparison(
        both=len(both),
        homing=_side(homing, both, time_scale),
        round_robin=_side(round_robin, both, time_scale),
    )


def bars(comparison: Comparison) -> list[Bar]:
    """Returns the demo's bars with their measured values."""
    homing, other = comparison.homing, comparison.round_robin
    return [
        Bar(
            "delivered_hit_ratio",
            ratio(homing.delivered, other.delivered),
            ">=",
            HIT_RATIO_LEAST,
            "homing/round_robin",
        ),
        Bar(
            "second_request_ttft_p50_ratio",
            ratio(homing.second.p50, homing.first.p50),
            "<=",
            SECOND_TO_FIRST_MOST,
            "second/first",
        ),
        Bar("failed_requests", homing.failed + other.failed, "<=", 0, "requests"),
    ]


def percentile(values: Iterable[float], share: float) -> float | None:
    """Returns the ``share`` (0 to 1) quantile by linear interpolation between ranks; None for no values."""
    ranked = sorted(values)
    if not ranked:
        return None
    at = share * (len(ranked) - 1)
    low = int(at)
    high = min(low + 1, len(ranked) - 1)
    return ranked[low] + (ranked[high] - ranked[low]) * (at - low)


def hit_rate(samples: Iterable[Sample], cached: Callable[[Sample], int | None]) -> float | None:
    """Returns cached ÷ prompt tokens, summed over the samples where both are known; None for none."""
    known = [(hit, s.prompt_tokens) for s in samples if (hit := cached(s)) is not None and s.prompt_tokens]
    return sum(hit for hit, _ in known) / sum(prompt for _, prompt in known) if known else None


def ratio(over: float | None, under: float | None) -> float | None:
    """Returns ``over`` ÷ ``under``; None when either is unknown or ``under`` is zero."""
    return None if over is None or not under else over / under


def table(comparison: Comparison) -> Table:
    """Returns the closing table: both sides and their ratio, readable at 80 columns."""
    homing, other = comparison.homing, comparison.round_robin
    shown = Table(title="Homing and round robin: same prompts, equal fresh workers", title_style="bold")
    shown.add_column("")
    for name in ("Homing", "round robin", "ratio"):
        shown.add_column(name, justify="right")
    shown.add_row("requests answered", str(homing.answered), str(other.answered), "")
    shown.add_row("requests failed", str(homing.failed), str(other.failed), "", end_section=True)
    shown.add_row("expected hit rate", _share(homing.expected), _share(other.expected), "")
    times = _times(ratio(homing.delivered, other.delivered))
    shown.add_row("delivered hit rate", _share(homing.delivered), _share(other.delivered), times, end_section=True)
    for name, ours, theirs in (
        ("first request", homing.first, other.first),
        ("second request", homing.second, other.second),
        ("later requests", homing.later, other.later),
    ):
        shown.add_row(f"{name} TTFT p50", *_seconds_pair(ours.p50, theirs.p50))
        shown.add_row(f"{name} TTFT p95", *_seconds_pair(ours.p95, theirs.p95), end_section=True)
    shown.add_row("waited for first tokens, total", *_seconds_pair(homing.waited, other.waited))
    saved = other.waited - homing.waited
    shown.add_row("time saved", f"[bold]{_seconds(saved)}[/]", "", _share(ratio(saved, other.waited)))
    return shown


def notes(comparison: Comparison, time_scale: float) -> str:
    """Returns what a reader must know to read the table right."""
    said = [
        f"Times are GPU seconds: wall-clock times {time_scale:g}, as simulated GPUs run that much",
        "faster than real ones. This multiplies the proxy's own overhead too.",
        "Round robin is the client's own, with no proxy in between, which favours it.",
        f"Hit rates: cached ÷ prompt tokens. Totals: the {comparison.both} requests that both answered.",
    ]
    coverage = [side.coverage for side in (comparison.homing, comparison.round_robin)]
    if any(share is not None and share < 1 for share in coverage):
        said.append(f"Cached tokens were reported for {_share(coverage[0])} (Homing) and {_share(coverage[1])}.")
    return "\n".join(said)


def _answered(samples: Iterable[Sample]) -> dict[tuple[int, int], Sample]:
    return {(s.conversation, s.turn): s for s in samples if s.error is None}


def _side(samples: Sequence[Sample], both: set[tuple[int, int]], time_scale: float) -> Side:
    answered = _answered(samples)
    covered = sum(sample.cached_tokens is not None for sample in answered.values())

    def spread(belongs: Callable[[int], bool]) -> Spread:
        waits = [s.ttft * time_scale for s in answered.values() if s.ttft is not None and belongs(s.turn)]
        return Spread(percentile(waits, 0.5), percentile(waits, 0.95))

    return Side(
        answered=len(answered),
        failed=sum(sample.error is not None for sample in samples),
        expected=hit_rate(answered.values(), lambda s: s.expected_tokens),
        delivered=hit_rate(answered.values(), lambda s: s.cached_tokens),
        coverage=covered / len(answered) if answered else None,
        first=spread(lambda turn: turn == 0),
        second=spread(lambda turn: turn == 1),
        later=spread(lambda turn: turn > 1),
        waited=sum(s.ttft * time_scale for key, s in answered.items() if key in both and s.ttft is not None),
    )


def _seconds_pair(ours: float | None, theirs: float | None) -> tuple[str, str, str]:
    return _seconds(ours), _seconds(theirs), _times(ratio(ours, theirs))


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f} s" if abs(value) < 100 else f"{value:,.0f} s"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"
