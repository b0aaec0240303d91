"""Logging: one line per settled request, as text for people or JSON for machines. No prompt text, no keys."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from typing import Protocol

from ..core.types import Placement, Usage

LOG = logging.getLogger("homing.request")


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


def log_request(told: Told) -> None:
    """Writes the one line of a request. Faults of workers and of ours are warnings."""
    level = (
        logging.WARNING if told.result in ("worker_error", "internal", "incomplete", "worker_aborted") else logging.INFO
    )
    if LOG.isEnabledFor(level):
        LOG.log(level, "request", extra={"fields": fields_of(told)})


def fields_of(told: Told) -> dict[str, object]:
    """Picks the fields of the line, in a fixed order; what is not known is null."""
    placement = told.placement
    return {
        "id": told.request_id,
        "dialect": told.dialect,
        "model": told.model,
        "stream": told.stream,
        "result": told.result,
        "status": told.status,
        "worker": None if placement is None else placement.winner.worker,
        "attempts": told.attempts,
        "turn": told.turn,
        "prompt_tokens": told.usage.prompt_tokens,
        "expected_tokens": None if placement is None else placement.winner.expected_tokens,
        "cached_tokens": told.usage.cached_tokens,
        "output_tokens": told.usage.output_tokens,
        "ttft": None if told.ttft is None else round(told.ttft, 6),
        "duration": round(told.duration, 6),
        "bytes_in": told.bytes_in,
        "bytes_out": told.bytes_out,
        "error": told.error,
        "placement": None if placement is None else placement.explain(),
    }


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
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextLines(logging.Formatter):
    """Time, level, message, and the known fields as `name=value`."""

    def format(self, record: logging.LogRecord) -> str:
        """Renders a record."""
        fields: Mapping[str, object] = getattr(record, "fields", {})
        shown = [f"{key}={plain(value)}" for key, value in fields.items() if value is not None and key != "placement"]
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        text = " ".join([f"{clock} {record.levelname.lower():7} {record.getMessage()}", *shown])
        return text + ("\n" + self.formatException(record.exc_info) if record.exc_info else "")


def plain(value: object) -> str:
    """Renders a value of one line: what clients and engines say may hold line ends and control characters."""
    text = str(value)
    return text if text.isprintable() else repr(text)


def set_up(form: str, level: str) -> None:
    """Sends the product's log to stderr. `form` is auto (text on a terminal, else JSON), text or json."""
    is_json = form == "json" or (form == "auto" and not sys.stderr.isatty())
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if is_json else TextLines())
    root = logging.getLogger("homing")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False
