"""Which machine a survey names: NVML as fixtures recorded it, played back in place of the library."""

import json
import re
import sys

import pytest
from typer.testing import CliRunner

from tests.support.nvml.replay import FOLDER, RecordedNvml, read_fixture, replay
from workers.agent.identity import Identity, identify, read_host_os
from workers.agent.ledger import LEDGER
from workers.agent.survey import Gpu, UncertainOrder, choose_visible, survey_nvml
from workers.cli import app

MIB = 1024**2

EDITIONS = {re.sub(r"[ ]", "-", edition.name.lower()): edition for edition in LEDGER}

MACHINES = {
    "eight-h200-nvlink": {"name": "H200 SXM", "gpu_count": 8, "topology": "NVLink"},
    "two-rtx-4090-pcie": {"name": "GeForce RTX 4090", "gpu_count": 2, "topology": "PCIe"},
    "four-h200-nvl-bridged-pairs": {"name": "H200 NVL", "gpu_count": 4, "topology": "NVLink and PCIe"},
    "two-h200-links-not-reported": {"name": "H200 SXM", "gpu_count": 2, "topology": None},
    "mixed-rtx-5090-and-3090": {
        "name": None,
        "edition_note": "different GPUs: GeForce RTX 3090 | GeForce RTX 5090",
        "gpu_name": None,
        "gpu_count": 2,
        "memory_bytes": None,
        "compute_capability": None,
        "topology": "PCIe",
    },
    "h200-mig": {
        "name": None,
        "edition_note": "MIG slice, not a whole card: NVIDIA H200 MIG 1g.18gb, NVIDIA H200 MIG 3g.71gb",
        "gpu_name": None,
        "gpu_count": 2,
        "memory_bytes": None,
        "mig_profile": None,
        "compute_capability": "9.0",
        "topology": None,
    },
    "h200-mig-one-slice": {
        "name": None,
        "edition_note": "MIG slice, not a whole card: NVIDIA H200 MIG 1g.18gb",
        "gpu_name": "NVIDIA H200 MIG 1g.18gb",
        "gpu_count": 1,
        "memory_bytes": 16_384 * MIB,
        "mig_profile": "1g.18gb",
        "compute_capability": "9.0",
        "topology": None,
    },
    "h200-mig-uncut": {"name": None, "gpu_count": None, "source": "none"},
    "unknown-card": {
        "name": None,
        "edition_note": "unknown card: NVIDIA GB10 is not in the hardware ledger",
        "gpu_name": "NVIDIA GB10",
        "memory_bytes": None,
        "compute_capability": "12.1",
    },
    "h100-sxm-strange-memory": {
        "name": None,
        "edition_note": "unknown edition: NVIDIA H100 80GB HBM3 cannot be taken for H100 SXM, "
        "since its memory is 65536 MiB, not 81559",
        "memory_bytes": 65_536 * MIB,
    },
    "h200-sxm-name-nvl-limit": {
        "name": None,
        "edition_note": "unknown edition: NVIDIA H200 cannot be taken for H200 SXM, "
        "since its power limit is 600 W, not 700",
    },
    "h200-without-power-limit": {
        "name": None,
        "edition_note": "unknown edition: NVIDIA H200 cannot be taken for H200 SXM, "
        "since its power limit, which should be 700 W, is not reported",
    },
    "l4-without-ecc-and-power-limit": {"name": "L4", "memory_bytes": 24_564 * MIB},
    "a100-40gb-sxm-old-driver": {"name": "A100 40GB SXM", "driver_version": "450.80.02", "cuda_version": "11.0"},
    "one-of-two-lost": {
        "name": None,
        "edition_note": "different GPUs: GeForce RTX 4090 | unknown card: NVML does not say its name",
        "gpu_count": 2,
        "memory_bytes": None,
        "topology": None,
    },
    "nothing-but-a-driver": {"name": None, "gpu_count": None, "source": "none"},
}


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch) -> None:
    for variable in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def play(monkeypatch):
    """Puts a fixture in the library's place."""

    def put(fixture: str) -> RecordedNvml:
        nvml = replay(fixture)
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        return nvml

    return put


def test_every_edition_and_every_case_has_its_fixture_and_no_fixture_is_idle() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == EDITIONS.keys() | MACHINES.keys()


