"""The hardware ledger: the machines that Homing tells apart, and how to recognise each from what NVML says.

The rows are data, in `ledger.toml`, each with its source.
A name is given only when exactly one row fits; two editions under one marketing name are two machines.
"""

import tomllib
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

_MIB = 1024**2

_WATTS_TOLERANCE = 0.05
"""Boards state their default limit in whole watts; this leaves room for rounding and no more."""


class Form(StrEnum):
    """How a GPU is built into its machine."""

    SXM = "SXM"
    NVL = "NVL"
    PCIE = "PCIe"
    RACK = "rack"
    SERVER = "server"
    WORKSTATION = "workstation"
    CONSUMER = "consumer"


class UnknownEdition(Exception):
    """No row of the ledger has this name; the message lists the known ones in one line."""


@dataclass(frozen=True, slots=True)
class Edition:
    """One machine of the ledger, per GPU; `ledger.toml` says what each field means and where it comes from."""

    name: str
    product: str
    form: Form
    memory_gb: int
    memory_mib: int
    memory_tolerance: float
    bandwidth_gb_s: int
    compute_capability: str
    power_watts: tuple[int, int]
    fp8: bool
    fp4: bool
    source: str

    @property
    def gpu_name(self) -> str:
        """The product name as drivers of today report it."""
        return f"NVIDIA {self.product}"

    @property
    def memory_bytes(self) -> int:
        """What NVML reports in factory settings."""
        return self.memory_mib * _MIB


@dataclass(frozen=True, slots=True)
class Recognition:
    """Either the one edition that fits, or in `note` one line on why there is none."""

    edition: Edition | None
    note: str | None = None


def _read_ledger() -> tuple[Edition, ...]:
    rows: list[dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))[
        "edition"
    ]
    return tuple(
        Edition(**row | {"form": Form(row["form"]), "power_watts": (row["power_watts"][0], row["power_watts"][1])})
        for row in rows
    )


LEDGER = _read_ledger()


def find_edition(name: str) -> Edition:
    """Returns the row of this name, whatever its case; raises `UnknownEdition`."""
    wanted = " ".join(name.split()).casefold()
    for edition in LEDGER:
        if edition.name.casefold() == wanted:
            return edition
    known = ", ".join(edition.name for edition in LEDGER)
    raise UnknownEdition(f"hardware {name!r} is not in the ledger; use one of: {known}")


def recognise(
    gpu_name: str | None,
    memory_bytes: int | None,
    compute_capability: str | None,
    power_watts: float | None,
) -> Recognition:
    """Finds the edition of one whole GPU; `power_watts` is its default limit, not one that was set later.

    Name, memory and capability have to be known and fit; a known power limit has to fit.
    """
    if gpu_name is None:
        return Recognition(None, "unknown card: NVML does not say its name")
    product = gpu_name.removeprefix("NVIDIA ")
    doubts = {
        edition: _list_doubts(edition, memory_bytes, compute_capability, power_watts)
        for edition in LEDGER
        if edition.product == product
    }
    if not doubts:
        return Recognition(None, f"unknown card: {gpu_name} is not in the hardware ledger")
    fitting = [edition for edition, found in doubts.items() if not found]
    if len(fitting) == 1:
        return Recognition(fitting[0])
    if fitting:
        return Recognition(None, f"unknown edition: {gpu_name} fits {' and '.join(row.name for row in fitting)}")
    reasons = "; ".join(f"{edition.name}, since {' and '.join(found)}" for edition, found in doubts.items())
    return Recognition(None, f"unknown edition: {gpu_name} cannot be taken for {reasons}")


def _list_doubts(
    edition: Edition, memory_bytes: int | None, compute_capability: str | None, power_watts: float | None
) -> list[str]:
    """Says what speaks against an edition whose product name fits."""
    doubts = []
    if compute_capability is None:
        doubts.append("its compute capability is not reported")
    elif compute_capability != edition.compute_capability:
        doubts.append(f"its compute capability is {compute_capability}, not {edition.compute_capability}")
    if memory_bytes is None:
        doubts.append("its memory is not reported")
    elif abs(memory_bytes - edition.memory_bytes) > edition.memory_tolerance * edition.memory_bytes:
        doubts.append(f"its memory is {memory_bytes // _MIB} MiB, not {edition.memory_mib}")
    low, high = edition.power_watts
    limits = f"{low}" if low == high else f"{low} to {high}"
    if power_watts is None:
        if _is_family_name(edition.product):
            doubts.append(f"its power limit, which should be {limits} W, is not reported")
    elif not low * (1 - _WATTS_TOLERANCE) <= power_watts <= high * (1 + _WATTS_TOLERANCE):
        doubts.append(f"its power limit is {power_watts:g} W, not {limits}")
    return doubts


def _is_family_name(product: str) -> bool:
    """Tells whether another edition's name begins with this one, so that the name alone could mean either."""
    return any(edition.product.startswith(f"{product} ") for edition in LEDGER)
