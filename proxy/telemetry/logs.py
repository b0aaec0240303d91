"""Logging: one line per settled request, as text for people or JSON for machines. No prompt text, no keys."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from typing import Protocol

from msgspec import Struct, to_builtins
from msgspec.json import Encoder

from ..core.types import Placement, Usage


class Told(Protocol):
    """What is read of an outcome."""

    request_id: str
    dialect: str
    model: str | None
    stream: bool
    result: str
    status: int | None
    placement: Placement | None
    turn: int
    attempts: int
    usage: Usage
    ttft: float | None
    duration: float
    bytes_in: int
    bytes_out: int
    error: str | None


class Line(Struct):
    """The one line of a request, in the order in which it is written; what is not known is null."""

    ts: float
    level: str
    id: str
    dialect: str
    model: str | None
    stream: bool
    result: str
    status: int | None
    worker: str | None
    attempts: int
    turn: int
    prompt_tokens: int | None
    expected_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None
    ttft: float | None
    duration: float
    bytes_in: int
    bytes_out: int
    error: str | None
    placement: Placement | None
    logger: str = "homing.request"
    event: str = "request"


# Faults of workers and of ours, as against what clients do.
FAULTS = frozenset(("worker_error", "internal", "incomplete", "worker_aborted"))
FLUSH_SECONDS = 0.1


class RequestLog:
    """Writes one line per settled request to stderr, several at a time: a system call each would cost the most.

    Args:
        form: auto (text on a terminal, else JSON), text or json.
        level: the least level that is written.
    """

    def __init__(self, form: str, level: str) -> None:
        self._encode = as_json if is_json(form) else as_text
        self._level = logging.getLevelNamesMapping()[level.upper()]
        self._lines: list[bytes] = []
        self._flushing: asyncio.TimerHandle | None = None

    def observe(self, told: Told) -> None:
        """Takes in one settled request."""
        is_fault = told.result in FAULTS
        if self._level > (logging.WARNING if is_fault else logging.INFO):
            return
        placement, usage = told.placement, told.usage
        line = Line(
            time.time(),
            "warning" if is_fault else "info",
            told.request_id,
            told.dialect,
            told.model,
            told.stream,
            told.result,
            told.status,
            None if placement is None else placement.winner.worker,
            told.attempts,
            told.turn,
            usage.prompt_tokens,
            None if placement is None else placement.winner.expected_tokens,
            usage.cached_tokens,
            usage.output_tokens,
            told.ttft,
            told.duration,
            told.bytes_in,
            told.bytes_out,
            told.error,
            placement,
        )
        self._lines.append(self._encode(line))
        if self._flushing is None:
            self._flushing = asyncio.get_running_loop().call_later(FLUSH_SECONDS, self.flush)

    def flush(self) -> None:
        """Writes what is waiting."""
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        if self._lines:
            text = b"\n".join(self._lines).decode("utf-8", "replace") + "\n"
            self._lines.clear()
            sys.stderr.write(text)
            sys.stderr.flush()


ENCODE = Encoder().encode


def as_json(line: Line) -> bytes:
    """Renders a line for machines. What a client names a model need not be valid Unicode."""
    try:
        return ENCODE(line)
    except UnicodeEncodeError:
        return json.dumps(to_builtins(line)).encode()


def as_text(line: Line) -> bytes:
    """Renders a line for people: time, level, and what is known."""
    clock = time.strftime("%H:%M:%S", time.localtime(line.ts))
    hidden = ("ts", "level", "logger", "event", "placement")
    fields = ((name, getattr(line, name)) for name in line.__struct_fields__ if name not in hidden)
    shown = (
        f"{name}={round(value, 6) if isinstance(value, float) else plain(value)}"
        for name, value in fields
        if value is not None
    )
    return " ".join([clock, f"{line.level:7}", line.event, *shown]).encode("utf-8", "replace")


class JsonLines(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """Renders a record."""
        line: dict[str, object] = {
            "ts": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextLines(logging.Formatter):
    """Time, level and message."""

    def format(self, record: logging.LogRecord) -> str:
        """Renders a record."""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        text = f"{clock} {record.levelname.lower():7} {record.getMessage()}"
        return text + ("\n" + self.formatException(record.exc_info) if record.exc_info else "")


def plain(value: object) -> str:
    """Renders a value of one line: what clients and engines say may hold line ends and control characters."""
    text = str(value)
    return text if text.isprintable() else repr(text)


def set_up(form: str, level: str) -> None:
    """Sends the product's log to stderr, in the form and from the level on that `RequestLog` takes."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if is_json(form) else TextLines())
    root = logging.getLogger("homing")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False


def is_json(form: str) -> bool:
    """Tells whether lines are for machines."""
    return form == "json" or (form == "auto" and not sys.stderr.isatty())
