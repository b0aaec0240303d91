"""The one line of a request: complete, one line, and never the cause of a failure."""

import asyncio
import json
import logging

import pytest

from proxy.core.types import Candidate, Cost, Placement, Reason, Usage
from proxy.edge.ports import Outcome
from proxy.telemetry.logs import RequestLog, set_up

pytestmark = pytest.mark.anyio

PLACEMENT = Placement(Candidate("w1", 416, Cost(0.1, 0.2, 0.0, 0.0)), None, Reason.OVERLAP, 500, 1)


def settled(**fields):
    told = {"request_id": "r1", "dialect": "chat", "model": "m", "result": "ok", "status": 200, "placement": PLACEMENT}
    return Outcome(**(told | {"usage": Usage(417, 416, 4), "ttft": 0.25, "duration": 0.5, "attempts": 1} | fields))


def written(capsys, form, *outcomes, level="info"):
    log = RequestLog(form, level)
    for outcome in outcomes:
        log.observe(outcome)
    log.flush()
    return capsys.readouterr().err.splitlines()


async def test_a_line_is_one_json_object(capsys):
    (line,) = written(capsys, "json", settled())
    told = json.loads(line)
    assert told["placement"]["winner"]["worker"] == "w1"
    assert {name: told[name] for name in ("id", "worker", "model", "result", "level", "cached_tokens", "error")} == {
        "id": "r1", "worker": "w1", "model": "m", "result": "ok", "level": "info", "cached_tokens": 416, "error": None,
    }  # fmt: skip


async def test_what_is_unknown_is_null_and_not_zero(capsys):
    (line,) = written(capsys, "json", settled(usage=Usage(), ttft=None, placement=None, model=None, status=None))
    told = json.loads(line)
    assert {
        told[name] for name in ("worker", "cached_tokens", "prompt_tokens", "expected_tokens", "ttft", "model")
    } == {None}


@pytest.mark.parametrize("form", ["json", "text"])
@pytest.mark.parametrize("odd", ["two\nlines", "\ud800", "\x1b[31mred", "", "ä " * 5000, '"quoted"'])
async def test_what_clients_and_engines_say_stays_one_line(capsys, form, odd):
    lines = written(capsys, form, settled(model=odd, error=odd), settled())
    assert len(lines) == 2
    assert all(line.isprintable() for line in lines)
    if form == "json":
        assert json.loads(lines[0])["model"] == odd


async def test_a_line_for_people_leaves_out_what_is_unknown(capsys):
    (line,) = written(capsys, "text", settled(usage=Usage()))
    assert "id=r1" in line
    assert "worker=w1" in line
    assert "cached_tokens" not in line


@pytest.mark.parametrize(
    ("result", "level"),
    [("ok", "info"), ("client_error", "info"), ("client_gone", "info"), ("refused", "info")]
    + [(fault, "warning") for fault in ("worker_error", "internal", "incomplete", "worker_aborted")],
)
async def test_faults_are_warnings(capsys, result, level):
    (line,) = written(capsys, "json", settled(result=result))
    assert json.loads(line)["level"] == level
    assert len(written(capsys, "json", settled(result=result), level="warning")) == (level == "warning")


async def test_lines_are_written_without_being_asked(capsys):
    log = RequestLog("json", "info")
    log.observe(settled())
    text, deadline = "", asyncio.get_running_loop().time() + 5
    while not text and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0.02)
        text += capsys.readouterr().err
    assert json.loads(text)["id"] == "r1"


async def test_other_lines_have_the_same_form(capsys):
    set_up("json", "info")
    try:
        logging.getLogger("homing.fleet").warning("worker %s left", "w1")
        logging.getLogger("homing.fleet").debug("not shown")
    finally:
        logging.getLogger("homing").handlers.clear()
        logging.getLogger("homing").propagate = True
    (line,) = capsys.readouterr().err.splitlines()
    told = json.loads(line)
    assert (told["event"], told["level"], told["logger"]) == ("worker w1 left", "warning", "homing.fleet")
