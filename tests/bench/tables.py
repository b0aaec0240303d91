"""The same tables twice: on the terminal, and between the markers of docs/performance.md."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table as RichTable

from workers.bench.bars import Bar

from .cells import TARGETS
from .figures import Figure, Results, at, divide, per_million_chunks, per_request, rate

BEGIN, END = "<!-- bench -->", "<!-- /bench -->"


@dataclass(frozen=True, slots=True)
class Table:
    """A title, the heads of the columns, and the rows as text."""

    title: str
    heads: tuple[str, ...]
    rows: list[tuple[str, ...]]

    def show(self, console: Console) -> None:
        """Prints it."""
        table = RichTable(*self.heads, title=self.title, title_justify="left")
        for column in table.columns[1:]:
            column.justify = "right"
        for row in self.rows:
            table.add_row(*row)
        console.print(table)

    def lines(self) -> list[str]:
        """Markdown."""
        rule = ["---", *["---:"] * (len(self.heads) - 1)]
        return [f"**{self.title}**", "", *("| " + " | ".join(row) + " |" for row in (self.heads, rule, *self.rows)), ""]


def make_tables(results: Results, bars: Sequence[Bar], memory: dict[str, int], targets: Sequence[str]) -> list[Table]:
    """Builds the tables of requests, streams and bars. ``memory``: resident bytes by target."""
    rows = [name for name in TARGETS if name in targets]
    return [_requests(results, rows), _streams(results, rows, memory), _bars(bars)]


def _requests(results: Results, targets: Sequence[str]) -> Table:
    heads = (
        "",
        "1 KB: CPU µs",
        "÷ nginx",
        "requests/s",
        "p50 / p99 ms",
        "800 KB: CPU µs",
        "requests/s",
        "p50 at c=1, ms",
    )
    table = Table("Requests, 32 connections (CPU per request)", heads, [])
    for name in targets:
        row = [name, _cost(results, "small", name, per_request), _over_nginx(results, "small", name, per_request)]
        row += [text(results.median("small", name, rate("rps")), 0), _pair(results, "small", name, "latency")]
        row += [_cost(results, "large", name, per_request), text(results.median("large", name, rate("rps")), 0)]
        table.rows.append((*row, text(results.median("large1", name, at("latency", "p50")), 2)))
    return table


def _streams(results: Results, targets: Sequence[str], memory: dict[str, int]) -> Table:
    paced = (
        "64: CPU s/1M",
        "÷ nginx",
        "512: CPU s/1M",
        "÷ nginx",
        "512: first p50 / p99 ms",
        "512: delay p50 / p99 ms",
    )
    heads = ("", *paced, "unpaced chunks/s", "unpaced first p99 ms", "RSS MB")
    table = Table("Streams (CPU seconds per million chunks; first content chunk; one-way delay of a chunk)", heads, [])
    for name in targets:
        row = [name]
        for cell in ("streams64", "streams512"):
            row += [
                _cost(results, cell, name, per_million_chunks),
                _over_nginx(results, cell, name, per_million_chunks),
            ]
        row += [_pair(results, "streams512", name, kind) for kind in ("first", "delay")]
        row.append(text(results.median("flat512", name, rate("chunks_per_s")), 0))
        row.append(text(results.median("flat512", name, at("first", "p99")), 1))
        table.rows.append((*row, text(memory[name] / 1e6 if memory.get(name) else None, 0)))
    return table


def _bars(bars: Sequence[Bar]) -> Table:
    table = Table("Bars", ("bar", "value", "limit", "unit", "kept"), [])
    for bar in bars:
        kept = "not measured" if bar.value is None else "yes" if bar.ok else "no"
        limit = f"{'≤' if bar.op == '<=' else '≥'} {bar.limit:g}"
        table.rows.append((bar.id, text(bar.value, 2), limit, bar.unit, kept))
    return table


def write_docs(page: Path, tables: Sequence[Table], facts: Sequence[str]) -> bool:
    """Replaces what stands between the markers of ``page``. False when the page or its markers are not there."""
    whole = page.read_text(encoding="utf-8") if page.exists() else ""
    before, begin, rest = whole.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        return False
    lines = [
        BEGIN,
        "",
        *(f"- {fact}" for fact in facts),
        "",
        *(line for table in tables for line in table.lines()),
        END,
    ]
    page.write_text(before + "\n".join(lines) + after, encoding="utf-8")
    return True


def text(value: float | None, digits: int) -> str:
    """A number for people; a dash for what was not measured."""
    return "–" if value is None else f"{value:,.{digits}f}"


def _cost(results: Results, cell: str, target: str, figure: Figure) -> str:
    value, spread = results.median(cell, target, figure), results.spread(cell, target, figure)
    if not value:
        return "–"
    return text(value, 1) + (f" ±{spread:.0%}" if spread is not None else "")


def _over_nginx(results: Results, cell: str, target: str, figure: Figure) -> str:
    return text(divide(results.median(cell, target, figure), results.median(cell, "nginx", figure)), 2)


def _pair(results: Results, cell: str, target: str, kind: str) -> str:
    return " / ".join(text(results.median(cell, target, at(kind, point)), 2) for point in ("p50", "p99"))
