"""Situations for the preflight tests: one in which no rule fires, to be changed in one point at a time."""

import dataclasses
import json

from workers.agent.preflight import Situation
from workers.agent.preflight.model import ModelFiles
from workers.agent.recipe import build, imagine_host

# A 27B hybrid: 48 linear and 16 full-attention layers, one MTP head.
HYBRID = {
    "model_type": "qwen3_5_text",
    "dtype": "bfloat16",
    "vocab_size": 248320,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 64,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 262144,
    "mtp_num_hidden_layers": 1,
    "mamba_ssm_dtype": "float32",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000},
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
FP8_GROUPS = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}},
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 262144}
SHIPPED = "Qwen/Qwen3.8-27B"


def situate(
    hardware="H200 SXM", flags=(), *, model="own/model", profile=None, files=True, vllm="0.32.0", weights=None, **fields
):
    """A situation in which no rule fires, but for what the arguments change; `files=False` is a model not at hand."""
    host = imagine_host(hardware)
    base = ["--reasoning-parser", "qwen3", "--enable-auto-tool-choice", "--tool-call-parser", "qwen3_coder"]
    extra = [*flags] if model == SHIPPED else [*base, *flags]
    config = {key: value for key, value in (HYBRID | fields).items() if value is not None}
    line = build(model, profile, host, None, extra)
    return Situation(line, host, ModelFiles(config, weights) if files else None, profile, vllm)


def without(situation: Situation, *names: str) -> Situation:
    return dataclasses.replace(situation, line=situation.line.amend({}, names, "test"))


def blind(situation: Situation, **facts) -> Situation:
    return dataclasses.replace(situation, host=dataclasses.replace(situation.host, **facts))


def mtp(tokens: int) -> list[str]:
    return ["--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": tokens})]
