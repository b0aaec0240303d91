"""Known failures in logs as vLLM writes them, and lines that look alike and are none."""

import pytest

from workers.agent.launch.failures import Recogniser, advise
from workers.agent.launch.rules import RULES

CORE = "(EngineCore_DP0 pid=4242) ERROR 11-30 12:01:38 [core.py:1100] "
SERVER = "(APIServer pid=4001) "

# Rule, the telling line, the first way out's flags.
KNOWN = [
    (
        "hopper-fp8-float16",
        CORE
        + "RuntimeError: For FP16/BF16 input, output must have the same dtype as inputs. For FP8 input, output must have dtype BF16",
        "with --dtype bfloat16",
    ),
    (
        "hopper-fp8-float16",
        CORE
        + "RuntimeError: mha_fwd, /workspace/.deps/vllm-flash-attn-src/hopper/flash_api.cpp:881, "
        + "For FP16/BF16 input, output must have the same dtype as inputs. For FP8 input, output must have dtype BF16",
        "with --dtype bfloat16",
    ),
    (
        "driver-too-old",
        CORE + "RuntimeError: The NVIDIA driver on your system is too old (found version 12020).",
        "update",
    ),
    (
        "driver-too-old",
        CORE
        + "RuntimeError: Error 803: CUDA driver version is insufficient for CUDA runtime version",
        "update",
    ),
    ("no-gpu", "RuntimeError: Failed to infer device type, please set the environment variable", "check nvidia-smi"),
    ("no-gpu", CORE + "RuntimeError: No CUDA GPUs are available", "check nvidia-smi"),
    ("port-in-use", SERVER + "OSError: [Errno 98] Address already in use", "stop that process"),
    (
        "port-in-use",
        "ERROR:    [Errno 98] error while attempting to bind on address ('0.0.0.0', 8000): address already in use",
        "stop that process",
    ),
    ("unknown-flag", "api_server.py: error: unrecognized arguments: --nope", "without --nope"),
    ("unknown-flag", "vllm: error: unrecognized arguments: --nope=3 --other", "without --nope"),
    (
        "bad-flag-value",
        "vllm: error: argument --tensor-parallel-size/-tp: invalid int value: 'two'",
        "without --tensor-parallel-size",
    ),
    ("bad-flag-value", "vllm: error: argument --dtype: invalid choice: 'fp8'", "without --dtype"),
    (
        "model-gated",
        SERVER + "OSError: You are trying to access a gated repo.",
        "accept the licence",
    ),
    (
        "weights-missing",
        CORE + "RuntimeError: Cannot find any model weights with `/models/empty`",
        "download the whole",
    ),
    (
        "model-unreachable",
        SERVER + "OSError: We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them",
        "download it beforehand",
    ),
    (
        "model-not-found",
        SERVER
        + "huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/nowhere/model'.",
        "check --model",
    ),
    (
        "model-not-found",
        SERVER + "OSError: org/absent is not a local folder and is not a valid model identifier listed on the hub",
        "check --model",
    ),
    (
        "trust-remote-code",
        SERVER + "ValueError: Please pass the argument `trust_remote_code=True` to allow custom code to be run.",
        "read that code",
    ),
    (
        "architecture-unknown",
        SERVER + "ValueError: Model architectures ['NextForCausalLM'] are not supported for now. Supported: [...]",
        "upgrade vLLM",
    ),
    (
        "no-common-block-size",
        CORE + "ValueError: No common block size for 16 (CPU_ATTN: [MultipleOf(32)])",
        "without --block-size",
    ),
    (
        "quantization-unsupported",
        SERVER
        + "  Value error, The quantization method modelopt_fp4 is not supported for the current GPU. Minimum capability: 100. Current capability: 90.",
        "serve another build",
    ),
    (
        "dtype-for-quantization",
        SERVER
        + "  Value error, torch.bfloat16 is not supported for quantization method awq. Supported dtypes: [torch.float16]",
        "with --dtype float16",
    ),
    (
        "bfloat16-unsupported",
        CORE + "ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0. Your Tesla T4",
        "with --dtype half",
    ),
    (
        "fp8-cache-unsupported",
        CORE
        + "ValueError: FP8 KV cache is not supported by the Triton attention backend on RTX 3090 (compute capability 8.6);",
        "with --kv-cache-dtype auto",
    ),
    (
        "context-above-native",
        SERVER
        + "  Value error, User-specified max_model_len (500000) is greater than the derived max_model_len (max_position_embeddings=262144.0 or model_max_length=None in model's config.json).",
        "with --max-model-len 262144",
    ),
    (
        "heads-not-divisible",
        SERVER
        + "  Value error, Total number of attention heads (40) must be divisible by tensor parallel size (3).",
        "with --tensor-parallel-size 1",
    ),
    (
        "context-too-long-for-cache",
        CORE
        + "ValueError: To serve at least one request with the model's max seq len (262144), (16.0 GiB KV cache is needed, which is larger than the available KV cache memory (6.2 GiB). Based on the available memory, the estimated maximum model length is 101568. Try increasing",
        "with --max-model-len 101568",
    ),
    (
        "context-too-long-for-cache",
        CORE
        + "ValueError: The model's max seq len (262144) is larger than the maximum number of tokens that can be stored in KV cache (90112). Try increasing",
        "with --max-model-len 90112",
    ),
    (
        "no-memory-for-cache",
        CORE + "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
        "with --gpu-memory-utilization 0.95",
    ),
    (
        "memory-taken",
        CORE
        + "ValueError: Free memory on device cuda:0 (9.1/79.2 GiB) on startup is less than desired GPU memory utilization (0.9, 71.28 GiB).",
        "stop what runs there",
    ),
    (
        "cuda-out-of-memory",
        CORE + "RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests.",
        "with --gpu-memory-utilization 0.85",
    ),
    (
        "weights-out-of-memory",
        CORE + "Failed to load model - not enough GPU memory. Try lowering --gpu-memory-utilization",
        "spread the model",
    ),
]  # fmt: skip

