"""Counters and histograms that cost the hot path a dictionary look-up each; rendered when the page is asked for."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.utils import floatToGoString


class Counter:
    """A counter by label values."""

    def __init__(self, name: str, explanation: str, labels: Sequence[str]) -> None:
        self.name, self.explanation, self.labels = name, explanation, tuple(labels)
        self.values: defaultdict[tuple[str, ...], float] = defaultdict(float)

    def family(self) -> CounterMetricFamily:
        """Renders it."""
        family = CounterMetricFamily(self.name, self.explanation, labels=self.labels)
        for labels, value in list(self.values.items()):
            family.add_metric(labels, value)
        return family


class Spread:
    """One histogram's numbers: how many fell into each bucket, and their sum."""

    __slots__ = ("counts", "total")

    def __init__(self, buckets: int) -> None:
        self.counts = [0] * buckets
        self.total = 0.0


class Histogram:
    """A histogram by label values. `bounds` are upper bounds, in rising order, without infinity."""

    def __init__(self, name: str, explanation: str, labels: Sequence[str], bounds: Sequence[float]) -> None:
        self.name, self.explanation, self.labels = name, explanation, tuple(labels)
        self.bounds = tuple(bounds)
        self.spreads: dict[tuple[str, ...], Spread] = {}

    def observe(self, labels: tuple[str, ...], value: float) -> None:
        """Takes in one value."""
        spread = self.spreads.get(labels)
        if spread is None:
            spread = self.spreads[labels] = Spread(len(self.bounds) + 1)
        spread.counts[bisect_left(self.bounds, value)] += 1
        spread.total += value

    def family(self) -> HistogramMetricFamily:
        """Renders it."""
        family = HistogramMetricFamily(self.name, self.explanation, labels=self.labels)
        for labels, spread in list(self.spreads.items()):
            family.add_metric(labels, list(self._cumulate(spread.counts)), spread.total)
        return family

    def _cumulate(self, counts: Iterable[int]) -> Iterable[tuple[str, float]]:
        seen = 0
        for bound, count in zip((*self.bounds, float("inf")), counts, strict=True):
            seen += count
            yield floatToGoString(bound), seen  # type: ignore[no-untyped-call]
