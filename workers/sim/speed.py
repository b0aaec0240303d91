"""How long work takes on a GPU: curves fitted to one measured H200 SXM, scaled to the other machines.

Measured: vLLM 0.26, a 27B hybrid in BF16 on one H200 SXM, one prompt at a time for prefill, 512-token prompts with
256 tokens out for decoding.
Against those figures this model is within 8 % for cold prompts of 8k to 205k tokens (the fit itself) and inside or
within 5 % of the measured range for a second send from 8k up; a second send of 1,024 tokens comes out at 0.15 s
where 0.10 to 0.13 s was measured.
Throughput at 1, 8, 32 and 64 requests in flight is within 10 % of the measured, at 128 it is 15 % under it.
Not modelled: that decoding slows down with long contexts, that a mixed step overlaps some work, that 4-bit weights
are read faster than BF16 ones.
Seconds here are the GPU's; the time scale is the engine's matter.
"""

from itertools import pairwise

from workers.sim.hardware import REFERENCE, Hardware

_BASE_SECONDS = 0.13
_LINEAR_SECONDS = 7.5e-5
_SQUARE_SECONDS = 3.7e-10
"""Cold first token after 0.13 + 7.5e-5·n + 3.7e-10·n² seconds for n prompt tokens: fitted to 1k…205k tokens."""

_RECALL_SECONDS = 4.2e-12
"""A hit of h tokens adds 4.2e-12·h²: fitted to what second sends at 65k…205k cost beyond their uncached part."""

_DECODE_ANCHORS = ((1, 0.0150), (8, 0.0161), (32, 0.0191), (64, 0.0252), (128, 0.0397))
"""Measured seconds between tokens by requests in flight."""


class Speed:
    """The durations of one machine's work, in seconds.

    Prefill scales with dense BF16 throughput, decoding with memory bandwidth; the base is host work and does not scale.
    """

    base_seconds = _BASE_SECONDS

    def __init__(self, hardware: Hardware) -> None:
        self._prefill_scale = REFERENCE.bf16_tflops / hardware.bf16_tflops
        self._decode_scale = REFERENCE.edition.bandwidth_gb_s / hardware.edition.bandwidth_gb_s

    def prefill_seconds(self, computed: int, count: int) -> float:
        """Returns what `count` prompt tokens cost after `computed` earlier ones; chunks add up to the whole."""
        total = computed + count
        work = _LINEAR_SECONDS * count + _SQUARE_SECONDS * (total * total - computed * computed)
        return work * self._prefill_scale

    def recall_seconds(self, cached: int) -> float:
        """Returns what it costs to go on from `cached` tokens found in the cache."""
        return _RECALL_SECONDS * cached * cached * self._prefill_scale

    def decode_seconds(self, batch: int) -> float:
        """Returns one step's time for `batch` decoding requests, linear between and beyond the anchors."""
        if batch <= 0:
            return 0.0
        pairs = tuple(pairwise(_DECODE_ANCHORS))
        lower, upper = next((pair for pair in pairs if batch <= pair[1][0]), pairs[-1])
        slope = (upper[1] - lower[1]) / (upper[0] - lower[0])
        return (lower[1] + slope * (batch - lower[0])) * self._decode_scale
