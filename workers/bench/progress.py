"""What a person sees while the load runs: a live table on a terminal, a line every two seconds elsewhere."""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table

from workers.bench.load import Sample
from workers.bench.report import hit_rate, percentile

LINE_SECONDS = 2.0


class Progress:
    """Shows how far each side is. ``sides`` maps names to their growing lists of samples."""

    def __init__(
        self, console: Console, sides: Mapping[str, Sequence[Sample]], planned: int, time_scale: float
    ) -> None:
        self._console = console
        self._sides = sides
        self._planned = planned
        self._time_scale = time_scale
        self._begun = time.monotonic()
        self._last_line = self._begun
        self._live: Live | None = None

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Keeps the display on the screen while the load runs."""
        if not self._console.is_terminal:
            yield
            return
        with Live(self._table(), console=self._console, transient=True, auto_refresh=False) as self._live:
            yield

    def update(self) -> None:
        """Draws what is known by now."""
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
        elif time.monotonic() - self._last_line >= LINE_SECONDS:
            self._last_line = time.monotonic()
            parts = [f"{name} {self._line(samples)}" for name, samples in self._sides.items()]
            said = f"{self._last_line - self._begun:4.0f} s  " + "  |  ".join(parts)
            self._console.print(said, soft_wrap=True, highlight=False)

    def _line(self, samples: Sequence[Sample]) -> str:
        hits, second = self._figures(samples)
        return f"{len(samples)}/{self._planned} turns, hit rate {hits}, second TTFT p50 {second}"

    def _table(self) -> RenderableType:
        elapsed = time.monotonic() - self._begun
        drawn = Table(title=f"agents at work, {elapsed:.0f} s", title_style="bold", title_justify="left")
        drawn.add_column("")
        for column in ("turns done", "hit rate", "second request TTFT p50"):
            drawn.add_column(column, justify="right")
        for name, samples in self._sides.items():
            drawn.add_row(name, f"{len(samples)} of {self._planned}", *self._figures(samples))
        return drawn

    def _figures(self, samples: Sequence[Sample]) -> tuple[str, str]:
        """Returns the delivered hit rate and the second request's TTFT in GPU seconds, as text."""
        hits = hit_rate(samples, lambda sample: sample.cached_tokens)
        waits = [sample.ttft * self._time_scale for sample in samples if sample.turn == 1 and sample.ttft is not None]
        second = percentile(waits, 0.5)
        return "-" if hits is None else f"{hits:.0%}", "-" if second is None else f"{second:.2f} s"
