"""What a start will take of each GPU's memory, and how many tokens the cache then holds.

    cache = memory · gpu-memory-utilization − weights − overhead

A hybrid is computed as vLLM lays it out: its layers are put into groups of equal count, every group draws blocks of
one size from one pool, and a block holds either as many tokens of attention as a state is large, or one state.
So only the full-attention groups grow with the context; a linear group takes the same few blocks at any length.

Checked against one measured run (vLLM 0.26, H200, 27B hybrid in BF16, window 262,144): 1,209,244 tokens with a BF16
cache and 2,369,842 with FP8, in blocks of 784 and 1,568 tokens. The block sizes come out exactly, the capacities
within 2 %, if the run had vLLM's default utilization of 0.92 and its default batch, which was not recorded.
"""

from dataclasses import dataclass
from math import ceil

from workers.agent.preflight.shape import Layers, LinearState, Shape
from workers.agent.preflight.situation import Missing, Situation, read_number

_GIB = 1024**3

UTILIZATION = 0.92
"""vLLM's default since the 0.2x releases, read in 0.32."""

_RUNTIME_BYTES = 1.0 * _GIB
"""CUDA context, kernels and allocator slack; a round figure that fits the measured run."""

_GRAPH_BYTES = 0.5 * _GIB
"""CUDA graphs; a round figure that fits the measured run. None with `--enforce-eager`."""

_LOGIT_BYTES = 8
"""One vocabulary row per request: float32 logits, and the sampler's copy."""

_TILE = 16
"""Block sizes of GPU attention kernels are multiples of this many tokens."""

_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "nvfp4": 0.5625}


@dataclass(frozen=True, slots=True)
class Estimate:
    """One GPU's memory in bytes; `window_blocks` is what one request of the longest context takes."""

    memory_bytes: int
    budget_bytes: int
    weights_bytes: int
    overhead_bytes: int
    block_tokens: int
    block_bytes: int
    growing_groups: int
    fixed_blocks: int
    context: int
    stated_cache_bytes: int | None = None

    @property
    def cache_bytes(self) -> int:
        """What is left for the cache; never below 0."""
        if self.stated_cache_bytes is not None:
            return self.stated_cache_bytes
        return max(0, self.budget_bytes - self.weights_bytes - self.overhead_bytes)

    @property
    def blocks(self) -> int:
        """Blocks in the pool."""
        return self.cache_bytes // self.block_bytes

    @property
    def window_blocks(self) -> int:
        """Blocks that one request of the longest context takes."""
        return ceil(self.context / self.block_tokens) * self.growing_groups + self.fixed_blocks

    @property
    def windows(self) -> float:
        """Requests of the longest context that fit at once, which vLLM logs as its maximum concurrency."""
        return self.blocks / self.window_blocks

    @property
    def capacity_tokens(self) -> int:
        """Tokens in the cache, as vLLM reports them: windows times the longest context."""
        return int(self.windows * self.context)

    @property
    def longest_context(self) -> int:
        """The longest context of which one request fits, down to a multiple of 1,024 tokens; 0 when none does."""
        spare = max(0, self.blocks - self.fixed_blocks) // max(1, self.growing_groups)
        return spare * self.block_tokens // 1024 * 1024


def estimate(situation: Situation) -> Estimate:
    """Estimates one GPU's memory; raises `Missing` for a fact or a kind of model that is not known."""
    line, shape, context = situation.line, situation.shape, situation.context
    ways = situation.number("--tensor-parallel-size", 1)
    stages = situation.number("--pipeline-parallel-size", 1)
    stated = line.value("--kv-cache-memory-bytes")
    block_tokens, block_bytes, growing, fixed = _lay_out(situation, shape, context, ways, stages)
    return Estimate(
        memory_bytes=situation.memory_bytes,
        budget_bytes=int(situation.memory_bytes * read_utilization(situation)),
        weights_bytes=ceil(weigh(situation) / (ways * stages)),
        overhead_bytes=_count_overhead(situation, shape, ways),
        block_tokens=block_tokens,
        block_bytes=block_bytes,
        growing_groups=growing,
        fixed_blocks=fixed,
        context=context,
        stated_cache_bytes=None if stated is None else read_number(stated, "--kv-cache-memory-bytes"),
    )


def read_utilization(situation: Situation) -> float:
    """Returns the share of the GPU's memory that vLLM may take."""
    stated = situation.line.value("--gpu-memory-utilization")
    try:
        return UTILIZATION if stated is None else float(stated)
    except ValueError:
        raise Missing(f"a number in --gpu-memory-utilization {stated}") from None


def weigh(situation: Situation) -> int:
    """Returns the weights' bytes over all GPUs: those of the files, else the parameters by their dtype."""
    files, quantization = situation.files, situation.quantization
    loaded_as_stored = quantization is None or situation.shape.quantization is not None
    if files is not None and files.weights_bytes is not None and loaded_as_stored:
        return files.weights_bytes
    inner, outer = count_parameters(situation.shape, situation.draft_tokens > 0)
    if situation.line.is_on("--language-model-only") is not True:
        outer += situation.shape.vision_parameters
    wide = _BYTES.get(situation.dtype, 2.0)
    if quantization is None:
        return int((inner + outer) * wide)
    bits = situation.know(quantization.bits, f"how many bits a {quantization.weights} weight takes")
    return int(inner * bits / 8 + outer * wide)


