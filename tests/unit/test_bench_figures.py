"""Bars from what the load prints, tables into a page, plans from the environment."""

import pytest

from tests.bench.cells import CELLS, TARGETS, command_line, read_plan
from tests.bench.figures import Results, is_sound, judge
from tests.bench.profile import report
from tests.bench.tables import make_tables, write_docs
from workers.bench.errors import BenchError


def result(cpu=1.0, store=0.5, requests=1000, chunks=0, seconds=1.0, first=0.0, latency=1.0, errors=0, short=0):
    return {
        "requests": requests,
        "rps": requests / seconds,
        "chunks": chunks,
        "chunks_per_s": chunks / seconds,
        "errors": errors,
        "short": short,
        "latency_ms": {"p50": latency, "p99": latency * 2},
        "first_ms": {"p50": first / 2, "p99": first} if chunks else None,
        "delay_ms": {"p50": 0.1, "p99": 0.2} if chunks else None,
        "processes": [{"name": "python", "cpu_s": cpu}, {"name": "valkey-server", "cpu_s": store}],
    }


def whole_suite():
    results = Results()
    for round_ in (0.9, 1.0, 5.0):  # one round in three is far off; a median does not see it
        for name, cost in (("homing", 0.04), ("nginx", 0.02), ("vllm-router", 0.4), ("sglang-router", 0.2)):
            results.add("small", name, result(cpu=cost * round_))
            results.add("large", name, result(requests=round(4000 * cost if name == "nginx" else 40 / cost)))
            results.add("large1", name, result(latency=cost * 10 * round_))
            for cell in ("streams64", "streams512", "flat512"):
                # The store's CPU must not show; unequal chunks, so that a rate is told from a cost.
                results.add(
                    cell, name, result(cpu=cost * round_, chunks=round(10_000 / cost), first=cost * 100 * round_)
                )
        results.add("large1", "direct", result(latency=0.1))
        results.add("streams512", "direct", result(chunks=10, first=1.5))
    return results


def test_every_bar_is_judged_against_the_better_peer():
    bars = {bar.id: bar for bar in judge(whole_suite(), 100_000_000)}
    assert {name: round(bar.value, 3) for name, bar in bars.items()} == {
        "small_cpu_over_better_peer": 0.2,
        "small_cpu_over_nginx": 2.0,
        "large_rate_over_better_peer": 5.0,
        "large_added_latency_p50": 0.3,
        "streams64_cpu_over_better_peer": 0.04,
        "streams64_cpu_over_nginx": 4.0,
        "streams512_cpu_over_better_peer": 0.04,
        "streams512_cpu_over_nginx": 4.0,
        "streams512_added_first_chunk_p99": 2.5,
        "flat512_chunk_rate_over_better_peer": 5.0,
        "flat512_first_chunk_p99": 4.0,
        "resident_memory": 100.0,
    }
    assert [name for name, bar in bars.items() if not bar.ok] == [
        "streams64_cpu_over_nginx",
        "streams512_cpu_over_nginx",
    ]


def test_without_one_peer_nobody_knows_which_is_better():
    results = Results()
    for name in ("homing", "nginx", "sglang-router"):
        results.add("small", name, result())
    bars = {bar.id: bar.value for bar in judge(results, None)}
    assert bars.pop("small_cpu_over_nginx") == 1.0
    assert set(bars.values()) == {None}


def test_failed_answers_make_a_run_unsound():
    assert is_sound(result())
    assert is_sound(result(errors=1))
    assert not is_sound(result(errors=1, short=1))
    assert not is_sound(result(requests=0, errors=1))


def test_tables_go_between_the_markers(tmp_path):
    results = whole_suite()
    tables = make_tables(results, judge(results, None), {"homing": 80_000_000}, TARGETS)
    page = tmp_path / "performance.md"
    assert not write_docs(page, tables, [])
    page.write_text("before\n<!-- bench -->\nold\n<!-- /bench -->\nafter\n")
    for _ in range(2):
        assert write_docs(page, tables, ["one fact"])
    said = page.read_text()
    assert said.startswith("before\n<!-- bench -->\n\n- one fact\n")
    assert said.endswith("|\n\n<!-- /bench -->\nafter\n")
    assert "old" not in said
    assert "| homing | 40.0 ±400% | 2.00 | 1,000 |" in said
    assert "| direct | – | – | – |" in said
    assert "| resident_memory | – | ≤ 120 | MB | not measured |" in said


def test_a_plan_is_all_of_it_or_what_is_asked_for():
    plan = read_plan({})
    assert plan.is_whole
    assert plan.rounds == 5
    assert not read_plan({"ROUNDS": "4"}).is_whole
    assert not read_plan({"SECONDS": "9"}).is_whole
    asked = {"CELLS": "streams64, small", "TARGETS": "homing,nginx", "ROUNDS": "3"}
    plan = read_plan(asked)
    assert plan.cells == (CELLS["small"], CELLS["streams64"])
    assert plan.targets == ("homing", "nginx")
    assert command_line(asked) == "make bench CELLS='streams64, small' TARGETS=homing,nginx ROUNDS=3"


@pytest.mark.parametrize(
    "wrong", [{"CELLS": "tiny"}, {"TARGETS": "envoy"}, {"ROUNDS": "0"}, {"ROUNDS": "2.5"}, {"SECONDS": "x"}]
)
def test_a_wrong_word_is_named(wrong):
    [(name, value)] = wrong.items()
    with pytest.raises(BenchError, match=f"{name}={value}"):
        read_plan(wrong)


def test_a_paced_stream_lasts_as_long_as_the_window():
    assert {"stream=50", "step_us=20000", "seconds=1.0"} <= set(CELLS["streams512"].options(1.0))
    assert {"stream=130", "seconds=2.6"} <= set(CELLS["streams512"].options(None))
    assert "stream=128" in CELLS["flat512"].options(1.0)


def test_a_profile_counts_the_top_and_the_whole_of_stacks():
    lines = report("main;serve;read 30\nmain;serve;read;parse 60\nmain;idle 10\n").splitlines()
    assert lines[1:5] == ["  self  function", " 60.0%  parse", " 30.0%  read", " 10.0%  idle"]
    assert lines[6:9] == [" total  function", " 90.0%  serve", " 90.0%  read"]
