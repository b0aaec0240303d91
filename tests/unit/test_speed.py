"""Prefill curves against what was measured, and between cards."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.speed import DENSE_BF16_TFLOPS, SpeedCurve, curve_of

sizes = st.integers(0, 300_000)


def test_the_curve_is_the_h200s_own():
    curve = SpeedCurve()
    assert curve.seconds(0) == pytest.approx(0.13)
    assert curve.seconds(32_768) == pytest.approx(0.13 + 2.4576 + 0.3973, abs=1e-3)
    assert curve.seconds(200_000) == pytest.approx(0.13 + 15 + 14.8)


@given(sizes, sizes, sizes)
def test_more_held_is_never_slower_and_longer_never_faster(n, one, other):
    curve = SpeedCurve()
    less, more = sorted((one, other))
    assert curve.seconds(n, more) <= curve.seconds(n, less) + 1e-9
    assert curve.seconds(less, n) <= curve.seconds(more, n) + 1e-9


@given(sizes, sizes)
def test_a_part_held_and_the_part_computed_are_the_whole(n, held):
    curve, held = SpeedCurve(), min(held, n)
    assert curve.work(held) + curve.work(n, held) == pytest.approx(curve.work(n), abs=1e-9)


def test_all_held_costs_the_base_alone():
    assert SpeedCurve().seconds(5000, 5000) == SpeedCurve().seconds(5000, 9999) == 0.13
    assert SpeedCurve().work(5000, 5000) == 0


@pytest.mark.parametrize("tokens", [-1, -1000])
def test_nonsense_lengths_cost_the_base(tokens):
    assert SpeedCurve().seconds(tokens) == SpeedCurve().seconds(tokens, tokens) == 0.13


def test_cards_scale_by_their_throughput():
    h200, rtx, b200 = curve_of("H200 SXM"), curve_of("GeForce RTX 5090"), curve_of("B200")
    assert rtx.seconds(10_000) / h200.seconds(10_000) == pytest.approx(989 / 209.5)
    assert b200.seconds(10_000) < h200.seconds(10_000)


@pytest.mark.parametrize("hardware", [None, "", "Abacus 1"])
def test_unknown_hardware_gets_the_h200s_curve(hardware):
    assert curve_of(hardware) == SpeedCurve()


@pytest.mark.parametrize("name", DENSE_BF16_TFLOPS)
def test_every_card_has_a_curve_that_takes_time(name):
    assert 0 < curve_of(name).work(1000) < 60
