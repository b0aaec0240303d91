"""A model's dimensions, as its config.json gives them; a field that the config leaves open is `None`.

Models that see and hear keep the language model's fields in `text_config`; those come before the outer ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workers.agent.preflight.quantization import Quantization, read_quantization

_OTHER_HYBRIDS = ("hybrid_override_pattern", "layers_block_type", "mamba_d_state", "ssm_state_size", "ssm_cfg")
"""Fields of hybrids whose state this reader does not know."""

_MTP_FIELDS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")


@dataclass(frozen=True, slots=True)
class Layers:
    """How many layers keep keys and values of all tokens, of a window, or a state of fixed size."""

    full: int
    sliding: int = 0
    linear: int = 0


@dataclass(frozen=True, slots=True)
class LinearState:
    """What one Gated DeltaNet layer keeps of a sequence, whatever its length."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    dtype: str | None


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixture in each layer's MLP; sizes are widths in numbers."""

    count: int
    active: int
    width: int
    shared_width: int


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's dimensions; `reach` is the longest context that vLLM accepts, `native` the trained one."""

    model_type: str
    dtype: str | None
    quantization: Quantization | None
    hidden: int | None
    heads: int | None
    kv_heads: int | None
    head_dim: int | None
    intermediate: int | None
    vocab: int | None
    tied: bool
    gated: bool
    layers: Layers | None
    window: int | None
    linear: LinearState | None
    latent: int | None
    experts: Experts | None
    native: int | None
    reach: int | None
    yarn: float | None
    rope: Mapping[str, Any]
    nested: bool
    mtp_heads: int | None
    vision_parameters: int


def read_shape(config: Mapping[str, Any]) -> Shape:
    """Reads the dimensions out of a configuration."""
    inner = config.get("text_config")
    text = {**config, **inner} if isinstance(inner, Mapping) else dict(config)
    heads, hidden = _int(text, "num_attention_heads", "n_head"), _int(text, "hidden_size", "n_embd")
    native, reach, yarn, rope = _read_positions(text)
    return Shape(
        model_type=str(config.get("model_type", "")),
        dtype=_read_dtype(text),
        quantization=read_quantization(config) or read_quantization(text),
        hidden=hidden,
        heads=heads,
        kv_heads=_int(text, "num_key_value_heads") or heads,
        head_dim=_int(text, "head_dim") or (hidden // heads if hidden and heads else None),
        intermediate=_int(text, "intermediate_size", "n_inner"),
        vocab=_int(text, "vocab_size"),
        tied=bool(text.get("tie_word_embeddings", False)),
        gated=bool(
            text.get("attn_output_gate", str(config.get("model_type", "")).startswith(("qwen3_5", "qwen3_next")))
        ),
        layers=_count_layers(text),
        window=_int(text, "sliding_window"),
        linear=_read_linear(text),
        latent=_read_latent(text),
        experts=_read_experts(text),
        native=native,
        reach=reach,
        yarn=yarn,
        rope=rope,
        nested=isinstance(inner, Mapping),
        mtp_heads=_int(text, *_MTP_FIELDS),
        vision_parameters=_count_vision(config.get("vision_config")),
    )


def _read_dtype(text: Mapping[str, Any]) -> str | None:
    stated = text.get("dtype") or text.get("torch_dtype")
    return str(stated).removeprefix("torch.") if stated else None


def _read_positions(text: Mapping[str, Any]) -> tuple[int | None, int | None, float | None, Mapping[str, Any]]:
    """Returns the trained length, the longest accepted one, YaRN's factor, and the rope table.

    vLLM stretches `max_position_embeddings` by the factor of linear and dynamic scaling, and by YaRN's before 0.32;
    since then YaRN wants it stretched already. Either way of writing is taken.
    """
    stated = _int(text, "max_position_embeddings", "n_positions", "max_sequence_length")
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    rope = rope.get("full_attention", rope) if isinstance(rope, Mapping) else {}
    kind = str(rope.get("rope_type", rope.get("type", "default")))
    factor = float(rope.get("factor") or 1.0)
    native = _int(rope, "original_max_position_embeddings") or _int(text, "original_max_position_embeddings") or stated
    if native is None or stated is None:
        return native, stated, None, rope
    if "yarn" in kind:
        return native, max(stated, int(native * factor)), factor, rope
    return native, int(stated * factor) if kind in {"linear", "dynamic"} else stated, None, rope


def _count_layers(text: Mapping[str, Any]) -> Layers | None:
    """Counts the layers by what they keep; `None` when the config leaves that open."""
    total = _int(text, "num_hidden_layers", "n_layer")
    types = text.get("layer_types")
    if isinstance(types, list):
        full, sliding, linear = (types.count(f"{kind}_attention") for kind in ("full", "sliding", "linear"))
        return Layers(full, sliding, linear) if full + sliding + linear == len(types) else None
    if total is None or any(text.get(field) for field in _OTHER_HYBRIDS):
        return None
    interval = _int(text, "full_attention_interval")
    if interval and text.get("linear_num_value_heads"):
        return Layers(total // interval, 0, total - total // interval)
    pattern = _int(text, "sliding_window_pattern")
    if pattern:
        return Layers(total // pattern, total - total // pattern)
    return Layers(total)


def _read_linear(text: Mapping[str, Any]) -> LinearState | None:
    names = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    key_heads, value_heads, key_dim, value_dim = (_int(text, name) for name in names)
    if key_heads is None or value_heads is None or key_dim is None or value_dim is None:
        return None
    kernel = _int(text, "linear_conv_kernel_dim") or 4
    return LinearState(key_heads, value_heads, key_dim, value_dim, kernel, text.get("mamba_ssm_dtype"))


def _read_latent(text: Mapping[str, Any]) -> int | None:
    """Returns the width of what multi-head latent attention keeps per token and layer, in numbers."""
    rank = _int(text, "kv_lora_rank")
    return None if rank is None else rank + (_int(text, "qk_rope_head_dim") or 0)


def _read_experts(text: Mapping[str, Any]) -> Experts | None:
    count = _int(text, "num_experts", "n_routed_experts", "num_local_experts")
    width = _int(text, "moe_intermediate_size", "intermediate_size")
    if not count or not width:
        return None
    shared = _int(text, "shared_expert_intermediate_size") or width * (_int(text, "n_shared_experts") or 0)
    return Experts(count, _int(text, "num_experts_per_tok") or 1, width, shared)


def _count_vision(vision: Any) -> int:
    """Counts a vision tower's parameters: four square matrices and two MLP matrices in each layer."""
    if not isinstance(vision, Mapping):
        return 0
    depth, hidden = _int(vision, "depth", "num_hidden_layers"), _int(vision, "hidden_size")
    width = _int(vision, "intermediate_size")
    return depth * (4 * hidden * hidden + 2 * hidden * width) if depth and hidden and width else 0


def _int(table: Mapping[str, Any], *names: str) -> int | None:
    """Returns the first of these fields that holds a whole number."""
    for name in names:
        value = table.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None
