"""How long a prompt takes to prefill, as a curve over its length.

The shape was measured on one H200 (vLLM 0.26, a 27B hybrid in BF16): seconds ≈ 0.13 + 7.5e-5·n + 3.7e-10·n²,
within 7 % from 1k to 205k prompt tokens. Other cards get the same shape, slower or faster by the ratio of their
dense BF16 tensor throughput, until speeds are learned live.
"""

from __future__ import annotations

from functools import lru_cache

from msgspec import Struct

# Seconds for one request whatever its length, per token, and per token squared (docs/performance.md).
H200_BASE, H200_LINEAR, H200_QUADRATIC = 0.13, 7.5e-5, 3.7e-10

# Dense BF16 tensor throughput, TFLOP/s, from the makers' data sheets; the ratio to the H200 SXM scales its curve.
DENSE_BF16_TFLOPS = {
    "H100 SXM": 989.0,
    "H100 NVL": 835.0,
    "H200 SXM": 989.0,
    "H200 NVL": 835.0,
    "B200": 2250.0,
    "GB300 NVL72": 2500.0,
    "RTX PRO 6000 Blackwell Server Edition": 480.0,
    "RTX PRO 6000 Blackwell Workstation Edition": 504.0,
    "RTX PRO 6000 Blackwell Max-Q Workstation Edition": 439.0,
    "GeForce RTX 5090": 209.5,
    "GeForce RTX 4090": 165.2,
    "GeForce RTX 3090": 71.0,
    "RTX 6000 Ada": 364.2,
    "L40S": 362.0,
    "L4": 121.0,
    "A100 40GB PCIe": 312.0,
    "A100 80GB PCIe": 312.0,
    "A100 40GB SXM": 312.0,
    "A100 80GB SXM": 312.0,
}


class SpeedCurve(Struct, frozen=True, gc=False):
    """Prefill seconds of a worker: `base + linear·n + quadratic·n²` for n prompt tokens."""

    base: float = H200_BASE
    linear: float = H200_LINEAR
    quadratic: float = H200_QUADRATIC

    def seconds(self, prompt_tokens: int, cached_tokens: int = 0) -> float:
        """Returns the seconds to prefill a prompt of which the first `cached_tokens` are held already."""
        n, held = max(prompt_tokens, 0), min(max(cached_tokens, 0), max(prompt_tokens, 0))
        return self.base + self.linear * (n - held) + self.quadratic * (n * n - held * held)

    def work(self, prompt_tokens: int, cached_tokens: int = 0) -> float:
        """Returns the same without the base: the part that grows with the uncached tokens."""
        return self.seconds(prompt_tokens, cached_tokens) - self.base


@lru_cache
def curve_of(hardware: str | None) -> SpeedCurve:
    """Returns the curve to start from for a hardware identity.

    Unknown hardware gets the H200's: among workers that are all unknown only ratios matter, and they are 1. How many of
    a machine's GPUs one engine uses is not known here, so the count does not enter.
    """
    tflops = DENSE_BF16_TFLOPS.get(hardware or "", DENSE_BF16_TFLOPS["H200 SXM"])
    scale = DENSE_BF16_TFLOPS["H200 SXM"] / tflops
    return SpeedCurve(H200_BASE * scale, H200_LINEAR * scale, H200_QUADRATIC * scale)
