"""Writes down what NVML answers on this machine, as a fixture that `replay` plays back.

Run on a machine with a GPU, `nvidia-ml-py` installed: `python tests/support/nvml/record.py > my-card.json`.
One line per call; a refused call keeps NVML's error number. UUIDs are replaced, since they name one real board.
"""

import itertools
import json
import sys
from typing import Any

import pynvml

OF_DEVICE = (
    "nvmlDeviceGetName",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetCudaComputeCapability",
    "nvmlDeviceGetPowerManagementDefaultLimit",
    "nvmlDeviceGetPowerManagementLimit",
    "nvmlDeviceGetPowerManagementLimitConstraints",
    "nvmlDeviceGetBrand",
    "nvmlDeviceGetArchitecture",
    "nvmlDeviceGetCurrPcieLinkGeneration",
    "nvmlDeviceGetMaxPcieLinkWidth",
    "nvmlDeviceGetMemoryBusWidth",
    "nvmlDeviceGetEccMode",
    "nvmlDeviceGetVirtualizationMode",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetMaxMigDeviceCount",
)
LINKS = 18


def record() -> dict[str, Any]:
    calls: dict[str, Any] = {}

    def ask(name: str, *about: Any, said: tuple[str, ...] | None = None) -> Any:
        """Calls NVML, keeps the answer under its call's text, and returns it; `None` when refused."""
        key = f"{name}({', '.join(said or map(str, about))})"
        try:
            answer = getattr(pynvml, name)(*about)
        except pynvml.NVMLError as error:
            calls[key] = {"error": error.value}
            return None
        calls[key] = plain(answer)
        return answer

    def describe(handle: Any, label: str) -> None:
        calls[f"nvmlDeviceGetUUID({label})"] = fake_uuid(label)
        for name in OF_DEVICE:
            ask(name, handle, said=(label,))

    pynvml.nvmlInit()
    ask("nvmlSystemGetDriverVersion")
    ask("nvmlSystemGetNVMLVersion")
    ask("nvmlSystemGetCudaDriverVersion_v2")
    handles = {}
    for index in range(ask("nvmlDeviceGetCount") or 0):
        handle = ask("nvmlDeviceGetHandleByIndex", index)
        calls[f"nvmlDeviceGetHandleByIndex({index})"] = label = f"gpu{index}"
        handles[label] = handle
        describe(handle, label)
        for link in range(LINKS):
            ask("nvmlDeviceGetNvLinkState", handle, link, said=(label, str(link)))
        for slot in range(calls[f"nvmlDeviceGetMaxMigDeviceCount({label})"] or 0):
            mig = ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, slot, said=(label, str(slot)))
            if mig is not None:
                calls[f"nvmlDeviceGetMigDeviceHandleByIndex({label}, {slot})"] = f"{label}/mig{slot}"
                describe(mig, f"{label}/mig{slot}")
    for one, other in itertools.combinations(handles, 2):
        pair = handles[one], handles[other]
        index = pynvml.NVML_P2P_CAPS_INDEX_NVLINK
        ask("nvmlDeviceGetP2PStatus", *pair, index, said=(one, other, str(index)))
        ask("nvmlDeviceGetTopologyCommonAncestor", *pair, said=(one, other))
    return {"origin": "recorded with tests/support/nvml/record.py; UUIDs replaced", "calls": calls}


def plain(answer: Any) -> Any:
    """Turns NVML's structures into JSON; a handle becomes its own text and is replaced by the caller."""
    fields = getattr(answer, "_fields_", None)
    if fields and not hasattr(answer, "contents"):
        return {name: plain(getattr(answer, name)) for name, *_ in fields}
    if isinstance(answer, (list, tuple)):
        return [plain(part) for part in answer]
    return answer if isinstance(answer, (int, float, str, type(None))) else str(answer)


def fake_uuid(label: str) -> str:
    kind, number = ("MIG", label[-1]) if "/" in label else ("GPU", label.removeprefix("gpu"))
    return f"{kind}-0000000{label[3]}-0000-0000-0000-{number:0>12}"


if __name__ == "__main__":
    json.dump(record(), sys.stdout, indent=1)
