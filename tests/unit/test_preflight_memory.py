"""What is estimated of a GPU's memory, held against a measured run and against counts made by hand."""

import json
from pathlib import Path

import pytest

from tests.support.situations import HYBRID, mtp, situate
from workers.agent.preflight.memory import count_parameters, estimate
from workers.agent.preflight.situation import Missing, read_number

DENSE = {
    "model_type": "llama",
    "dtype": "float16",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    **{key: None for key in HYBRID if key.startswith(("linear", "full", "mtp", "mamba", "head_dim", "rope"))},
}


# Reported by vLLM 0.26 on one H200 for the same shape: capacity in tokens, and the block of its attention layers.
@pytest.mark.parametrize(
    ("flags", "capacity", "block"), [([], 1_209_244, 784), (["--kv-cache-dtype", "fp8"], 2_369_842, 1_568)]
)
def test_the_measured_hybrid_is_met(flags, capacity, block):
    room = estimate(situate("H200 SXM", flags))
    assert room.block_tokens == block
    assert room.capacity_tokens == pytest.approx(capacity, rel=0.1)
    assert room.windows == pytest.approx(capacity / 262_144, rel=0.1)
    guide = Path(__file__).resolve().parents[2] / "docs" / "guides" / "recipes.md"
    assert f"{room.capacity_tokens:,}" in guide.read_text(encoding="utf-8")


def test_the_hybrids_parameters_are_counted():
    inner, outer = count_parameters(situate().shape, drafting=False)
    assert (inner + outer) / 1e9 == pytest.approx(26.9, abs=0.05)
    assert count_parameters(situate().shape, drafting=True)[0] > inner


def test_only_attention_layers_grow_with_the_context():
    short, long = (estimate(situate(flags=["--max-model-len", str(784 * blocks)])) for blocks in (10, 100))
    assert (short.window_blocks, long.window_blocks) == (10 + 6, 100 + 6)
    assert short.block_bytes == 784 * 16 * 2 * 4 * 256 * 2


def test_a_state_is_kept_once_without_prefix_caching_and_again_for_each_guess():
    assert estimate(situate(flags=["--no-enable-prefix-caching"])).fixed_blocks == 3
    drafting = estimate(situate(flags=mtp(3)))
    # The MTP head is a 17th attention layer, so 48 linear layers make three groups of 17; the tail grows by 3.
    assert (drafting.fixed_blocks, drafting.block_tokens) == (3 * 5, 800)


def test_a_dense_model_is_counted_in_blocks_of_sixteen():
    room = estimate(situate("H100 SXM", **DENSE))
    assert (room.block_tokens, room.fixed_blocks, room.growing_groups) == (16, 0, 1)
    assert room.block_bytes == 16 * 32 * 2 * 8 * 128 * 2
    assert room.weights_bytes == pytest.approx(8.03e9 * 2, rel=0.001)


def test_tensor_parallelism_shares_weights_and_heads():
    one, two = (estimate(situate("2x H100 SXM", ["-tp", ways], **DENSE)) for ways in ("1", "2"))
    assert two.weights_bytes == one.weights_bytes // 2
    assert two.block_bytes == one.block_bytes // 2


def test_sliding_layers_stop_growing_at_their_window():
    types = ["sliding_attention", "full_attention"] * 16
    fields = DENSE | {"layer_types": types, "sliding_window": 1024}
    short, long = (
        estimate(situate("H100 SXM", ["--max-model-len", length], **fields)) for length in ("32768", "65536")
    )
    assert long.window_blocks - short.window_blocks == 32768 // 16
    assert short.fixed_blocks == (1024 + 8192) // 16 + 1


def test_latent_attention_keeps_one_vector_for_all_heads():
    fields = DENSE | {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    assert estimate(situate("H200 SXM", weights=10**10, **fields)).block_bytes == 16 * 32 * (512 + 64) * 2
    with pytest.raises(Missing, match="latent attention"):
        estimate(situate("H200 SXM", **fields))


def test_files_on_disk_come_before_the_count():
    assert estimate(situate(weights=123_456_789_000)).weights_bytes == 123_456_789_000


def test_quantized_weights_shrink_and_embeddings_do_not():
    inner, outer = count_parameters(situate().shape, drafting=False)
    four = estimate(situate(quantization_config={"quant_method": "awq", "bits": 4}))
    assert four.weights_bytes == pytest.approx(inner * 4.25 / 8 + outer * 2, abs=2)
    online = estimate(situate(flags=["--quantization", "fp8"], weights=54 * 10**9))
    assert online.weights_bytes == pytest.approx(inner + outer * 2, abs=2)


def test_every_expert_is_loaded():
    fields = DENSE | {"num_experts": 64, "moe_intermediate_size": 1408, "num_experts_per_tok": 8}
    inner, _ = count_parameters(situate(**fields).shape, drafting=False)
    assert inner == 32 * (4096 * 128 * (32 * 2 + 8 * 2) + 4096 * (3 * 64 * 1408 + 64))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"layer_types": ["full_attention", "mamba"]}, "what this hybrid's layers keep"),
        ({"hybrid_override_pattern": "M-M*", "full_attention_interval": None}, "what this hybrid's layers keep"),
        ({"vocab_size": None}, "vocab_size"),
        ({"linear_num_key_heads": None}, "the linear layers' sizes"),
        ({"quantization_config": {"quant_method": "strange"}}, "how many bits a strange weight takes"),
    ],
)
def test_what_cannot_be_counted_is_said(fields, said):
    with pytest.raises(Missing, match=said):
        estimate(situate(**fields))


@pytest.mark.parametrize(
    ("text", "number"), [("32768", 32768), ("32k", 32000), ("32K", 32768), ("1M", 2**20), ("25.6k", 25600)]
)
def test_numbers_are_read_as_vllm_reads_them(text, number):
    assert read_number(text, "--max-model-len") == number


def test_overrides_reach_into_the_text_config():
    overrides = json.dumps({"num_hidden_layers": 32})
    assert estimate(situate(flags=["--hf-overrides", overrides])).growing_groups == 1
    assert situate(flags=["--hf-overrides", overrides]).shape.layers.linear == 24
