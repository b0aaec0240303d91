"""What NVML says about the GPUs that an engine started from here would see.

What NVML does not say is `None`; no fact is filled in from another.
`nvidia-ml-py` is never required: where it, the driver or a device is missing, there is nothing to see.
A GPU that is cut into MIG slices is listed as its slices, since CUDA can use nothing else of it.
"""

import importlib
import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

_NVLINK_CAPABILITY = 2
"""`NVML_P2P_CAPS_INDEX_NVLINK` of nvml.h."""

_P2P_OK, _P2P_UNKNOWN = 0, 6
"""`NVML_P2P_STATUS_OK` and `NVML_P2P_STATUS_UNKNOWN` of nvml.h; what lies between means: no."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU or one MIG slice; memory in bytes, `power_watts` the board's default power limit.

    `index` is the board's number in NVML, which counts along the PCI bus.
    """

    index: int
    uuid: str | None = None
    name: str | None = None
    memory_bytes: int | None = None
    compute_capability: str | None = None
    power_watts: float | None = None
    is_slice: bool = False

    @property
    def mig_profile(self) -> str | None:
        """The slice's profile, such as 1g.18gb: NVML ends a slice's name with it."""
        return ((self.name or "").partition(" MIG ")[2] or None) if self.is_slice else None


@dataclass(frozen=True, slots=True)
class Survey:
    """What one look at a machine found.

    `nvlinks` says for each pair of boards whether NVLink joins them; `doubt` in one line why the GPUs of the engine
    cannot be told among those of the machine.
    """

    gpus: tuple[Gpu, ...]
    driver_version: str | None = None
    cuda_version: str | None = None
    nvlinks: tuple[bool | None, ...] = ()
    doubt: str | None = None


class UncertainOrder(Exception):
    """`CUDA_VISIBLE_DEVICES` names GPUs in a way that only CUDA itself resolves; the message is one line."""


def survey_nvml(environment: Mapping[str, str] | None = None) -> Survey | None:
    """Asks NVML for the GPUs that `environment` (by default this process's) leaves visible to CUDA.

    Returns `None` when the library, the driver or a device is not there.
    `NVIDIA_VISIBLE_DEVICES` is not read: the container runtime has applied it, and inside the container the GPUs that
    are left are numbered anew.
    """
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # noqa: BLE001 - each way of failing to load means the same: no GPU can be seen
        return None
    try:
        return _survey(nvml, os.environ if environment is None else environment)
    finally:
        _ask(nvml, "nvmlShutdown")


def choose_visible(gpus: Sequence[Gpu], environment: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Applies `CUDA_VISIBLE_DEVICES` as CUDA does: in the order given, up to the first entry that names nothing.

    Numbers mean NVML's order only under `CUDA_DEVICE_ORDER=PCI_BUS_ID` or between equal GPUs; otherwise CUDA sorts by
    its own estimate of speed, and `UncertainOrder` is raised. A number that means a cut GPU means its first slice.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return tuple(gpus)
    is_ordered = environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({_board_name(gpu) for gpu in gpus}) == 1
    chosen: list[Gpu] = []
    for entry in map(str.strip, visible.split(",")):
        if entry.isdecimal():
            if not is_ordered:
                raise UncertainOrder(
                    f"CUDA_VISIBLE_DEVICES={visible} counts different GPUs in CUDA's own order: "
                    "set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name GPUs by UUID"
                )
            named = [gpu for gpu in gpus if gpu.index == int(entry)]
        elif entry.startswith("MIG-") and "/" in entry:
            raise UncertainOrder(f"CUDA_VISIBLE_DEVICES={visible} names a slice by its place: name it by its UUID")
        else:
            named = [gpu for gpu in gpus if entry and gpu.uuid is not None and gpu.uuid.startswith(entry)]
            named = named if len(named) == 1 else []
        if not named:
            break
        chosen.append(named[0])
    return tuple(chosen)


def _board_name(gpu: Gpu) -> str | None:
    return None if gpu.name is None else gpu.name.partition(" MIG ")[0]


def _survey(nvml: Any, environment: Mapping[str, str]) -> Survey:
    count = _ask(nvml, "nvmlDeviceGetCount") or 0
    boards = [_ask(nvml, "nvmlDeviceGetHandleByIndex", index) for index in range(count)]
    gpus = tuple(gpu for index, board in enumerate(boards) for gpu in _read_board(nvml, index, board))
    doubt = None
    try:
        gpus = choose_visible(gpus, environment)
    except UncertainOrder as uncertain:
        doubt = str(uncertain)
    used = sorted({gpu.index for gpu in gpus})
    cuda = _ask(nvml, "nvmlSystemGetCudaDriverVersion_v2")
    return Survey(
        gpus=gpus,
        driver_version=_ask(nvml, "nvmlSystemGetDriverVersion"),
        # NVML says 1000 · major + 10 · minor.
        cuda_version=None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
        nvlinks=tuple(_read_nvlink(nvml, boards[one], boards[other]) for one, other in itertools.combinations(used, 2)),
        doubt=doubt,
    )


def _read_board(nvml: Any, index: int, handle: Any) -> list[Gpu]:
    """Reads one board: itself, or its slices where MIG is on; none while MIG is on and nothing is cut."""
    if handle is None:
        return [Gpu(index)]
    board = _read_gpu(nvml, handle, Gpu(index))
    mode = _ask(nvml, "nvmlDeviceGetMigMode", handle)
    if mode is None or mode[0] == 0:
        return [board]
    slots = range(_ask(nvml, "nvmlDeviceGetMaxMigDeviceCount", handle) or 0)
    cuts = [_ask(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", handle, slot) for slot in slots]
    part = Gpu(index, compute_capability=board.compute_capability, power_watts=board.power_watts, is_slice=True)
    return [_read_gpu(nvml, cut, part) for cut in cuts if cut is not None]


def _read_gpu(nvml: Any, handle: Any, known: Gpu) -> Gpu:
    """Adds to what is known already what this handle answers; a slice has its board's capability and limit."""
    memory = _ask(nvml, "nvmlDeviceGetMemoryInfo", handle)
    capability = _ask(nvml, "nvmlDeviceGetCudaComputeCapability", handle)
    milliwatts = _ask(nvml, "nvmlDeviceGetPowerManagementDefaultLimit", handle)
    return replace(
        known,
        uuid=_ask(nvml, "nvmlDeviceGetUUID", handle),
        name=_ask(nvml, "nvmlDeviceGetName", handle),
        memory_bytes=None if memory is None else int(memory.total),
        compute_capability=known.compute_capability if capability is None else f"{capability[0]}.{capability[1]}",
        power_watts=known.power_watts if milliwatts is None else milliwatts / 1000,
    )


def _read_nvlink(nvml: Any, one: Any, other: Any) -> bool | None:
    """Asks whether peers reach each other over NVLink, through a switch or not.

    The state of a GPU's links would not do: it says nothing about the other end.
    """
    if one is None or other is None:
        return None
    status = _ask(nvml, "nvmlDeviceGetP2PStatus", one, other, _NVLINK_CAPABILITY)
    return None if status in {None, _P2P_UNKNOWN} else status == _P2P_OK


def _ask(nvml: Any, question: str, *about: Any) -> Any:
    """Returns NVML's answer, `None` when this library, driver or board does not have one."""
    try:
        return getattr(nvml, question)(*about)
    except (nvml.NVMLError, AttributeError):
        return None
