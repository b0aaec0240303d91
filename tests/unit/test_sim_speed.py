"""The speed model against the figures it was fitted to."""

import pytest

from workers.sim.hardware import HARDWARE, UnknownHardware, find_hardware
from workers.sim.speed import Speed

H200 = Speed(find_hardware("H200 SXM"))


def first_token(speed: Speed, tokens: int, cached: int = 0) -> float:
    return speed.base_seconds + speed.recall_seconds(cached) + speed.prefill_seconds(cached, tokens - cached)


@pytest.mark.parametrize(
    ("tokens", "low", "high"),
    [
        (1_024, 0.198, 0.223),
        (8_192, 0.716, 0.723),
        (32_768, 3.118, 3.148),
        (65_536, 6.903, 6.910),
        (131_072, 16.406, 16.416),
        (204_800, 30.369, 30.416),
    ],
)
def test_cold_first_token_is_within_8_per_cent_of_the_measured_range(tokens: int, low: float, high: float) -> None:
    assert low * 0.92 <= first_token(H200, tokens) <= high * 1.08


@pytest.mark.parametrize(
    ("tokens", "cached", "low", "high"),
    [
        (8_192, 7_840, 0.153, 0.158),
        (32_768, 32_144, 0.196, 0.211),
        (65_536, 65_072, 0.189, 0.207),
        (131_072, 130_928, 0.212, 0.242),
        (204_800, 204_624, 0.332, 0.356),
    ],
)
def test_second_send_is_within_5_per_cent_of_the_measured_range(
    tokens: int, cached: int, low: float, high: float
) -> None:
    assert low * 0.95 <= first_token(H200, tokens, cached) <= high * 1.05


def test_a_short_second_send_is_too_slow_by_at_most_a_fifth() -> None:
    assert first_token(H200, 1_024, 784) <= 0.129 * 1.2


@pytest.mark.parametrize(("batch", "seconds"), [(1, 0.0150), (8, 0.0161), (32, 0.0191), (64, 0.0252), (128, 0.0397)])
def test_decode_anchors_are_met(batch: int, seconds: float) -> None:
    assert H200.decode_seconds(batch) == pytest.approx(seconds)


def test_decode_grows_between_and_beyond_the_anchors() -> None:
    curve = [H200.decode_seconds(batch) for batch in range(257)]
    assert curve[0] == 0.0
    assert curve == sorted(curve)
    assert H200.decode_seconds(256) > 2 * H200.decode_seconds(64)


def test_chunks_add_up_to_the_whole_prompt() -> None:
    chunks = sum(H200.prefill_seconds(start, 8_192) for start in range(0, 65_536, 8_192))
    assert chunks == pytest.approx(H200.prefill_seconds(0, 65_536))


def test_machines_differ_by_throughput_and_bandwidth() -> None:
    b200, rtx = Speed(find_hardware("B200")), Speed(find_hardware("RTX 5090"))
    assert b200.prefill_seconds(0, 8_192) < H200.prefill_seconds(0, 8_192) < rtx.prefill_seconds(0, 8_192)
    assert rtx.decode_seconds(1) == pytest.approx(0.0150 * 4_800 / 1_792)


def test_the_measured_capacity_is_exact_and_the_others_follow_memory() -> None:
    capacities = {row.name: row.capacity_tokens for row in HARDWARE}
    assert capacities["H200 SXM"] == capacities["H200 NVL"] == 1_209_244
    assert capacities["H100 SXM"] < capacities["H100 NVL"] < capacities["RTX PRO 6000 Blackwell Server Edition"]
    assert min(capacities, key=capacities.__getitem__) == "GeForce RTX 5090"
    assert 100_000 < capacities["GeForce RTX 5090"] < 262_144


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("H200", "H200 SXM"),
        ("h100 sxm", "H100 SXM"),
        ("RTX PRO 6000 Workstation", "RTX PRO 6000 Blackwell Workstation Edition"),
        ("RTX PRO 6000  Server", "RTX PRO 6000 Blackwell Server Edition"),
        ("RTX 5090", "GeForce RTX 5090"),
        ("GB300", "GB300 NVL72"),
    ],
)
def test_names_and_aliases(said: str, name: str) -> None:
    assert find_hardware(said).name == name


def test_an_unknown_identity_is_answered_with_the_known_ones() -> None:
    with pytest.raises(UnknownHardware, match=r"'H300'.*H100 SXM, H100 NVL, H200 SXM.*GeForce RTX 5090$"):
        find_hardware("H300")
