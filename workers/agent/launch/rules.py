"""The known ways in which an engine fails to start, as data: what to look for in its log, why, and the ways out.

A pattern is searched in one line at a time. Its named groups fill the braces of the explanation and the flags.
The order is the rank: of several that match, the first names the cause, the later ones its consequences.
A way out without flags is for a person to take; `--apply-fix` never takes it.
"""

import re
from dataclasses import dataclass

from workers.agent.preflight.findings import WayOut


@dataclass(frozen=True, slots=True)
class FailureRule:
    """One known failure; `within` limits it to the start-up phases named, empty = any."""

    id: str
    title: str
    patterns: tuple[re.Pattern[str], ...]
    explanation: str
    ways_out: tuple[WayOut, ...]
    within: frozenset[str] = frozenset()


def _any(*patterns: str) -> tuple[re.Pattern[str], ...]:
    return tuple(re.compile(pattern) for pattern in patterns)


_OUT_OF_MEMORY = r"(?:OutOfMemoryError|RuntimeError): CUDA out of memory"
"""As an error only: an autotuner that runs out of memory warns, and tries another kernel."""

RULES = (
    FailureRule(
        id="hopper-fp8-float16",
        title="a float16 model cannot run with an FP8 KV cache on Hopper",
        # Older builds put `mha_fwd, …flash_api.cpp:LINE,` before the words; both end in the same clause.
        patterns=_any(r"(?:RuntimeError|mha_fwd)\b.*For FP8 input, output must have dtype BF16"),
        explanation=(
            "FlashAttention 3, which vLLM picks on Hopper, quantizes the query with an FP8 cache and then writes "
            "bfloat16 only; this model's activations are float16."
        ),
        ways_out=(
            WayOut("compute in bfloat16 and keep the FP8 cache", set_flags={"--dtype": "bfloat16"}),
            WayOut("keep float16 and leave the cache unquantized", set_flags={"--kv-cache-dtype": "auto"}),
        ),
    ),
    FailureRule(
        id="driver-too-old",
        title="the NVIDIA driver is too old for this build of vLLM",
        patterns=_any(
            r"NVIDIA driver on your system is too old",
            r"CUDA driver version is insufficient for CUDA runtime version",
        ),
        explanation="PyTorch was built for a newer CUDA than this driver serves.",
        ways_out=(
            WayOut("update the NVIDIA driver to one for the CUDA version that vLLM was built for"),
            WayOut("install a vLLM build for the CUDA version that nvidia-smi shows"),
        ),
    ),
    FailureRule(
        id="no-gpu",
        title="no GPU can be seen",
        patterns=_any(
            r"Failed to infer device type",
            r"No CUDA GPUs are available",
            r"Found no NVIDIA driver on your system",
        ),
        explanation="vLLM found no device to run on: no driver, none visible, or a build for other hardware.",
        ways_out=(WayOut("check nvidia-smi, CUDA_VISIBLE_DEVICES and, in a container, that it was given the GPUs"),),
    ),
    FailureRule(
        id="port-in-use",
        title="the port is taken",
        patterns=_any(
            r"\[Errno \d+\] .*[Aa]ddress already in use",
            r"OSError: .*[Aa]ddress already in use",
        ),
        explanation="Another process listens where the engine has to.",
        ways_out=(
            WayOut("stop that process; `ss -ltnp` names it"),
            WayOut("take another port with --port"),
        ),
    ),
    FailureRule(
        id="unknown-flag",
        title="this vLLM does not know {flag}",
        patterns=_any(r"error: unrecognized arguments: (?P<flag>--[^\s=]+)"),
        explanation="The flag is misspelt, or belongs to another version of vLLM.",
        ways_out=(WayOut("leave the flag out", remove_flags=("{flag}",)),),
    ),
    FailureRule(
        id="bad-flag-value",
        title="vLLM does not accept the value of {flag}",
        patterns=_any(r"error: argument (?:\S+/|-\w, )*(?P<flag>--[\w.-]+)\S*: "),
        explanation="The value is not one that this version of vLLM takes.",
        ways_out=(WayOut("leave the flag out, for vLLM's default", remove_flags=("{flag}",)),),
    ),
    FailureRule(
        id="model-gated",
        title="the model is gated, and this machine has no access to it",
        patterns=_any(r"trying to access a gated repo", r"Cannot access gated repo", r"GatedRepoError"),
        explanation="Its owner lets in only accounts that accepted the licence.",
        ways_out=(WayOut("accept the licence on the model's page, and set HF_TOKEN to a token of that account"),),
    ),
    FailureRule(
        id="weights-missing",
        title="the model has no weights here",
        patterns=_any(r"Cannot find any model weights with"),
        explanation="The folder or repository holds a configuration, but no file of weights that vLLM can load.",
        ways_out=(WayOut("download the whole model again, or point --model at the folder that holds *.safetensors"),),
    ),
    FailureRule(
        id="model-unreachable",
        title="the model cannot be downloaded from here",
        patterns=_any(
            r"We couldn't connect to '[^']*' to load",
            r"LocalEntryNotFoundError",
            r"OfflineModeIsEnabled",
        ),
        explanation="It is not in this machine's cache, and the hub does not answer or offline mode is on.",
        ways_out=(WayOut("download it beforehand and pass its folder as --model, or give this machine a way out"),),
    ),
    FailureRule(
        id="model-not-found",
        title="the model is not found",
        patterns=_any(
            r"is not a local folder and is not a valid model identifier",
            r"Invalid repository ID or local directory specified",
            r"Repo id must be in the form",
            r"Repository Not Found for url",
            r"RepositoryNotFoundError",
        ),
        explanation="It is no folder on this machine and no repository that can be read from here.",
        ways_out=(WayOut("check --model: a folder with a config.json, or NAMESPACE/NAME on Hugging Face"),),
    ),
    FailureRule(
        id="trust-remote-code",
        title="the model brings code of its own",
        patterns=_any(
            r"pass the argument `trust_remote_code=True`",
            r"setting `trust_remote_code=True`|`trust_remote_code=True` in LLM or using",
            r"set the option `trust_remote_code=True`",
        ),
        explanation="vLLM runs a repository's code only when told to.",
        # No flags: to run a stranger's code is a person's decision.
        ways_out=(WayOut("read that code, and if you trust it pass --trust-remote-code after `--`"),),
    ),
    FailureRule(
        id="architecture-unknown",
        title="this vLLM does not know the model's architecture",
        patterns=_any(
            r"Model architectures \[.*\] are not supported for now",
            r"Transformers does not recognize this architecture",
        ),
        explanation="The model is newer than the vLLM or the transformers that is installed.",
        ways_out=(WayOut("upgrade vLLM, and transformers with it"),),
    ),
    FailureRule(
        id="no-common-block-size",
        title="no attention kernel takes a cache block of {block} tokens",
        patterns=_any(r"No common block size for (?P<block>\d+)"),
        explanation="The layers' kernels have no block size in common that divides the one asked for.",
        ways_out=(WayOut("let vLLM choose the block size", remove_flags=("--block-size",)),),
    ),
    FailureRule(
        id="quantization-unsupported",
        title="this card cannot run {method} weights",
        patterns=_any(
            r"quantization method (?P<method>\S+) is not supported for the current GPU",
            r"(?P<method>\S+) quantization is currently not supported",
        ),
        explanation="The kernels for this quantization need a newer compute capability.",
        ways_out=(WayOut("serve another build of the model: BF16, or GPTQ/AWQ 4-bit for older cards"),),
    ),
    FailureRule(
        id="dtype-for-quantization",
        title="these quantized weights cannot be computed in {asked}",
        patterns=_any(
            r"(?P<asked>torch\.\w+) is not supported for quantization method \S+ "
            r"Supported dtypes: \[torch\.(?P<dtype>\w+)"
        ),
        explanation="The kernels of this quantization take other activations.",
        ways_out=(WayOut("compute in a dtype that they take", set_flags={"--dtype": "{dtype}"}),),
    ),
    FailureRule(
        id="bfloat16-unsupported",
        title="this card has no bfloat16",
        patterns=_any(r"Bfloat16 is only supported on GPUs with compute capability of at least"),
        explanation="Cards before Ampere compute in float16.",
        ways_out=(WayOut("compute in float16", set_flags={"--dtype": "half"}),),
    ),
    FailureRule(
        id="fp8-cache-unsupported",
        title="this card cannot hold an FP8 KV cache",
        patterns=_any(r"FP8 KV cache is not supported (?:by|on) "),
        explanation="The attention kernel needs native FP8, which cards before Ada and Hopper lack.",
        ways_out=(WayOut("leave the cache unquantized", set_flags={"--kv-cache-dtype": "auto"}),),
    ),
    FailureRule(
        id="context-above-native",
        title="the context asked for is longer than the model's own",
        patterns=_any(
            r"User-specified max_model_len \(\d+\) is greater than the derived max_model_len "
            r"\(\w+=(?P<native>\d+)(?:\.0)?\b"
        ),
        explanation="Positions past {native} tokens have no meaning to this model without a RoPE scaling.",
        ways_out=(WayOut("serve the model's own context", set_flags={"--max-model-len": "{native}"}),),
    ),
    FailureRule(
        id="heads-not-divisible",
        title="the attention heads do not divide over {tp} GPUs",
        patterns=_any(r"attention heads \(\d+\) must be divisible by tensor parallel size \((?P<tp>\d+)\)"),
        explanation="Tensor parallelism gives each GPU the same number of heads.",
        ways_out=(WayOut("run on one GPU, or pass a --tensor-parallel-size that divides the heads",
                         set_flags={"--tensor-parallel-size": "1"}),),
    ),
    FailureRule(
        id="context-too-long-for-cache",
        title="one request of the longest context does not fit into the KV cache",
        patterns=_any(
            r"larger than the available KV cache memory.*estimated maximum model length is (?P<fits>\d+)",
            r"max seq len \(\d+\) is larger than the maximum number of tokens "
            r"that can be stored in KV cache \((?P<fits>\d+)\)",
        ),
        explanation="What is left of the memory beside the weights holds {fits} tokens.",
        ways_out=(
            WayOut("serve the context that fits", set_flags={"--max-model-len": "{fits}"}),
            WayOut("give the engine more of the GPU", set_flags={"--gpu-memory-utilization": "0.95"}),
        ),
    ),
    FailureRule(
        id="no-memory-for-cache",
        title="the weights leave no memory for the KV cache",
        patterns=_any(
            r"No available memory for the cache blocks",
            r"larger than the available KV cache memory",
        ),
        explanation="The model loads, but no block of cache fits beside it.",
        ways_out=(
            WayOut("give the engine more of the GPU", set_flags={"--gpu-memory-utilization": "0.95"}),
            WayOut("serve a smaller or quantized build, or spread it with --tensor-parallel-size"),
        ),
    ),
    FailureRule(
        id="memory-taken",
        title="another process holds the GPU's memory",
        patterns=_any(r"Free memory on device .*\((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) on startup"),
        explanation="{free} of {total} GiB are free, less than the engine was told to take.",
        ways_out=(
            WayOut("stop what runs there; nvidia-smi names it"),
            WayOut("take a smaller share with --gpu-memory-utilization"),
        ),
    ),
    FailureRule(
        id="weights-out-of-memory",
        title="the weights do not fit into the GPU's memory",
        patterns=_any(r"Failed to load model - not enough GPU memory", _OUT_OF_MEMORY),
        explanation="Memory ran out while the weights were loaded.",
        ways_out=(
            WayOut("spread the model over more GPUs with --tensor-parallel-size"),
            WayOut("serve a quantized build of the model"),
        ),
        within=frozenset({"launching", "loading weights"}),
    ),
    FailureRule(
        id="cuda-out-of-memory",
        title="the GPU ran out of memory beside the weights",
        patterns=_any(_OUT_OF_MEMORY),
        explanation="Activations, graphs or the sampler needed more than the engine had left free.",
        ways_out=(
            WayOut("leave more of the GPU free", set_flags={"--gpu-memory-utilization": "0.85"}),
            WayOut("compute fewer tokens at once", set_flags={"--max-num-batched-tokens": "4096"}),
            WayOut("compute fewer requests at once", set_flags={"--max-num-seqs": "8"}),
        ),
    ),
)  # fmt: skip