@pytest.mark.parametrize("fixture", EDITIONS)
def test_names_each_machine_of_the_ledger(fixture, play) -> None:
    edition = EDITIONS[fixture]
    nvml = play(fixture)
    assert identify().body() == {
        "name": edition.name,
        "edition_note": None,
        "gpu_name": edition.gpu_name,
        "gpu_count": 1,
        "memory_bytes": edition.memory_mib * MIB,
        "mig_profile": None,
        "compute_capability": edition.compute_capability,
        "driver_version": "580.159.04",
        "cuda_version": "13.0",
        "topology": None,
        "tensor_parallel_size": None,
        "host_os": read_host_os(),
        "source": "nvml",
    }
    assert not nvml.is_open


@pytest.mark.parametrize("fixture", MACHINES)
def test_says_what_is_known_of_a_machine_and_no_more(fixture, play) -> None:
    play(fixture)
    body = identify().body()
    assert {key: body[key] for key in MACHINES[fixture]} == MACHINES[fixture]


@pytest.mark.parametrize("fixture", sorted({*EDITIONS, *MACHINES}))
def test_a_name_or_a_note_stands_where_a_gpu_was_seen(fixture, play) -> None:
    play(fixture)
    identity = identify()
    assert (identity.name is None) != (identity.edition_note is None) or identity == Identity(host_os=read_host_os())


@pytest.mark.parametrize("fixture", ["h200-sxm", "four-h200-nvl-bridged-pairs", "h200-mig"])
def test_each_single_call_may_be_refused(fixture, monkeypatch) -> None:
    calls = read_fixture(fixture)["calls"]
    for refused in calls:
        nvml = RecordedNvml(calls | {refused: {"error": 3}})
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        assert identify().name in {None, "H200 SXM", "H200 NVL"}
        assert not nvml.is_open


@pytest.mark.parametrize(
    ("question", "field"),
    [
        ("nvmlSystemGetDriverVersion()", "driver_version"),
        ("nvmlSystemGetCudaDriverVersion_v2()", "cuda_version"),
    ],
)
def test_what_the_driver_does_not_say_is_unknown_and_nothing_else_suffers(question, field, monkeypatch) -> None:
    calls = read_fixture("h200-sxm")["calls"]
    monkeypatch.setitem(sys.modules, "pynvml", RecordedNvml(calls | {question: {"error": 3}}))
    body = identify().body()
    assert body["name"] == "H200 SXM"
    assert {key for key, value in body.items() if value is None} - {
        "edition_note",
        "mig_profile",
        "topology",
        "tensor_parallel_size",
    } == {field}


def test_a_library_without_a_call_is_like_one_that_refuses_it(monkeypatch) -> None:
    class Old(RecordedNvml):
        def __getattr__(self, name):
            if name in {"nvmlDeviceGetP2PStatus", "nvmlDeviceGetMigMode"}:
                raise AttributeError(name)
            return super().__getattr__(name)

    monkeypatch.setitem(sys.modules, "pynvml", Old(read_fixture("eight-h200-nvlink")["calls"]))
    identity = identify()
    assert (identity.name, identity.gpu_count, identity.topology) == ("H200 SXM", 8, None)


