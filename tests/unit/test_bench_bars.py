"""The bar file: its shape, the direction of limits, and when a missed bar fails."""

import json
import os
import platform

import pytest

from workers.bench.bars import Bar, exit_code, write_bars


@pytest.mark.parametrize(
    ("value", "op", "limit", "ok"),
    [
        (2.0, ">=", 2.0, True),
        (1.99, ">=", 2.0, False),
        (0.2, "<=", 0.2, True),
        (0.21, "<=", 0.2, False),
        (None, "<=", 1.0, False),
    ],
)
def test_a_bar_knows_its_direction(value, op, limit, ok):
    assert Bar("b", value, op, limit, "s").ok is ok


def test_the_file_holds_bars_and_environment(tmp_path):
    path = tmp_path / "build" / "demo.json"
    write_bars(path, [Bar("hit_ratio", 2.5, ">=", 2, "x"), Bar("ttft", None, "<=", 0.2, "x")], {"seed": 7})
    packet = json.loads(path.read_text())
    assert packet["bars"] == [
        {"id": "hit_ratio", "value": 2.5, "op": ">=", "limit": 2, "unit": "x", "ok": True},
        {"id": "ttft", "value": None, "op": "<=", "limit": 0.2, "unit": "x", "ok": False},
    ]
    environment = packet["environment"]
    assert environment["seed"] == 7
    assert environment["python"] == platform.python_version()
    assert environment["cpus"] == os.cpu_count()
    assert environment["versions"]["httpx"].count(".") == 2


@pytest.mark.parametrize(("strict", "value", "code"), [("1", 3, 1), ("1", 1, 0), ("0", 3, 0), (None, 3, 0)])
def test_only_strict_turns_a_missed_bar_into_a_failure(monkeypatch, strict, value, code):
    monkeypatch.delenv("STRICT", raising=False)
    if strict is not None:
        monkeypatch.setenv("STRICT", strict)
    assert exit_code([Bar("failed_requests", value, "<=", 2, "requests")]) == code