NEAR_MISSES = [
    "RuntimeError: For FP16/BF16 input, output must have the same dtype as inputs",
    "INFO: the note 'For FP8 input, output must have dtype BF16' is in the model card",
    "INFO [cuda.py:300] Using FlashAttention version 3",
    "WARNING [parallel.py:746] Address already in use. Retrying with a new port.",
    "WARNING [autotuner.py:80] CUDA out of memory while tuning; the next configuration is tried",
    "INFO [gpu_worker.py:760] Available KV cache memory: 61.2 GiB",
    "WARNING: The NVIDIA driver on your system is newer than this build was tested with",
    "INFO [arg_utils.py:10] non-default args: {'trust_remote_code': True, 'model': 'x'}",
    "INFO: user asked: is the model not found, or are there unrecognized arguments?",
    "WARNING [model.py:2660] max_model_len (262144) is close to the derived max_model_len",
    CORE + "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
]


def recognise(*lines: str, phase: str = "compiling"):
    recogniser = Recogniser()
    for line in lines:
        recogniser.hear(line, phase)
    return recogniser.verdict()


@pytest.mark.parametrize(("rule", "line", "advice"), KNOWN, ids=[f"{n}-{case[0]}" for n, case in enumerate(KNOWN)])
def test_a_known_failure_is_named_with_its_way_out(rule: str, line: str, advice: str) -> None:
    noise = ["INFO Starting to load model /models/x...", "Traceback (most recent call last):"]
    last = CORE + "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
    failure = recognise(*noise, line, last, phase="loading weights" if rule.startswith("weights-out") else "compiling")
    assert failure.rule == rule
    assert advise(failure.ways_out[0]).startswith(advice)
    assert "{" not in "".join([failure.title, failure.explanation, *map(advise, failure.ways_out)])


def test_every_rule_has_a_case() -> None:
    assert {rule.id for rule in RULES} == {rule for rule, _, _ in KNOWN}
    assert len({rule.id for rule in RULES}) == len(RULES)


@pytest.mark.parametrize("line", NEAR_MISSES)
def test_a_line_that_looks_alike_is_no_failure(line: str) -> None:
    assert recognise(line) is None


def test_running_out_of_memory_is_told_apart_by_the_phase() -> None:
    line = CORE + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity"
    assert recognise(line, phase="loading weights").rule == "weights-out-of-memory"
    assert recognise(line, phase="capturing graphs").rule == "cuda-out-of-memory"


def test_the_cause_outranks_its_consequences_wherever_they_stand() -> None:
    consequence = SERVER + "OSError: [Errno 98] Address already in use"
    cause = KNOWN[0][1]
    assert recognise(consequence, cause).rule == recognise(cause, consequence).rule == "hopper-fp8-float16"


def test_the_block_names_rule_reason_line_and_both_ways_out() -> None:
    block = recognise(KNOWN[1][1]).explain()
    assert block[0] == "a float16 model cannot run with an FP8 KV cache on Hopper (rule hopper-fp8-float16)"
    assert block[2].startswith("  the log says: RuntimeError: mha_fwd, /workspace/")
    assert block[3:] == [
        "  way out 1: with --dtype bfloat16 (compute in bfloat16 and keep the FP8 cache)",
        "  way out 2: with --kv-cache-dtype auto (keep float16 and leave the cache unquantized)",
    ]


def test_nobody_is_made_to_run_a_strangers_code() -> None:
    rule = next(rule for rule in RULES if rule.id == "trust-remote-code")
    assert not any(way.set_flags or way.remove_flags for way in rule.ways_out)