def count_parameters(shape: Shape, drafting: bool) -> tuple[int, int]:
    """Counts the parameters inside the layers, which quantization shrinks, and those of the embeddings.

    Norms and biases are left out: less than a thousandth. Raises `Missing` for an architecture it cannot count.
    """
    know = Situation.know
    layers = know(shape.layers, "what this hybrid's layers keep")
    if shape.latent is not None:
        raise Missing("the weights' size, which is not computed for latent attention")
    hidden, heads = know(shape.hidden, "hidden_size"), know(shape.heads, "num_attention_heads")
    width = know(shape.head_dim, "head_dim")
    attention = hidden * width * (heads * (3 if shape.gated else 2) + 2 * know(shape.kv_heads, "num_key_value_heads"))
    mlp = _count_mlp(shape, hidden)
    inner = (layers.full + layers.sliding) * attention + (layers.full + layers.sliding + layers.linear) * mlp
    if layers.linear:
        inner += layers.linear * _count_linear(know(shape.linear, "the linear layers' sizes"), hidden)
    if drafting:
        inner += (shape.mtp_heads or 0) * (attention + mlp + 2 * hidden * hidden)
    return inner, know(shape.vocab, "vocab_size") * hidden * (1 if shape.tied else 2)


def _count_mlp(shape: Shape, hidden: int) -> int:
    """Counts one layer's MLP: three matrices (gate, up, down) for each expert, or once."""
    if shape.experts is None:
        return 3 * hidden * Situation.know(shape.intermediate, "intermediate_size")
    experts = shape.experts
    return hidden * (3 * (experts.count * experts.width + experts.shared_width) + experts.count)


def _count_linear(state: LinearState, hidden: int) -> int:
    """Counts one Gated DeltaNet layer: q, k, v, z, two gates per value head in, one matrix out."""
    keys, values = state.key_heads * state.key_dim, state.value_heads * state.value_dim
    return hidden * (2 * keys + 3 * values + 2 * state.value_heads)


def _count_overhead(situation: Situation, shape: Shape, ways: int) -> int:
    """Returns the bytes beside weights and cache: runtime, graphs, activations of one full step, logits."""
    wide = shape.intermediate or 0
    if shape.experts is not None:
        wide = shape.experts.active * shape.experts.width + shape.experts.shared_width
    graphs = 0.0 if situation.line.is_on("--enforce-eager") else _GRAPH_BYTES
    activations = situation.batched_tokens * (3 * wide / ways + 4 * (shape.hidden or 0)) * 2
    logits = situation.sequences * (shape.vocab or 0) * _LOGIT_BYTES
    return int(_RUNTIME_BYTES + graphs + activations + logits)


def _lay_out(situation: Situation, shape: Shape, context: int, ways: int, stages: int) -> tuple[int, int, int, int]:
    """Returns a block's tokens and bytes, the groups that grow with the context, and the blocks that do not."""
    layers = situation.know(shape.layers, "what this hybrid's layers keep")
    drafts = situation.draft_tokens
    full = ceil(layers.full / stages) + (shape.mtp_heads or 0 if drafts else 0)
    sliding, linear = ceil(layers.sliding / stages), ceil(layers.linear / stages)
    token_bytes = _count_token_bytes(shape, situation.cache_dtype, ways)
    block_tokens = situation.number("--block-size", _TILE)
    if linear:
        state = situation.know(shape.linear, "the linear layers' sizes")
        per_state = _count_state_bytes(state, situation, ways, drafts)
        block_tokens = max(block_tokens, ceil(per_state / token_bytes / _TILE) * _TILE)
    size = _choose_group(Layers(full, sliding, linear))
    # With prefix caching a state is kept at the last boundary and at the running end; each guess needs one more.
    fixed = ceil(linear / size) * ((2 if situation.prefix_caching else 1) + drafts)
    growing = ceil(full / size)
    if sliding:
        seen = min(context, (shape.window or context) + situation.batched_tokens)
        fixed += ceil(sliding / size) * (ceil(seen / block_tokens) + 1)
    return block_tokens, int(block_tokens * token_bytes * size), growing, fixed


def _choose_group(layers: Layers) -> int:
    """Returns the layers in a group: the rarest kind's count, or the commonest's if that is less than half more."""
    counts = [count for count in (layers.full, layers.sliding, layers.linear) if count]
    if not counts:
        raise Missing("the model's number of layers")
    return max(counts) if max(counts) < 1.5 * min(counts) else min(counts)


def _count_token_bytes(shape: Shape, dtype: str, ways: int) -> float:
    """Returns what one token takes in one attention layer on one GPU."""
    width = 1.0 if dtype.startswith(("fp8", "int8")) else _BYTES.get(dtype)
    if width is None:
        raise Missing(f"the size of a {dtype} cache entry")
    if shape.latent is not None:
        return shape.latent * width
    heads = Situation.know(shape.kv_heads, "num_key_value_heads")
    return 2 * max(1, heads // ways) * Situation.know(shape.head_dim, "head_dim") * width


def _count_state_bytes(state: LinearState, situation: Situation, ways: int, drafts: int) -> int:
    """Returns one layer's state for one sequence on one GPU: the convolution's tail, and a matrix per value head."""
    asked = situation.line.value("--mamba-ssm-cache-dtype") or "auto"
    dtype = (state.dtype or situation.dtype) if asked == "auto" else asked
    channels = 2 * state.key_heads * state.key_dim + state.value_heads * state.value_dim
    tail = channels * (state.kernel - 1 + drafts) * _BYTES.get(situation.dtype, 2.0)
    matrices = state.value_heads * state.value_dim * state.key_dim * _BYTES.get(dtype, 4.0)
    return ceil((tail + matrices) / ways)
