"""Rules on number formats: what this generation of card computes, and what the model and the flags ask of it.

Which kernels take what was read in vLLM 0.32: FP8 weights need 7.5 and are unpacked to 16 bits before 8.9, as NVFP4
weights are before 10.0; an FP8 cache is taken by FlashInfer from 8.0 and by Triton from 8.9.
"""

from workers.agent.preflight.findings import Severity, WayOut
from workers.agent.preflight.rule import Fires, Rule
from workers.agent.preflight.situation import Situation

_FP8 = (8, 9)
_FP4 = (10, 0)

_FLASH = {None, "auto", "FLASH_ATTN"}
"""Attention backends under which vLLM takes FlashAttention 3 on Hopper."""

_FLASH_FP8 = {"fp8", "fp8_e4m3"}


def _meets_hopper_case(situation: Situation) -> Fires | None:
    """The failure that cost minutes: FP8 queries and a float16 output buffer in FlashAttention 3."""
    if situation.capability[0] != 9 or situation.line.value("--attention-backend") not in _FLASH:
        return None
    asked = situation.line.value("--kv-cache-dtype") or "auto"
    if asked != "auto" and asked not in _FLASH_FP8:
        return None
    if situation.cache_dtype not in _FLASH_FP8 or situation.dtype != "float16":
        return None
    plain = "float16" if asked == "auto" else "auto"
    quantized = situation.quantization
    return Fires(
        {
            "capability": situation.host.compute_capability,
            "cache": situation.cache_dtype,
            "build": f" ({quantized.method} build)" if quantized else "",
        },
        (WayOut("keep the model as it is, with an unquantized cache", {"--kv-cache-dtype": plain}),),
    )


def _lacks_fp4(situation: Situation) -> Fires | None:
    if situation.capability >= _FP4:
        return None
    quantized = situation.quantization
    return (
        Fires({"capability": situation.host.compute_capability}) if quantized and quantized.weights == "nvfp4" else None
    )


def _has_fp8_weights(situation: Situation) -> bool:
    quantized = situation.quantization
    return quantized is not None and quantized.weights == "fp8"


def _unpacks_fp8(situation: Situation) -> Fires | None:
    if not (7, 5) <= situation.capability < _FP8 or not _has_fp8_weights(situation):
        return None
    return Fires({"capability": situation.host.compute_capability})


def _cannot_unpack_fp8(situation: Situation) -> Fires | None:
    if situation.capability >= (7, 5) or not _has_fp8_weights(situation):
        return None
    return Fires({"capability": situation.host.compute_capability})


def _stores_fp8_cache(situation: Situation) -> Fires | None:
    if not (8, 0) <= situation.capability < _FP8 or not situation.cache_dtype.startswith("fp8"):
        return None
    return Fires({"capability": situation.host.compute_capability})


def _cannot_store_fp8_cache(situation: Situation) -> Fires | None:
    if situation.capability >= (8, 0) or not situation.cache_dtype.startswith("fp8"):
        return None
    return Fires({"capability": situation.host.compute_capability})


_UNQUANTIZED = WayOut("leave the cache unquantized", {"--kv-cache-dtype": "auto"})

RULES = (
    Rule(
        "hopper-float16-fp8-cache",
        Severity.ERROR,
        _meets_hopper_case,
        "on Hopper (compute capability $capability) vLLM takes FlashAttention 3, which writes only BF16 from an FP8 "
        "cache; this model$build computes in float16 with --kv-cache-dtype $cache, so the engine would die after "
        "loading the weights, with: For FP8 input, output must have dtype BF16",
        (WayOut("keep the FP8 cache and compute in bfloat16", {"--dtype": "bfloat16"}),),
    ),
    Rule(
        "nvfp4-without-fp4",
        Severity.WARNING,
        _lacks_fp4,
        "the weights are NVFP4 and a card of compute capability $capability has no FP4 units: vLLM unpacks them to "
        "16 bits at every step, so the memory is saved and the speed is not",
        (WayOut("serve an FP8 or 4-bit integer build of the model instead"),),
    ),
    Rule(
        "fp8-weights-unpacked",
        Severity.WARNING,
        _unpacks_fp8,
        "the weights are FP8 and a card of compute capability $capability has no FP8 units: vLLM unpacks them to "
        "16 bits at every step, so the memory is saved and the speed is not",
        (WayOut("serve a 4-bit integer build of the model instead"),),
    ),
    Rule(
        "fp8-weights-unsupported",
        Severity.ERROR,
        _cannot_unpack_fp8,
        "the weights are FP8, which vLLM takes from compute capability 7.5; this card has $capability",
        (WayOut("serve another build of the model"),),
    ),
    Rule(
        "fp8-cache-stored-only",
        Severity.NOTE,
        _stores_fp8_cache,
        "a card of compute capability $capability stores an FP8 cache but computes in 16 bits, and only with an "
        "attention backend that unpacks it (FlashInfer does, Triton refuses)",
        (_UNQUANTIZED,),
    ),
    Rule(
        "fp8-cache-unsupported",
        Severity.ERROR,
        _cannot_store_fp8_cache,
        "no attention backend of vLLM takes an FP8 cache on compute capability $capability",
        (_UNQUANTIZED,),
    ),
)
