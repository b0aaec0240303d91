"""Fills the tables that code is the source of into the pages that hold them.

A page marks the place with `<!-- begin NAME -->` and `<!-- end NAME -->`; NAME is one of `TABLES`.
`python docs/generate.py` writes; with `--check` it writes nothing and exits 1 when a page is out of date.
"""

# ruff: noqa: INP001 - a script beside the pages it fills, not a package

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from proxy.app import Homing
from proxy.cli import serve
from proxy.errors import HomingError
from proxy.settings import PREFIX, Settings, read_settings
from proxy.telemetry.metrics import TABLE, Gauge, Series

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "docs/reference/settings.md", "docs/reference/metrics.md", "docs/reference/errors.md")
PLACE = re.compile(r"(<!-- begin ([a-z]+) -->\n).*?(<!-- end \2 -->)", re.DOTALL)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Renders a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def settings() -> str:
    """Renders every setting."""
    flags = inspect.signature(serve).parameters
    rows = []
    for name, field in Settings.model_fields.items():
        flag = f"`--{name.replace('_', '-')}`" if name in flags else "–"
        rows.append((flag, f"`{PREFIX}{name.upper()}`", default_of(field.default), field.description or ""))
    return table(("flag", "variable", "default", "meaning"), rows)


def default_of(value: object) -> str:
    """Renders a default; a setting without one is a dash."""
    if value is None or value == ():
        return "–"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def counters() -> str:
    """Renders every counter."""
    return series(row for row in TABLE if row.kind == "counter")


def histograms() -> str:
    """Renders every histogram."""
    return series(row for row in TABLE if row.kind == "histogram")


def series(rows: Iterable[Series]) -> str:
    """Renders rows of the exporter's table; a counter's name ends in `_total` on the page."""
    return table(
        ("name", "unit", "labels", "meaning", "absent when"),
        (
            (f"`{row.name}{'_total' * (row.kind == 'counter')}`", row.unit, labels(row.labels), row.help, row.absent)
            for row in rows
        ),
    )


def labels(names: Sequence[str]) -> str:
    """Renders label names."""
    return ", ".join(f"`{name}`" for name in names) or "–"


def buckets() -> str:
    """Renders the bucket bounds of every histogram."""
    rows = [
        (f"`{row.name}`", ", ".join(f"{bound:f}".rstrip("0").rstrip(".") for bound in row.buckets)) for row in TABLE
    ]
    return table(("name", "upper bounds, seconds"), [row for row in rows if row[1]])


def gauges() -> str:
    """Renders every gauge: an empty fleet has the same names and labels as a full one."""
    unconnected = Homing(read_settings({}, {}), "unix:///nowhere")
    build = Gauge("homing_build_info", "Always 1; the version is a label.", ("version",), ())
    read = (*unconnected._gauges(), build)  # noqa: SLF001 - their names stand nowhere else
    return table(
        ("name", "labels", "meaning"), ((f"`{gauge.name}`", labels(gauge.labels), gauge.help) for gauge in read)
    )


def errors() -> str:
    """Renders every error that a client can meet."""
    head = ("class", "status", "`type`", "`code`", "tried again", "blames the worker", "meaning")
    return table(head, (error(cls) for cls in subclasses(HomingError) if not is_branch(cls)))


def error(cls: type[HomingError]) -> tuple[str, ...]:
    """Renders the facts that an error's class holds."""
    facts = [f"`{cls.__name__}`", str(cls.status), f"`{cls.type}`", f"`{cls.code}`"]
    facts += ["yes" if flag else "no" for flag in (cls.retry_safe, cls.blames_worker)]
    return (*facts, (cls.__doc__ or "").strip().splitlines()[0])


def subclasses(cls: type[HomingError]) -> Iterator[type[HomingError]]:
    """Yields every class under one, depth first, in the order of the file."""
    for below in cls.__subclasses__():
        yield below
        yield from subclasses(below)


def is_branch(cls: type[HomingError]) -> bool:
    """Tells whether a class only gathers others: it stands right under the root and has classes below it."""
    return cls.__base__ is HomingError and bool(cls.__subclasses__())


TABLES = {
    "settings": settings,
    "counters": counters,
    "histograms": histograms,
    "buckets": buckets,
    "gauges": gauges,
    "errors": errors,
}


def fill(text: str) -> str:
    """Returns a page with every marked place filled in.

    Raises:
        KeyError: a marker names no table.
    """
    return PLACE.sub(lambda place: place[1] + TABLES[place[2]]() + place[3], text)


def main(arguments: Sequence[str]) -> int:
    """Writes what is out of date, or with `--check` only names it. Returns the exit code."""
    if arguments not in ([], ["--check"]):
        sys.stderr.write("usage: python docs/generate.py [--check]\n")
        return 2
    is_stale = False
    for name in PAGES:
        text = (ROOT / name).read_text(encoding="utf-8")
        filled = fill(text)
        if filled == text:
            continue
        is_stale = True
        if arguments:
            sys.stderr.write(f"{name} is out of date: run `make docs`\n")
        else:
            (ROOT / name).write_text(filled, encoding="utf-8")
            sys.stdout.write(f"wrote {name}\n")
    return 1 if arguments and is_stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
