"""The hardware ledger: its rows are whole, and each is found by what NVML says of it and by nothing close to it."""

import pytest

from proxy.core.speed import DENSE_BF16_TFLOPS
from workers.agent.ledger import LEDGER, Edition, Form, Recognition, UnknownEdition, find_edition, recognise
from workers.sim.hardware import HARDWARE

MIB = 1024**2

# What the makers print: marketed GB, GB/s, compute capability.
MACHINES = {
    "H100 SXM": (80, 3350, "9.0"),
    "H100 NVL": (94, 3900, "9.0"),
    "H200 SXM": (141, 4800, "9.0"),
    "H200 NVL": (141, 4800, "9.0"),
    "B200": (180, 8000, "10.0"),
    "GB300 NVL72": (288, 8000, "10.3"),
    "RTX PRO 6000 Blackwell Server Edition": (96, 1597, "12.0"),
    "RTX PRO 6000 Blackwell Workstation Edition": (96, 1792, "12.0"),
    "RTX PRO 6000 Blackwell Max-Q Workstation Edition": (96, 1792, "12.0"),
    "GeForce RTX 5090": (32, 1792, "12.0"),
    "GeForce RTX 4090": (24, 1008, "8.9"),
    "GeForce RTX 3090": (24, 936, "8.6"),
    "RTX 6000 Ada": (48, 960, "8.9"),
    "L40S": (48, 864, "8.9"),
    "L4": (24, 300, "8.9"),
    "A100 40GB PCIe": (40, 1555, "8.0"),
    "A100 80GB PCIe": (80, 1935, "8.0"),
    "A100 40GB SXM": (40, 1555, "8.0"),
    "A100 80GB SXM": (80, 2039, "8.0"),
}

rows = pytest.mark.parametrize("edition", LEDGER, ids=lambda edition: edition.name)


def ask(edition: Edition, **changed) -> Recognition:
    said = {
        "gpu_name": edition.gpu_name,
        "memory_bytes": edition.memory_bytes,
        "compute_capability": edition.compute_capability,
        "power_watts": float(edition.power_watts[1]),
    }
    return recognise(**said | changed)


def test_holds_every_machine_with_the_makers_figures() -> None:
    assert {e.name: (e.memory_gb, e.bandwidth_gb_s, e.compute_capability) for e in LEDGER} == MACHINES


def test_the_other_tables_use_its_names() -> None:
    names = {edition.name for edition in LEDGER}
    assert names == DENSE_BF16_TFLOPS.keys()
    assert names >= {row.name for row in HARDWARE}


@rows
def test_every_row_is_whole_and_plausible(edition: Edition) -> None:
    assert edition.source.startswith("NVIDIA ")
    assert edition.form in Form
    low, high = edition.power_watts
    assert 0 < low <= high
    assert edition.memory_tolerance in {0.02, 0.07}
    # NVML shows a little less than the marketed size; GB are GiB on these boards, but for a few decimal ones.
    assert 0.93 <= edition.memory_mib / 1024 / edition.memory_gb <= 1.03


@rows
def test_formats_follow_the_generation(edition: Edition) -> None:
    generation = tuple(map(int, edition.compute_capability.split(".")))
    assert (edition.fp8, edition.fp4) == (generation >= (8, 9), generation >= (10, 0))


@rows
def test_recognises_a_row_by_its_own_figures(edition: Edition) -> None:
    assert ask(edition) == Recognition(edition)
    assert ask(edition, gpu_name=edition.product) == Recognition(edition)
    assert ask(edition, power_watts=float(edition.power_watts[0])) == Recognition(edition)


@rows
@pytest.mark.parametrize(
    ("fact", "shift", "reason"),
    [
        ("memory_bytes", lambda bytes_: bytes_ * 5 // 4, "its memory is"),
        ("memory_bytes", lambda bytes_: bytes_ * 9 // 10, "its memory is"),
        ("memory_bytes", lambda _: None, "its memory is not reported"),
        ("compute_capability", lambda _: "7.5", "its compute capability is 7.5, not"),
        ("compute_capability", lambda _: None, "its compute capability is not reported"),
        ("power_watts", lambda watts: watts * 1.2, "its power limit is"),
        ("power_watts", lambda _: 60.0, "its power limit is 60 W, not"),
    ],
)
def test_one_fact_that_does_not_fit_leaves_the_edition_unknown(edition: Edition, fact, shift, reason) -> None:
    given = {"memory_bytes": edition.memory_bytes, "power_watts": float(edition.power_watts[1])}
    found = ask(edition, **{fact: shift(given.get(fact))})
    assert found.edition is None
    assert found.note.startswith(f"unknown edition: {edition.gpu_name} cannot be taken for {edition.name}, since ")
    assert reason in found.note


@rows
def test_no_power_limit_leaves_only_a_family_name_open(edition: Edition) -> None:
    assert (ask(edition, power_watts=None).edition is None) == (edition.name == "H200 SXM")


def test_a_family_name_without_its_limit_says_which_one_is_missing() -> None:
    assert ask(find_edition("H200 SXM"), power_watts=None).note == (
        "unknown edition: NVIDIA H200 cannot be taken for H200 SXM, "
        "since its power limit, which should be 700 W, is not reported"
    )


@pytest.mark.parametrize(
    "gpu_name",
    [
        "NVIDIA H100 PCIe",
        "NVIDIA GeForce RTX 5090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA L40",
        "NVIDIA GB10",
        "NVIDIA H200 MIG 1g.18gb",
    ],
)
def test_a_name_that_only_resembles_a_row_is_an_unknown_card(gpu_name: str) -> None:
    edition = find_edition("H200 SXM")
    assert ask(edition, gpu_name=gpu_name).note == f"unknown card: {gpu_name} is not in the hardware ledger"


def test_a_board_without_a_name_is_an_unknown_card() -> None:
    assert ask(find_edition("L4"), gpu_name=None) == Recognition(None, "unknown card: NVML does not say its name")


def test_two_rows_that_fit_are_no_name(monkeypatch) -> None:
    sxm = find_edition("H200 SXM")
    twin = Edition(**{field: getattr(sxm, field) for field in Edition.__slots__} | {"name": "H200 Twin"})
    monkeypatch.setattr("workers.agent.ledger.LEDGER", (sxm, twin))
    assert ask(sxm) == Recognition(None, "unknown edition: NVIDIA H200 fits H200 SXM and H200 Twin")


@pytest.mark.parametrize(
    ("name", "mib"),
    [
        ("L4", 24_564),  # ECC off
        ("L40S", 49_140),
        ("RTX 6000 Ada", 46_068),  # ECC on
        ("GeForce RTX 4090", 23_028),
        ("A100 40GB SXM", 40_536),  # drivers of 2020
        ("GeForce RTX 3090", 24_268),
    ],
)
def test_knows_the_totals_that_ecc_and_older_drivers_show(name: str, mib: int) -> None:
    assert ask(find_edition(name), memory_bytes=mib * MIB).edition.name == name


def test_a_desk_side_gb300_is_not_the_rack() -> None:
    assert ask(find_edition("GB300 NVL72"), memory_bytes=252 * 10**9).edition is None


@pytest.mark.parametrize("said", ["h200  nvl", "H200 NVL", " H200 nvl "])
def test_finds_a_row_by_name_whatever_its_case(said: str) -> None:
    assert find_edition(said).name == "H200 NVL"


def test_a_name_that_is_not_there_is_answered_with_those_that_are() -> None:
    with pytest.raises(UnknownEdition, match=r"hardware 'H300' is not in the ledger; use one of: H100 SXM, .*, L4, "):
        find_edition("H300")
