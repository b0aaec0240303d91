"""How a model's weights are quantized, as its config says it in one of several dialects."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_BITS = {"int4": 4.25, "mxfp4": 4.25, "nvfp4": 4.5, "fp8": 8.0, "int8": 8.0}
"""Bits per weight, scales included: one 16-bit scale and zero per 128 weights (int4), one 8-bit scale per 32 (mxfp4),
per 16 (nvfp4)."""

_METHODS = {
    "fp8": "fp8",
    "fbgemm_fp8": "fp8",
    "modelopt_fp8": "fp8",
    "modelopt_fp4": "nvfp4",
    "nvfp4": "nvfp4",
    "mxfp4": "mxfp4",
}


@dataclass(frozen=True, slots=True)
class Quantization:
    """`weights` is int4, int8, fp8, nvfp4, mxfp4 or the method's own name; `cache` the KV dtype that it brings."""

    method: str
    weights: str
    cache: str | None = None

    @property
    def bits(self) -> float | None:
        """Bits per weight with its scales; `None` for a format that is not known."""
        return _BITS.get(self.weights)


def read_quantization(config: Mapping[str, Any]) -> Quantization | None:
    """Reads `quantization_config`; `None` when the weights are not quantized."""
    table = config.get("quantization_config") or config.get("compression_config")
    if not isinstance(table, Mapping):
        return None
    method = str(table.get("quant_method", "")).lower()
    inner = table.get("quantization")
    table = {**table, **inner} if isinstance(inner, Mapping) else table
    return Quantization(method, _name_weights(method, table), _name_cache(method, table))


def name_method(method: str) -> Quantization:
    """Takes what `--quantization` names: weights that are quantized while they are loaded, or a checkpoint's method."""
    return Quantization(method, _METHODS.get(method, method))


def _name_weights(method: str, table: Mapping[str, Any]) -> str:
    algorithm = str(table.get("quant_algo", "")).lower()
    if algorithm:
        return "nvfp4" if "nvfp4" in algorithm else "fp8" if "fp8" in algorithm else algorithm
    if method in _METHODS:
        return _METHODS[method]
    groups = table.get("config_groups")
    if isinstance(groups, Mapping):
        return _name_group(str(table.get("format", "")), groups)
    bits = table.get("bits", table.get("w_bit", 4 if table.get("load_in_4bit") else None))
    return f"int{bits}" if isinstance(bits, int) else method


def _name_group(layout: str, groups: Mapping[str, Any]) -> str:
    """Names the weights of a compressed-tensors checkpoint by its first group."""
    first: Mapping[str, Any] = next(iter(groups.values()), {})
    weights = first.get("weights") or {}
    bits, kind = weights.get("num_bits"), weights.get("type", "int")
    layout = str(first.get("format") or layout)
    if kind == "float":
        return "fp8" if bits == 8 else "mxfp4" if "mxfp4" in layout else "nvfp4"
    return f"int{bits}"


def _name_cache(method: str, table: Mapping[str, Any]) -> str | None:
    """Names the cache dtype that `--kv-cache-dtype auto` takes from a checkpoint; vLLM 0.32 does so for modelopt's."""
    if not method.startswith("modelopt"):
        return None
    stated = table.get("kv_cache_scheme") or table.get("kv_cache_quant_algo")
    if isinstance(stated, Mapping):
        return {8: "fp8", 4: "nvfp4"}.get(stated.get("num_bits", 0))
    return {"fp8": "fp8", "nvfp4": "nvfp4"}.get(str(stated).lower())
