"""The few facts of a machine that choose its lists: operating system, GPUs, memory, compute capability.

What is not known is `None`, and chooses no list.
"""

import re
from dataclasses import dataclass

from workers.agent.identity import Identity, identify
from workers.agent.ledger import find_edition

_COUNTED = re.compile(r"\s*(\d+)\s*[x×]\s+(.+)")


@dataclass(frozen=True, slots=True)
class HostFacts:
    """One machine; `memory_bytes` is one GPU's total as NVML reports it, `compute_capability` as the driver does."""

    os: str | None
    gpu_count: int | None = None
    memory_bytes: int | None = None
    compute_capability: str | None = None
    name: str | None = None

    @property
    def capability(self) -> tuple[int, int] | None:
        """The compute capability as numbers, to compare."""
        if self.compute_capability is None:
            return None
        major, _, minor = self.compute_capability.partition(".")
        return int(major), int(minor or 0)

    def describe(self) -> str:
        """Returns one line on the machine, unknowns named."""
        memory = "unknown memory" if self.memory_bytes is None else f"{self.memory_bytes / 1024**3:.1f} GiB"
        capability = f"compute capability {self.compute_capability or 'unknown'}"
        count = "?" if self.gpu_count is None else self.gpu_count
        return f"{self.os or 'unknown system'}, {count} × {self.name or 'unknown GPU'}, {memory}, {capability}"


def choose_host(hardware: str | None) -> HostFacts:
    """Returns the ledger's machine of this name, else this machine; raises `UnknownEdition`."""
    return read_host(identify()) if hardware is None else imagine_host(hardware)


def read_host(identity: Identity) -> HostFacts:
    """Takes the facts from what the survey of this machine found."""
    return HostFacts(
        os=identity.host_os.split(maxsplit=1)[0] if identity.host_os else None,
        gpu_count=identity.gpu_count,
        memory_bytes=identity.memory_bytes,
        compute_capability=identity.compute_capability,
        name=identity.name or identity.gpu_name,
    )


def imagine_host(hardware: str) -> HostFacts:
    """Takes the facts from the ledger: a Linux machine with one such GPU, or several as in `2x H200 NVL`.

    Raises `UnknownEdition` for a name that is not in the ledger.
    """
    counted = _COUNTED.fullmatch(hardware)
    count, name = (int(counted[1]), counted[2]) if counted else (1, hardware)
    edition = find_edition(name)
    return HostFacts("Linux", count, edition.memory_bytes, edition.compute_capability, edition.name)