def test_finds_no_gpu_where_nvml_cannot_be_imported(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert survey_nvml() is None
    assert identify() == Identity(host_os=read_host_os(), source="none")


def test_finds_no_gpu_where_the_driver_is_missing(monkeypatch) -> None:
    class Driverless(RecordedNvml):
        def nvmlInit(self) -> None:
            raise self.NVMLError(12)

    monkeypatch.setitem(sys.modules, "pynvml", Driverless({}))
    assert identify() == Identity(host_os=read_host_os(), source="none")


MIXED = "mixed-rtx-5090-and-3090"
BY_BUS = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
UUID = "GPU-00000001-0000-0000-0000-000000000001"
SLICE = "MIG-00000000-0000-0000-0000-000000000000"


@pytest.mark.parametrize(
    ("fixture", "visible", "order", "name", "count", "topology"),
    [
        ("eight-h200-nvlink", "2,5", {}, "H200 SXM", 2, "NVLink"),
        ("eight-h200-nvlink", "7", {}, "H200 SXM", 1, None),
        ("eight-h200-nvlink", " 0 , 1,9,2", {}, "H200 SXM", 2, "NVLink"),
        ("four-h200-nvl-bridged-pairs", "0,1", {}, "H200 NVL", 2, "NVLink"),
        ("four-h200-nvl-bridged-pairs", "3,0", {}, "H200 NVL", 2, "PCIe"),
        (MIXED, "1", BY_BUS, "GeForce RTX 5090", 1, None),
        (MIXED, UUID, {}, "GeForce RTX 5090", 1, None),
        (MIXED, UUID[:12], {}, "GeForce RTX 5090", 1, None),
        (MIXED, "GPU-0000000", {}, None, None, None),
        ("eight-h200-nvlink", "", {}, None, None, None),
        ("eight-h200-nvlink", "-1", {}, None, None, None),
        ("eight-h200-nvlink", "NoDevFiles", {}, None, None, None),
    ],
)
def test_counts_only_what_cuda_may_see(fixture, visible, order, name, count, topology, play, monkeypatch) -> None:
    play(fixture)
    for variable, value in ({"CUDA_VISIBLE_DEVICES": visible} | order).items():
        monkeypatch.setenv(variable, value)
    identity = identify()
    assert (identity.name, identity.gpu_count, identity.topology) == (name, count, topology)
    assert identity.source == ("none" if count is None else "nvml")


@pytest.mark.parametrize(("visible", "profile"), [(SLICE, "3g.71gb"), ("0", "3g.71gb")])
def test_a_chosen_slice_is_known_by_its_own_memory_and_profile(visible, profile, play, monkeypatch) -> None:
    play("h200-mig")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    identity = identify()
    assert (identity.name, identity.gpu_count, identity.mig_profile) == (None, 1, profile)
    assert identity.memory_bytes == 71_424 * MIB


def test_numbers_among_different_gpus_are_not_guessed_at(play, monkeypatch) -> None:
    play(MIXED)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    identity = identify()
    assert (identity.name, identity.gpu_count, identity.driver_version) == (None, None, "580.159.04")
    assert identity.edition_note == (
        "unknown edition: CUDA_VISIBLE_DEVICES=0 counts different GPUs in CUDA's own order: "
        "set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name GPUs by UUID"
    )


def test_a_slice_named_by_its_place_is_not_guessed_at() -> None:
    with pytest.raises(UncertainOrder, match="name it by its UUID"):
        choose_visible([Gpu(0)], {"CUDA_VISIBLE_DEVICES": "MIG-GPU-00000000/1/0"})


def test_the_container_runtimes_variable_is_not_applied_twice(play, monkeypatch) -> None:
    play("two-rtx-4090-pcie")
    monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", "6,7")
    assert identify().gpu_count == 2


def test_identify_prints_lines_for_people(play) -> None:
    play("h200-sxm")
    printed = CliRunner().invoke(app, ["identify"]).stdout
    facts = dict(re.split(r" {2,}", line, maxsplit=1) for line in printed.splitlines())
    assert facts == {
        "edition": "H200 SXM",
        "GPU": "NVIDIA H200",
        "count": "1",
        "memory": "140.4 GiB each",
        "MIG profile": "not a slice",
        "capability": "9.0",
        "from ledger": "SXM, 4,800 GB/s, FP8",
        "driver": "580.159.04",
        "CUDA": "13.0",
        "topology": "one GPU",
        "host OS": read_host_os(),
    }


def test_identify_says_unknown_with_its_reason(play) -> None:
    play("unknown-card")
    lines = CliRunner().invoke(app, ["identify"]).stdout.splitlines()
    assert lines[0].split(maxsplit=1) == ["edition", "unknown card: NVIDIA GB10 is not in the hardware ledger"]
    assert ["memory", "unknown"] in [line.split() for line in lines]


def test_identify_prints_the_registrations_object_as_json(play) -> None:
    play("eight-h200-nvlink")
    assert json.loads(CliRunner().invoke(app, ["identify", "--json"]).stdout) == identify().body()


def test_identify_says_so_where_there_is_no_gpu(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    result = CliRunner().invoke(app, ["identify"])
    assert result.stdout.startswith("no GPU found: ")
    assert json.loads(CliRunner().invoke(app, ["identify", "--json"]).stdout)["source"] == "none"
