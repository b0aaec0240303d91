"""The figures behind the table, from samples written by hand."""

import dataclasses
import io

import pytest
from rich.console import Console

from workers.bench import report
from workers.bench.load import Sample


def sample(conversation: int, turn: int, ttft: float, prompt: int = 1000, cached: int | None = 0, **more) -> Sample:
    return Sample(conversation, turn, ttft=ttft, prompt_tokens=prompt, cached_tokens=cached, **more)


HOMING = [
    sample(0, 0, 0.2, 1000, 0, expected_tokens=0),
    sample(0, 1, 0.02, 2000, 1800, expected_tokens=1900),
    sample(0, 2, 0.03, 3000, 2700, expected_tokens=2700),
    sample(1, 0, 0.4, 1000, 0, expected_tokens=0),
]
ROUND_ROBIN = [sample(0, 0, 0.3), sample(0, 1, 0.3, 2000, 900), sample(1, 0, 0.5)]


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([], 0.5, None),
        ([7.0], 0.95, 7.0),
        ([3.0, 1.0, 2.0], 0.5, 2.0),
        ([1.0, 2.0], 0.5, 1.5),
        ([0.0, 10.0], 0.95, 9.5),
    ],
)
def test_percentiles_interpolate_between_ranks(values, share, expected):
    assert report.percentile(values, share) == expected


def test_rates_weigh_by_tokens_over_all_that_a_side_answered():
    compared = report.compare(HOMING, ROUND_ROBIN, time_scale=10)
    assert compared.homing.delivered == pytest.approx(4500 / 7000)
    assert compared.homing.expected == pytest.approx(4600 / 7000)
    assert compared.round_robin.delivered == pytest.approx(900 / 4000)
    assert compared.round_robin.expected is None
    assert (compared.homing.answered, compared.round_robin.answered) == (4, 3)


def test_times_are_gpu_seconds_by_turn():
    homing = report.compare(HOMING, ROUND_ROBIN, time_scale=10).homing
    assert homing.first.p50 == pytest.approx(3.0)
    assert homing.second == report.Spread(pytest.approx(0.2), pytest.approx(0.2))
    assert homing.later == report.Spread(pytest.approx(0.3), pytest.approx(0.3))


def test_time_waited_is_over_the_requests_that_both_sides_answered():
    compared = report.compare(HOMING, ROUND_ROBIN, time_scale=10)
    assert compared.both == 3
    assert compared.homing.waited == pytest.approx(6.2)
    assert compared.round_robin.waited == pytest.approx(11.0)


def test_failures_count_as_nothing_else():
    failed = Sample(1, 0, error="HTTP 503")
    compared = report.compare([*HOMING[:3], failed], ROUND_ROBIN, time_scale=10)
    assert compared.both == 2
    assert (compared.homing.failed, compared.round_robin.failed) == (1, 0)


def test_an_absent_cached_count_is_unknown_and_not_zero():
    silent = dataclasses.replace(HOMING[0], cached_tokens=None)
    compared = report.compare([silent, *HOMING[1:]], ROUND_ROBIN, time_scale=10)
    assert compared.homing.delivered == pytest.approx(4500 / 6000)
    assert compared.homing.coverage == pytest.approx(3 / 4)
    assert "75.0%" in report.notes(compared, 10)
    assert "reported" not in report.notes(report.compare(HOMING, ROUND_ROBIN, 10), 10)


def test_bars_take_their_values_from_the_comparison():
    bars = {bar.id: bar for bar in report.bars(report.compare(HOMING, ROUND_ROBIN, time_scale=10))}
    assert bars["delivered_hit_ratio"].value == pytest.approx((4500 / 7000) / (900 / 4000))
    assert bars["second_request_ttft_p50_ratio"].value == pytest.approx(0.2 / 3.0)
    assert bars["failed_requests"].value == 0
    assert all(bar.ok for bar in bars.values())


def test_nothing_measured_misses_the_ratio_bars():
    bars = {bar.id: bar for bar in report.bars(report.compare([], [], time_scale=10))}
    assert bars["delivered_hit_ratio"].value is None
    assert not bars["delivered_hit_ratio"].ok
    assert bars["failed_requests"].ok


@pytest.mark.parametrize("width", [80, 100])
def test_the_table_and_its_notes_fit_a_terminal(width):
    compared = report.compare(HOMING, ROUND_ROBIN, time_scale=10)
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(report.table(compared))
    notes = report.notes(compared, 10)
    console.print(notes)
    lines = console.export_text().splitlines()
    assert max(len(line) for line in lines) <= width
    assert lines[-4:] == notes.splitlines()
    assert any("delivered hit rate" in line and "64.3%" in line and "2.86x" in line for line in lines)
