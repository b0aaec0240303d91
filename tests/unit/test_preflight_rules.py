"""Every preflight rule: one case that fires, one near miss that does not, and one without the fact it needs."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from tests.support.situations import FP8, FP8_GROUPS, GPTQ, HYBRID, NVFP4, SHIPPED, YARN, blind, mtp, situate, without
from workers.agent.preflight import RULES, Severity, Situation, choose_exit_code, examine
from workers.agent.preflight.model import ModelFiles

HALF = ["--dtype", "float16", "--kv-cache-dtype", "fp8"]
T4 = {"compute_capability": "7.5"}
VOLTA = {"compute_capability": "7.0"}

# rule, severity, what fires, the near misses
CASES = [
    (
        "hopper-float16-fp8-cache",
        Severity.ERROR,
        [
            situate("H200 NVL", HALF),
            situate(
                "H100 SXM", ["--kv-cache-dtype", "fp8"], dtype=None, torch_dtype="float16", quantization_config=GPTQ
            ),
            situate("H200 SXM", ["--kv-cache-dtype", "fp8_e4m3", "--dtype=half"]),
            situate("H200 SXM", quantization_config=NVFP4 | {"kv_cache_quant_algo": "FP8"}, dtype="float16"),
        ],
        [
            situate("H200 NVL", [*HALF, "--dtype", "bfloat16"]),
            situate("H200 NVL", [*HALF, "--kv-cache-dtype", "auto"]),
            situate("H200 NVL", [*HALF, "--attention-backend", "TRITON_ATTN"]),
            situate("RTX PRO 6000 Blackwell Server Edition", HALF),
            situate("B200", HALF),
            situate("GeForce RTX 4090", HALF),
            situate("A100 80GB SXM", HALF),
            situate("H200 SXM", ["--kv-cache-dtype", "fp8"], dtype="float32"),
        ],
    ),
    (
        "nvfp4-without-fp4",
        Severity.WARNING,
        [situate("H200 SXM", quantization_config=NVFP4)],
        [situate("B200", quantization_config=NVFP4), situate("H200 SXM", quantization_config=GPTQ)],
    ),
    (
        "fp8-weights-unpacked",
        Severity.WARNING,
        [
            situate("A100 80GB SXM", quantization_config=FP8),
            situate("A100 80GB SXM", quantization_config=FP8_GROUPS),
            situate("A100 80GB SXM", ["--quantization", "fp8"]),
        ],
        [
            situate("L40S", quantization_config=FP8),
            situate("A100 80GB SXM", quantization_config=GPTQ),
            blind(situate(quantization_config=FP8), **VOLTA),
        ],
    ),
    (
        "fp8-weights-unsupported",
        Severity.ERROR,
        [blind(situate(quantization_config=FP8), **VOLTA)],
        [blind(situate(quantization_config=FP8), **T4), blind(situate(quantization_config=GPTQ), **VOLTA)],
    ),
    (
        "fp8-cache-stored-only",
        Severity.NOTE,
        [situate("A100 80GB SXM", ["--kv-cache-dtype", "fp8"])],
        [
            situate("L40S", ["--kv-cache-dtype", "fp8"]),
            situate("A100 80GB SXM"),
            blind(situate(flags=["--kv-cache-dtype", "fp8"]), **T4),
        ],
    ),
    (
        "fp8-cache-unsupported",
        Severity.ERROR,
        [blind(situate(flags=["--kv-cache-dtype", "fp8"]), **T4)],
        [situate("A100 80GB SXM", ["--kv-cache-dtype", "fp8"]), blind(situate(), **T4)],
    ),
    (
        "weights-do-not-fit",
        Severity.ERROR,
        [situate("GeForce RTX 5090"), situate("H100 SXM", weights=75 * 1024**3)],
        [
            situate("GeForce RTX 5090", ["--max-model-len", "8k"], quantization_config=GPTQ),
            situate("4x GeForce RTX 5090", ["-tp", "4", "--max-model-len", "8k"]),
        ],
    ),
    (
        "context-does-not-fit",
        Severity.ERROR,
        [
            situate("H100 SXM", ["--gpu-memory-utilization", "0.75"]),
            situate("GeForce RTX 5090", quantization_config=GPTQ, full_attention_interval=1),
        ],
        [
            situate("H100 SXM", ["--gpu-memory-utilization", "0.75", "--max-model-len", "8192"]),
            situate("H100 SXM", ["--gpu-memory-utilization", "0.75", "--max-model-len", "auto"]),
            situate("GeForce RTX 5090"),
            situate("H200 SXM"),
        ],
    ),
    (
        "context-barely-fits",
        Severity.WARNING,
        [situate("H200 SXM", ["--kv-cache-memory-bytes", str(341 * 51_380_224)])],
        [
            situate("H200 SXM", ["--kv-cache-memory-bytes", str(380 * 51_380_224)]),
            situate("H200 SXM", ["--kv-cache-memory-bytes", str(300 * 51_380_224)]),
        ],
    ),
    (
        "split-does-not-divide-heads",
        Severity.ERROR,
        [
            situate("8x H200 SXM", ["-tp", "5"]),
            situate("8x H200 SXM", ["-tp", "6"], linear_num_key_heads=None, full_attention_interval=None),
        ],
        [situate("8x H200 SXM", ["-tp", "8"]), situate("8x H200 SXM", ["-tp", "4"])],
    ),
    (
        "too-few-gpus",
        Severity.ERROR,
        [situate("H200 SXM", ["-tp", "2"]), situate("2x H200 SXM", ["-tp", "2", "-pp", "2"])],
        [situate("2x H200 SXM", ["-tp", "2"]), situate("H200 SXM", ["-tp", "2", "--nnodes", "2"])],
    ),
    (
        "context-above-native",
        Severity.ERROR,
        [situate(flags=["--max-model-len", "262145"]), situate(flags=["--max-model-len", "1M"])],
        [
            situate(flags=["--max-model-len", "262144"]),
            situate(flags=["--max-model-len", "1M"], rope_parameters=YARN),
            situate(flags=["--max-model-len", "1M", "--hf-overrides", json.dumps({"rope_parameters": YARN})]),
        ],
    ),
    (
        "static-yarn-for-short-prompts",
        Severity.WARNING,
        [
            situate(profile="interactive", rope_parameters=YARN, flags=["--max-model-len", "1M"]),
            situate(rope_parameters=YARN, flags=["--max-model-len", "32768"]),
            situate(flags=["--max-model-len", "32k", "--hf-overrides", json.dumps({"rope_parameters": YARN})]),
        ],
        [
            situate(profile="context", rope_parameters=YARN, flags=["--max-model-len", "1M"]),
            situate(profile="interactive"),
        ],
    ),
    (
        "mtp-more-tokens-than-heads",
        Severity.NOTE,
        [situate(flags=mtp(3)), situate(flags=["--spec-method", "mtp", "--spec-tokens", "2"])],
        [situate(flags=mtp(1)), situate(flags=mtp(3), mtp_num_hidden_layers=3), situate()],
    ),
    (
        "mtp-tokens-uneven",
        Severity.ERROR,
        [situate(flags=mtp(3), mtp_num_hidden_layers=None, num_nextn_predict_layers=2)],
        [situate(flags=mtp(4), mtp_num_hidden_layers=2), situate(flags=mtp(1), mtp_num_hidden_layers=2)],
    ),
    (
        "mtp-without-heads",
        Severity.ERROR,
        [situate(flags=mtp(1), mtp_num_hidden_layers=0)],
        [situate(mtp_num_hidden_layers=0), situate(flags=mtp(1))],
    ),
    (
        "reasoning-parser-missing",
        Severity.WARNING,
        [
            without(situate(), "--reasoning-parser"),
            without(situate(model=SHIPPED, files=False), "--reasoning-parser"),
            situate(flags=["--reasoning-parser", "deepseek_r1"]),
        ],
        [situate(), without(situate(model_type="llama"), "--reasoning-parser")],
    ),
    (
        "tool-parser-missing",
        Severity.WARNING,
        [without(situate(), "--enable-auto-tool-choice"), without(situate(), "--tool-call-parser")],
        [situate(), without(situate(model_type="llama"), "--tool-call-parser")],
    ),
    (
        "prefix-caching-off",
        Severity.ERROR,
        [situate(flags=["--no-enable-prefix-caching"])],
        [without(situate(), "--enable-prefix-caching")],
    ),
    (
        "prompt-tokens-details-missing",
        Severity.WARNING,
        [
            without(situate(), "--enable-prompt-tokens-details"),
            situate(flags=["--no-enable-prompt-tokens-details"]),
        ],
        [situate()],
    ),
    (
        "vllm-too-old",
        Severity.ERROR,
        [situate(vllm="0.16.2"), situate(model=SHIPPED, files=False, vllm="0.9.0")],
        [situate(vllm="0.17.0"), situate(vllm="0.100.0rc1"), situate(model_type="llama", vllm="0.9.0")],
    ),
]


def pick(index: int):
    return [
        pytest.param(rule, severity, case, id=f"{rule}-{number}")
        for rule, severity, *both in CASES
        for number, case in enumerate(both[index])
    ]


def found(situation: Situation, rule: str):
    return [finding for finding in examine(situation) if finding.rule == rule]


@pytest.mark.parametrize(("rule", "severity", "situation"), pick(0))
def test_a_rule_fires(rule, severity, situation):
    (finding,) = found(situation, rule)
    assert finding.severity is severity
    assert "$" not in finding.message
    for way in finding.ways_out:
        situation.line.amend(way.set_flags, way.remove_flags, "fix")


@pytest.mark.parametrize(("rule", "severity", "situation"), pick(1))
def test_a_near_miss_does_not_fire(rule, severity, situation):
    assert found(situation, rule) == []


def test_every_rule_has_its_cases():
    assert [rule for rule, *_ in CASES] == [rule.id for rule in RULES]
    assert all(fires and misses for _, _, fires, misses in CASES)


@pytest.mark.parametrize(
    ("rule", "situation"),
    [
        (rule.id, situation)
        for rule in RULES
        for situation in [
            {
                "too-few-gpus": blind(situate(), gpu_count=None),
                "vllm-too-old": situate(vllm=None),
                "split-does-not-divide-heads": situate("8x H200 SXM", ["-tp", "2"], files=False),
                "mtp-more-tokens-than-heads": situate(flags=mtp(2), mtp_num_hidden_layers=None),
                "mtp-tokens-uneven": situate(flags=mtp(2), mtp_num_hidden_layers=None),
                "mtp-without-heads": situate(flags=mtp(2), mtp_num_hidden_layers=None),
                "context-above-native": situate(flags=["--max-model-len", "300k"], files=False),
                "nvfp4-without-fp4": blind(situate(), compute_capability=None),
                "fp8-weights-unpacked": situate("A100 80GB SXM", files=False),
                "fp8-weights-unsupported": blind(situate(files=False), **VOLTA),
                "fp8-cache-stored-only": situate("A100 80GB SXM", files=False),
                "fp8-cache-unsupported": blind(situate(files=False), **T4),
            }.get(rule.id, situate(files=False))
        ]
        if rule.id not in {"prefix-caching-off", "prompt-tokens-details-missing"}
    ],
)
def test_a_rule_without_its_fact_says_unknown(rule, situation):
    (finding,) = found(situation, rule)
    assert finding.severity is Severity.UNKNOWN
    assert finding.message.startswith("not checked, for want of ")


# Every way out with flags takes its finding away.
@pytest.mark.parametrize(("rule", "severity", "situation"), pick(0))
def test_each_way_out_leads_out(rule, severity, situation):
    (finding,) = found(situation, rule)
    for way in finding.ways_out:
        if way.set_flags or way.remove_flags:
            line = situation.line.amend(way.set_flags, way.remove_flags, "fix")
            assert found(dataclasses.replace(situation, line=line), rule) == [], way.description


def test_the_hopper_rule_gives_both_ways_out():
    (finding,) = found(situate("H200 NVL", HALF), "hopper-float16-fp8-cache")
    assert [(way.set_flags, way.remove_flags) for way in finding.ways_out] == [
        ({"--dtype": "bfloat16"}, ()),
        ({"--kv-cache-dtype": "auto"}, ()),
    ]
    assert "For FP8 input, output must have dtype BF16" in finding.message


@pytest.mark.parametrize("hardware", ["H100 SXM", "H100 NVL", "H200 SXM", "H200 NVL"])
def test_the_shipped_recipe_starts_a_float16_build_on_hopper(hardware):
    situation = situate(hardware, model=SHIPPED, profile="interactive", dtype="float16", quantization_config=GPTQ)
    assert found(situation, "hopper-float16-fp8-cache") == []
    (finding,) = found(
        situate(hardware, ["--kv-cache-dtype", "fp8"], model=SHIPPED, dtype="float16", quantization_config=GPTQ),
        "hopper-float16-fp8-cache",
    )
    assert "(gptq build)" in finding.message


@pytest.mark.parametrize("profile", ["interactive", "shared", "context"])
@pytest.mark.parametrize(
    "hardware", ["H100 SXM", "H200 SXM", "H200 NVL", "B200", "RTX PRO 6000 Blackwell Server Edition"]
)
def test_the_shipped_recipe_is_clean_where_it_is_meant_to_run(hardware, profile):
    findings = examine(situate(hardware, model=SHIPPED, profile=profile))
    assert {finding.severity for finding in findings} <= {Severity.NOTE}
    assert choose_exit_code(findings) == 0


def test_the_worst_comes_first():
    flags = [*HALF, "--no-enable-prompt-tokens-details", *mtp(2)]
    severities = [finding.severity for finding in examine(situate(flags=flags, vllm=None))]
    assert severities == [Severity.ERROR, Severity.WARNING, Severity.UNKNOWN, Severity.NOTE]


def test_a_context_that_does_not_fit_is_shortened_to_one_that_does():
    situation = situate("H100 SXM", ["--gpu-memory-utilization", "0.75"])
    (finding,) = found(situation, "context-does-not-fit")
    lengths = [int(way.set_flags["--max-model-len"]) for way in finding.ways_out if "--max-model-len" in way.set_flags]
    assert len(lengths) == 1
    assert 8192 <= lengths[0] < 262144
    assert lengths[0] % 1024 == 0


def test_yarn_is_offered_where_the_config_keeps_the_length():
    nested = {"model_type": "qwen3_5", "text_config": HYBRID}
    situation = dataclasses.replace(situate(flags=["--max-model-len", "1000000"]), files=ModelFiles(nested))
    (finding,) = found(situation, "context-above-native")
    overrides = json.loads(finding.ways_out[1].set_flags["--hf-overrides"])["text_config"]
    assert overrides["max_position_embeddings"] == 1_048_576
    assert overrides["rope_parameters"] == {"rope_theta": 10000000, **YARN}


def test_the_guide_lists_every_rule_with_its_severity():
    page = (Path(__file__).resolve().parents[2] / "docs" / "guides" / "recipes.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([a-z0-9-]+)` \| (error|warning|note) \|", page, flags=re.MULTILINE)
    assert listed == [(rule.id, rule.severity.value) for rule in RULES]
