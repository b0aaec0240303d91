"""The machines that can be stood in for: rows of the hardware ledger, with what a speed model needs beside them.

No figure but the H200 SXM's capacity was measured; the rest are data sheets' and the arithmetic below.
"""

from dataclasses import dataclass

from workers.agent.ledger import Edition, find_edition

_MEMORY_SHARE = 0.90
"""vLLM's `--gpu-memory-utilization` for the measured run."""

_BF16_WEIGHT_BYTES = 53_800_000_000
"""26.9 B parameters of two bytes: the 27B hybrid in BF16."""

_FOUR_BIT_WEIGHT_BYTES = 17_600_000_000
"""The same model with 4-bit linear layers, scales, and embeddings left in BF16: an estimate. The BF16 weights do
not fit into a 32 GB card."""

_KV_BYTES_PER_TOKEN = 65_536
"""BF16 keys and values of the 16 attention layers: 16 · 2 · 4 heads · 256 · 2 bytes."""

_OVERHEAD_BYTES = 2_630_323_302
"""Activations and graphs: what remains on the H200 SXM when the measured 1,209,244 tokens are taken off."""


class UnknownHardware(Exception):
    """No row of the table has this name; the message lists the known ones in one line."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """One GPU: its row of the hardware ledger, and `bf16_tflops`, dense with FP32 sums."""

    edition: Edition
    alias: str
    bf16_tflops: float
    weight_bytes: int = _BF16_WEIGHT_BYTES

    @property
    def name(self) -> str:
        """The edition's name in the ledger."""
        return self.edition.name

    @property
    def capacity_tokens(self) -> int:
        """Tokens the KV cache holds: 90 % of memory, less weights and overhead, over the bytes of one token.

        Exact for the H200 SXM by construction; for the others the overhead is assumed to be the same.
        """
        free = _MEMORY_SHARE * self.edition.memory_bytes - self.weight_bytes - _OVERHEAD_BYTES
        return int(free / _KV_BYTES_PER_TOKEN)


# Dense BF16 tensor TFLOPS, half of the "with sparsity" figure where a data sheet prints only that one: H100 and H200
# data sheets (SXM 1,979, NVL 1,671); HGX B200 data sheet (36 PFLOPS for 8); GB300 NVL72 data sheet (360 PFLOPS for
# 72); RTX Blackwell PRO white paper (503.8 for the Workstation Edition; the Server Edition scaled by its 120 against
# 126 FP32 TFLOPS); RTX Blackwell white paper (209.5 for the RTX 5090, whose FP32 sums run at half rate).
HARDWARE = (
    Hardware(find_edition("H100 SXM"), "H100", 989.4),
    Hardware(find_edition("H100 NVL"), "H100 NVL", 835.5),
    Hardware(find_edition("H200 SXM"), "H200", 989.4),
    Hardware(find_edition("H200 NVL"), "H200 NVL", 835.5),
    Hardware(find_edition("B200"), "B200", 2_250),
    Hardware(find_edition("GB300 NVL72"), "GB300", 2_500),
    Hardware(find_edition("RTX PRO 6000 Blackwell Server Edition"), "RTX PRO 6000 Server", 480),
    Hardware(find_edition("RTX PRO 6000 Blackwell Workstation Edition"), "RTX PRO 6000 Workstation", 503.8),
    Hardware(find_edition("GeForce RTX 5090"), "RTX 5090", 209.5, _FOUR_BIT_WEIGHT_BYTES),
)

REFERENCE = next(row for row in HARDWARE if row.name == "H200 SXM")
"""The machine whose speed was measured; all others are scaled from it."""


def find_hardware(name: str) -> Hardware:
    """Returns the row with this name or alias, whatever its case; raises `UnknownHardware`."""
    wanted = " ".join(name.split()).casefold()
    for row in HARDWARE:
        if wanted in {row.name.casefold(), row.alias.casefold()}:
            return row
    known = ", ".join(row.name for row in HARDWARE)
    raise UnknownHardware(f"identity {name!r} is not known to the simulator; use one of: {known}")
