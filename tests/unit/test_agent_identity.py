"""Which machine a survey names: recorded answers of NVML, fed in place of the library."""

import sys
from types import SimpleNamespace

import pytest

from workers.agent.identity import Gpu, Survey, identify, survey_nvml

MIB = 1024**2

RECORDED = [
    ("NVIDIA H200", 143771, "9.0", 700.0, "H200 SXM"),
    ("NVIDIA H200 NVL", 143771, "9.0", 600.0, "H200 NVL"),
    ("NVIDIA H100 80GB HBM3", 81559, "9.0", 700.0, "H100 SXM"),
    ("NVIDIA H100 NVL", 95830, "9.0", 400.0, "H100 NVL"),
    ("NVIDIA B200", 183359, "10.0", 1000.0, "B200"),
    ("NVIDIA GB300", 284208, "10.3", 1400.0, "GB300 NVL72"),
    (
        "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        97887,
        "12.0",
        600.0,
        "RTX PRO 6000 Blackwell Server Edition",
    ),
    (
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
        97887,
        "12.0",
        600.0,
        "RTX PRO 6000 Blackwell Workstation Edition",
    ),
    ("NVIDIA GeForce RTX 5090", 32607, "12.0", 575.0, "GeForce RTX 5090"),
]

NOT_TOLD_APART = [
    ("NVIDIA H200", 143771, "9.0", 600.0),  # the SXM name with the NVL card's limit
    ("NVIDIA H200", 143771, "9.0", None),
    ("NVIDIA H200", None, "9.0", 700.0),
    ("NVIDIA H200", 143771, None, 700.0),
    (None, 143771, "9.0", 700.0),
    ("NVIDIA B200", 183359, "9.0", 1000.0),
    ("NVIDIA H100 PCIe", 81559, "9.0", 350.0),
    ("NVIDIA H100 80GB HBM3", 40000, "9.0", 700.0),
    ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 97887, "12.0", 300.0),
    ("NVIDIA GeForce RTX 5090 D", 32607, "12.0", 575.0),
    ("NVIDIA GeForce RTX 4090", 24564, "8.9", 450.0),
]


def survey(*gpus: tuple[str | None, int | None, str | None, float | None]) -> Survey:
    return Survey(
        gpus=tuple(Gpu(n, m if m is None else m * MIB, c, p) for n, m, c, p in gpus),
        driver_version="580.159.04",
        cuda_version="13.0",
    )


@pytest.mark.parametrize(("gpu_name", "mib", "capability", "watts", "edition"), RECORDED)
def test_names_each_machine_of_the_ledger(gpu_name, mib, capability, watts, edition) -> None:
    identity = identify(lambda: survey((gpu_name, mib, capability, watts)))
    assert identity.name == edition
    body = identity.body()
    assert body.pop("host_os") == identity.host_os
    assert body == {
        "name": edition,
        "gpu_name": gpu_name,
        "gpu_count": 1,
        "memory_bytes": mib * MIB,
        "compute_capability": capability,
        "driver_version": "580.159.04",
        "cuda_version": "13.0",
        "topology": None,
        "source": "nvml",
    }


@pytest.mark.parametrize(("gpu_name", "mib", "capability", "watts"), NOT_TOLD_APART)
def test_leaves_the_edition_open_where_it_cannot_be_told(gpu_name, mib, capability, watts) -> None:
    identity = identify(lambda: survey((gpu_name, mib, capability, watts)))
    assert (identity.name, identity.gpu_name, identity.source) == (None, gpu_name, "nvml")


def test_counts_equal_gpus_and_keeps_the_size_of_one() -> None:
    identity = identify(lambda: survey(*[("NVIDIA H200", 143771, "9.0", 700.0)] * 8))
    assert (identity.name, identity.gpu_count, identity.memory_bytes) == ("H200 SXM", 8, 143771 * MIB)


def test_records_what_differs_between_gpus_as_unknown() -> None:
    mixed = survey(("NVIDIA H200 NVL", 143771, "9.0", 600.0), ("NVIDIA H100 NVL", 95830, "9.0", 400.0))
    identity = identify(lambda: mixed)
    assert (identity.name, identity.gpu_name, identity.memory_bytes) == (None, None, None)
    assert (identity.compute_capability, identity.gpu_count) == ("9.0", 2)


@pytest.mark.parametrize("found", [None, Survey(gpus=(), driver_version="580.1", cuda_version="13.0")])
def test_says_none_where_no_gpu_was_found(found) -> None:
    body = identify(lambda: found).body()
    known = {key: value for key, value in body.items() if value is not None}
    assert known.keys() == {"source", "host_os"}
    assert known["source"] == "none"


def test_reads_nvml_and_survives_what_a_board_does_not_answer(monkeypatch) -> None:
    class NVMLError(Exception):
        pass

    def unsupported(*_: object) -> None:
        raise NVMLError

    closed: list[bool] = []
    nvml = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: closed.append(True),
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: f"gpu{index}",
        nvmlDeviceGetName=lambda handle: "NVIDIA GB10",
        nvmlDeviceGetMemoryInfo=unsupported,
        nvmlDeviceGetCudaComputeCapability=lambda handle: (12, 1),
        nvmlDeviceGetPowerManagementDefaultLimit=unsupported,
        nvmlSystemGetDriverVersion=lambda: "580.95",
        nvmlSystemGetCudaDriverVersion_v2=lambda: 12080,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert survey_nvml() == Survey(
        gpus=(Gpu("NVIDIA GB10", None, "12.1", None),), driver_version="580.95", cuda_version="12.8"
    )
    assert closed == [True]


def test_finds_no_gpu_where_nvml_cannot_be_imported(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert survey_nvml() is None
    assert identify().source == "none"
