"""Which hardware this machine has, as NVML tells it.

What NVML does not say is `None`; no fact is filled in from another.
Where NVML cannot be loaded, the identity says `source="none"`: looked, and found no GPU.
The survey is of the machine, so the agent has to run beside the engine it registers.
"""

import importlib
import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from workers.agent.agreement import agree
from workers.agent.ledger import name_edition


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU; memory in bytes, `power_watts` the board's default power limit."""

    name: str | None
    memory_bytes: int | None
    compute_capability: str | None
    power_watts: float | None


@dataclass(frozen=True, slots=True)
class Survey:
    """What one look at a machine found."""

    gpus: tuple[Gpu, ...]
    driver_version: str | None
    cuda_version: str | None


@dataclass(frozen=True, slots=True)
class Identity:
    """A machine's hardware; memory and power are of one GPU, and `None` where its GPUs differ."""

    source: str
    host_os: str
    gpu_count: int | None = None
    name: str | None = None
    gpu_name: str | None = None
    memory_bytes: int | None = None
    compute_capability: str | None = None
    power_watts: float | None = None
    driver_version: str | None = None
    cuda_version: str | None = None

    def body(self) -> dict[str, object]:
        """Returns the `identity` object of `POST /workers`; the power limit serves only to name it."""
        return {
            "name": self.name,
            "gpu_name": self.gpu_name,
            "gpu_count": self.gpu_count,
            "memory_bytes": self.memory_bytes,
            "compute_capability": self.compute_capability,
            "driver_version": self.driver_version,
            "cuda_version": self.cuda_version,
            "topology": None,
            "host_os": self.host_os,
            "source": self.source,
        }


def identify(probe: Callable[[], Survey | None] | None = None) -> Identity:
    """Names this machine from what `probe` finds; by default NVML is asked."""
    survey = (probe or survey_nvml)()
    host_os = f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}"
    if survey is None or not survey.gpus:
        return Identity(source="none", host_os=host_os)
    gpu_name = agree(gpu.name for gpu in survey.gpus)
    memory_bytes = agree(gpu.memory_bytes for gpu in survey.gpus)
    capability = agree(gpu.compute_capability for gpu in survey.gpus)
    power_watts = agree(gpu.power_watts for gpu in survey.gpus)
    return Identity(
        source="nvml",
        host_os=host_os,
        gpu_count=len(survey.gpus),
        name=name_edition(gpu_name, memory_bytes, capability, power_watts),
        gpu_name=gpu_name,
        memory_bytes=memory_bytes,
        compute_capability=capability,
        power_watts=power_watts,
        driver_version=survey.driver_version,
        cuda_version=survey.cuda_version,
    )


def survey_nvml() -> Survey | None:
    """Asks NVML for every GPU; `None` when the library, the driver or a device is not there."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # noqa: BLE001 - each way of failing to load means the same: no GPU can be seen
        return None
    try:
        count = _ask(nvml, nvml.nvmlDeviceGetCount) or 0
        handles = [_ask(nvml, nvml.nvmlDeviceGetHandleByIndex, index) for index in range(count)]
        return Survey(
            gpus=tuple(_read_gpu(nvml, handle) for handle in handles),
            driver_version=_ask(nvml, nvml.nvmlSystemGetDriverVersion),
            cuda_version=_read_cuda(_ask(nvml, nvml.nvmlSystemGetCudaDriverVersion_v2)),
        )
    finally:
        _ask(nvml, nvml.nvmlShutdown)


def _read_gpu(nvml: Any, handle: Any) -> Gpu:
    if handle is None:
        return Gpu(name=None, memory_bytes=None, compute_capability=None, power_watts=None)
    memory = _ask(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    capability = _ask(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle)
    milliwatts = _ask(nvml, nvml.nvmlDeviceGetPowerManagementDefaultLimit, handle)
    return Gpu(
        name=_ask(nvml, nvml.nvmlDeviceGetName, handle),
        memory_bytes=None if memory is None else int(memory.total),
        compute_capability=None if capability is None else f"{capability[0]}.{capability[1]}",
        power_watts=None if milliwatts is None else milliwatts / 1000,
    )


def _read_cuda(version: int | None) -> str | None:
    """Renders NVML's 1000 · major + 10 · minor."""
    return None if version is None else f"{version // 1000}.{version % 1000 // 10}"


def _ask(nvml: Any, question: Callable[..., Any], *about: Any) -> Any:
    """Returns NVML's answer, `None` when this driver or board does not have one."""
    try:
        return question(*about)
    except nvml.NVMLError:
        return None
