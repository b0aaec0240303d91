"""Which hardware this machine has: the survey's facts, put together and named by the ledger.

Where no GPU can be seen, the identity says `source="none"`: looked, and found none.
The survey is of this machine and this process's environment, so the agent has to run beside the engine it registers.
"""

import json
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from workers.agent.agreement import agree
from workers.agent.ledger import Recognition, UnknownEdition, find_edition, recognise
from workers.agent.survey import Gpu, Survey, survey_nvml

_GIB = 1024**3


@dataclass(frozen=True, slots=True)
class Identity:
    """A machine's hardware, as the `identity` object of `POST /workers` carries it; `None` is unknown.

    Facts of one GPU are `None` where the GPUs differ. `edition_note` says why `name` is `None`.
    `tensor_parallel_size` is the engine's, for whoever knows its arguments to fill in; NVML does not tell it.
    """

    name: str | None = None
    edition_note: str | None = None
    gpu_name: str | None = None
    gpu_count: int | None = None
    memory_bytes: int | None = None
    mig_profile: str | None = None
    compute_capability: str | None = None
    driver_version: str | None = None
    cuda_version: str | None = None
    topology: str | None = None
    tensor_parallel_size: int | None = None
    host_os: str | None = None
    source: str = "none"

    def body(self) -> dict[str, object]:
        """Returns the `identity` object of `POST /workers`."""
        return asdict(self)


def identify(probe: Callable[[], Survey | None] | None = None) -> Identity:
    """Names this machine from what `probe` finds; by default NVML is asked."""
    survey = (probe or survey_nvml)()
    host_os = read_host_os()
    if survey is None or not survey.gpus:
        return Identity(host_os=host_os)
    gpus = survey.gpus
    named = _name_gpus(gpus) if survey.doubt is None else Recognition(None, f"unknown edition: {survey.doubt}")
    return Identity(
        source="nvml",
        host_os=host_os,
        name=None if named.edition is None else named.edition.name,
        edition_note=named.note,
        gpu_name=agree(gpu.name for gpu in gpus),
        gpu_count=len(gpus) if survey.doubt is None else None,
        memory_bytes=agree(gpu.memory_bytes for gpu in gpus),
        mig_profile=agree(gpu.mig_profile for gpu in gpus),
        compute_capability=agree(gpu.compute_capability for gpu in gpus),
        driver_version=survey.driver_version,
        cuda_version=survey.cuda_version,
        topology=_name_topology(survey.nvlinks),
    )


def read_host_os() -> str:
    """Names the operating system and its release, to the minor number."""
    return f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}"


def run(*, as_json: bool) -> int:
    """Prints this machine's identity, for people or as JSON; returns exit code 0, also where no GPU is found."""
    identity = identify()
    sys.stdout.write((json.dumps(identity.body(), indent=2) if as_json else describe(identity)) + "\n")
    return 0


def describe(identity: Identity) -> str:
    """Renders an identity as one line for each fact."""
    if identity.source == "none":
        return f"no GPU found: NVML cannot be loaded or shows none to this process\nhost OS      {identity.host_os}"
    memory = None if identity.memory_bytes is None else f"{identity.memory_bytes / _GIB:.1f} GiB each"
    rows = {
        "edition": identity.name or identity.edition_note,
        "GPU": identity.gpu_name,
        "count": identity.gpu_count,
        "memory": memory,
        "MIG profile": identity.mig_profile or "not a slice",
        "capability": identity.compute_capability,
        "from ledger": _describe_edition(identity.name),
        "driver": identity.driver_version,
        "CUDA": identity.cuda_version,
        "topology": identity.topology or ("one GPU" if identity.gpu_count == 1 else None),
        "host OS": identity.host_os,
    }
    return "\n".join(f"{label:<13}{'unknown' if fact is None else fact}" for label, fact in rows.items())


def _name_gpus(gpus: Sequence[Gpu]) -> Recognition:
    """Names what all GPUs are; a slice is never named as the card that it is cut from."""
    if any(gpu.is_slice for gpu in gpus):
        slices = ", ".join(sorted({gpu.name or "of an unknown card" for gpu in gpus}))
        return Recognition(None, f"MIG slice, not a whole card: {slices}")
    found = {recognise(gpu.name, gpu.memory_bytes, gpu.compute_capability, gpu.power_watts) for gpu in gpus}
    if len(found) == 1:
        return found.pop()
    kinds = sorted({each.edition.name if each.edition else each.note or "" for each in found})
    return Recognition(None, f"different GPUs: {' | '.join(kinds)}")


def _name_topology(nvlinks: Sequence[bool | None]) -> str | None:
    """Says what joins the GPUs; `None` for one GPU, or where NVML does not say it of every pair."""
    if not nvlinks or None in nvlinks:
        return None
    if any(nvlinks):
        return "NVLink" if all(nvlinks) else "NVLink and PCIe"
    return "PCIe"


def _describe_edition(name: str | None) -> str | None:
    try:
        edition = find_edition(name or "")
    except UnknownEdition:
        return None
    formats = " and ".join(label for label, has in (("FP8", edition.fp8), ("FP4", edition.fp4)) if has)
    return f"{edition.form}, {edition.bandwidth_gb_s:,} GB/s, {formats or 'neither FP8 nor FP4'}"
