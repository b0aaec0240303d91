"""The hardware ledger: the machines that Homing tells apart, and how to recognise each from what NVML says.

A name is given only when exactly one row fits; two editions under one marketing name are two machines.
Product names are those that NVML reports; memory, capability and power limits are NVIDIA's data sheets'.
"""

from dataclasses import dataclass

_GIB = 1024**3


@dataclass(frozen=True, slots=True)
class Edition:
    """One machine of the ledger.

    `gpu_name` is NVML's product name without its vendor; `memory_gb` the marketed size of one GPU.
    `power_watts` is the default power limit, set only where the product name leaves two editions open.
    """

    name: str
    gpu_name: str
    memory_gb: int
    compute_capability: str
    power_watts: int | None = None


LEDGER = (
    Edition("H100 SXM", "H100 80GB HBM3", 80, "9.0"),
    Edition("H100 NVL", "H100 NVL", 94, "9.0"),
    # The SXM board carries the family's bare name, so its 700 W say that it is not the 600 W NVL card.
    Edition("H200 SXM", "H200", 141, "9.0", power_watts=700),
    Edition("H200 NVL", "H200 NVL", 141, "9.0"),
    Edition("B200", "B200", 180, "10.0"),
    Edition("GB300 NVL72", "GB300", 288, "10.3"),
    Edition("RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000 Blackwell Server Edition", 96, "12.0"),
    Edition("RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000 Blackwell Workstation Edition", 96, "12.0"),
    Edition("GeForce RTX 5090", "GeForce RTX 5090", 32, "12.0"),
)


def name_edition(
    gpu_name: str | None,
    memory_bytes: int | None,
    compute_capability: str | None,
    power_watts: float | None,
) -> str | None:
    """Returns the ledger's name for a GPU, `None` unless exactly one row fits all that is known."""
    if gpu_name is None or memory_bytes is None or compute_capability is None:
        return None
    product = gpu_name.removeprefix("NVIDIA ")
    fitting = [
        edition.name
        for edition in LEDGER
        if edition.gpu_name == product
        and edition.compute_capability == compute_capability
        and _is_near(memory_bytes / _GIB, edition.memory_gb, below=0.07, above=0.01)
        and (
            edition.power_watts is None
            or (power_watts is not None and _is_near(power_watts, edition.power_watts, below=0.05, above=0.05))
        )
    ]
    return fitting[0] if len(fitting) == 1 else None


def _is_near(value: float, nominal: float, *, below: float, above: float) -> bool:
    """Compares with a marketed figure; NVML's total, in GiB, lies a few per cent under it."""
    return nominal * (1 - below) <= value <= nominal * (1 + above)
