"""Outcomes become numbers: which series move, by how much, under which labels."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from proxy.core.types import Candidate, Cost, Placement, Reason, Usage
from proxy.edge.ports import Outcome
from proxy.telemetry.metrics import OVERHEAD_BUCKETS, TABLE, TTFT_BUCKETS, Gauge, Metrics, hit_class

NO_COST = Cost(0.0, 0.0, 0.0, 0.0)


def placed(expected=400, worker="w1", prompt=450):
    return Placement(Candidate(worker, expected, NO_COST), None, Reason.OVERLAP, prompt, 2)


def answered(**fields):
    told = {
        "request_id": "r", "dialect": "chat", "model": "m", "is_known_model": True, "result": "ok", "status": 200,
        "placement": placed(), "hardware": "H200 SXM", "block_tokens": 32, "turn": 2, "attempts": 1,
        "usage": Usage(417, 416, 4), "ttft": 0.3, "stages": {"read": 0.001, "place": 0.0001},
    }  # fmt: skip
    return Outcome(**(told | fields))


def page(*outcomes, metrics=None):
    """What a scraper reads: (sample name, sorted labels) → value."""
    metrics = metrics or Metrics()
    for outcome in outcomes:
        metrics.observe(outcome)
    body, kind = metrics.render()
    assert kind.startswith("text/plain")
    families = text_string_to_metric_families(body.decode())
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value for family in families for sample in family.samples
    }


def test_every_row_of_the_table_is_on_the_page():
    body, _ = Metrics().render()
    families = {family.name: family for family in text_string_to_metric_families(body.decode())}
    assert {(row.name, row.kind) for row in TABLE} == {(name, family.type) for name, family in families.items()}
    assert all(families[row.name].documentation == row.help for row in TABLE)


def test_labels_are_those_of_the_table():
    metrics = Metrics()
    metrics.observe(answered())
    rows = {row.name: set(row.labels) for row in TABLE}
    for family in text_string_to_metric_families(metrics.render()[0].decode()):
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == rows[family.name]


def test_names_follow_the_habits():
    for row in TABLE:
        assert row.name.startswith("homing_")
        assert row.kind in ("counter", "histogram")
        assert not row.name.endswith("_total")  # the exposition adds it
        assert bool(row.buckets) == (row.kind == "histogram")
        assert (row.unit == "seconds") == row.name.endswith("_seconds")


@pytest.mark.parametrize("bounds", [TTFT_BUCKETS, OVERHEAD_BUCKETS])
def test_buckets_rise(bounds):
    assert list(bounds) == sorted(set(bounds))
    assert TTFT_BUCKETS[-1] == 600  # the longest first byte that is waited for


def test_an_answered_request_moves_everything():
    read = page(answered())
    assert read["homing_requests_total", "chat", "m", "ok"] == 1
    assert read["homing_prompt_tokens_total", "known", "m"] == 417
    assert read["homing_expected_hit_tokens_total", "known", "m"] == 400
    assert read["homing_delivered_hit_tokens_total", "m"] == 416
    assert read["homing_delivered_coverage_total", "known", "m"] == 1
    assert read["homing_placements_total", "overlap", "w1"] == 1
    assert read["homing_attempts_total",] == 1
    assert read["homing_ttft_seconds_count", "H200 SXM", "full", "m", "repeat"] == 1
    assert read["homing_ttft_seconds_sum", "H200 SXM", "full", "m", "repeat"] == 0.3
    assert read["homing_second_request_ttft_seconds_count", "H200 SXM", "m"] == 1
    assert read["homing_overhead_seconds_count", "read"] == read["homing_overhead_seconds_count", "place"] == 1


def test_two_requests_add_up():
    read = page(answered(), answered(usage=Usage(100, 32, 1), ttft=1.5))
    assert read["homing_prompt_tokens_total", "known", "m"] == 517
    assert read["homing_delivered_hit_tokens_total", "m"] == 448
    assert read["homing_second_request_ttft_seconds_sum", "H200 SXM", "m"] == 1.8


@pytest.mark.parametrize("usage", [Usage(), Usage(417, None, 4), Usage(None, 416, 4)])
def test_what_the_engine_did_not_report_is_unknown_and_not_zero(usage):
    read = page(answered(usage=usage))
    assert read["homing_delivered_coverage_total", "m", "unknown"] == 1
    assert read["homing_expected_hit_tokens_total", "m", "unknown"] == 400
    assert read["homing_prompt_tokens_total", "m", "unknown"] == (417 if usage.prompt_tokens else 450)
    assert [key for key in read if key[0].startswith("homing_delivered_hit") or "known" in key] == []
    assert read["homing_ttft_seconds_count", "H200 SXM", "m", "repeat", "unknown"] == 1


def test_a_reported_miss_is_a_known_zero():
    read = page(answered(usage=Usage(417, 0, 4)))
    assert read["homing_delivered_hit_tokens_total", "m"] == 0
    assert read["homing_delivered_coverage_total", "known", "m"] == 1


@pytest.mark.parametrize(("turn", "reuse", "second"), [(1, "first", 0), (2, "repeat", 1), (3, "repeat", 0)])
def test_the_second_request_is_the_second_one_alone(turn, reuse, second):
    read = page(answered(turn=turn))
    assert read["homing_ttft_seconds_count", *sorted(["H200 SXM", "full", "m", reuse])] == 1
    assert read.get(("homing_second_request_ttft_seconds_count", "H200 SXM", "m"), 0) == second


@pytest.mark.parametrize("fields", [{"ttft": None}, {"placement": None}, {"ttft": None, "placement": None}])
def test_without_content_there_is_no_time_to_it_and_no_rate(fields):
    read = page(answered(result="worker_error", **fields))
    assert read["homing_requests_total", "chat", "m", "worker_error"] == 1
    assert [key for key in read if "ttft" in key[0] or "tokens" in key[0] or "coverage" in key[0]] == []
    assert sum(value for key, value in read.items() if key[0] == "homing_placements_total") == (
        "placement" not in fields
    )


def test_clients_cannot_mint_series():
    metrics = Metrics()
    before = len(page(answered(), metrics=metrics))
    for number in range(500):
        name = f"junk-{number}\n\"'" + "x" * 1000
        metrics.observe(answered(model=name, is_known_model=False, result="client_error", placement=None, ttft=None))
    read = page(metrics=metrics)
    assert len(read) - before == 1
    assert read["homing_requests_total", "chat", "client_error", "other"] == 500


def test_a_request_without_a_model_is_other():
    read = page(answered(model=None, is_known_model=False, placement=None, ttft=None, result="client_error"))
    assert read["homing_requests_total", "chat", "client_error", "other"] == 1


def test_unknown_hardware_has_a_name():
    assert page(answered(hardware=None))["homing_ttft_seconds_count", "full", "m", "repeat", "unknown"] == 1


@pytest.mark.parametrize(
    ("ttft", "least"), [(0.0005, "0.001"), (0.001, "0.001"), (12.0, "30.0"), (45.0, "60.0"), (700.0, "+Inf")]
)
def test_a_time_falls_into_its_bucket(ttft, least):
    metrics = Metrics()
    metrics.observe(answered(ttft=ttft))
    family = next(
        f for f in text_string_to_metric_families(metrics.render()[0].decode()) if f.name == "homing_ttft_seconds"
    )
    buckets = [(s.labels["le"], s.value) for s in family.samples if s.name.endswith("_bucket")]
    assert len(buckets) == len(TTFT_BUCKETS) + 1
    assert [le for le, count in buckets if count][0] == least
    assert buckets[-1] == ("+Inf", 1)


@pytest.mark.parametrize(
    ("cached", "prompt", "block", "kind"),
    [
        (None, 417, 32, "unknown"),
        (416, None, 32, "unknown"),
        (0, 417, 32, "none"),
        (0, 20, 32, "none"),
        (416, 417, 32, "full"),
        (384, 416, 32, "full"),  # the last token is always computed
        (384, 417, 32, "partial"),
        (32, 417, 32, "partial"),
        (299, 300, None, "full"),
        (298, 300, None, "partial"),
        (4224, 5212, 1056, "full"),
    ],
)
def test_hit_classes(cached, prompt, block, kind):
    assert hit_class(Usage(prompt, cached), block) == kind


def test_gauges_are_read_when_asked_for():
    metrics, values = Metrics(), [1.0]
    metrics.watch(lambda: [Gauge("homing_inflight_requests", "In flight.", ("worker",), ((("w1",), values[0]),))])
    assert page(metrics=metrics)["homing_inflight_requests", "w1"] == 1
    values[0] = 5.0
    read = page(metrics=metrics)
    assert read["homing_inflight_requests", "w1"] == 5
    assert [value for key, value in read.items() if key[0] == "homing_build_info"] == [1]
