"""What a simulated worker is asked to be, and the shape that follows from it."""

import math
from dataclasses import dataclass

from workers.sim.hardware import Hardware, UnknownHardware, find_hardware

_NATIVE_CONTEXT_TOKENS = 262_144
"""The native window of the 27B hybrid that the speed anchors were measured with."""

_BLOCK_TOKENS = 784
"""vLLM's attention block for that model with a BF16 cache: raised until one attention page is as large as one
Gated DeltaNet state, which depends on the model and the cache's dtype, not on the card."""


class OptionsRefused(Exception):
    """The options cannot be served; the message says in one line which value and what to do."""


@dataclass(frozen=True, slots=True)
class SimOptions:
    """The options of `homing-worker sim`; `None` takes what the identity implies.

    `listen` is `HOST:PORT`; `time_scale` divides every delay; token counts are the simulator's own tokens.
    """

    listen: str
    identity: str
    model: str
    proxy: str | None = None
    join_token: str | None = None
    seed: int = 0
    time_scale: float = 1.0
    worker_id: str | None = None
    advertise: str | None = None
    max_model_len: int | None = None
    block_size: int | None = None
    capacity_tokens: int | None = None
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    prompt_tokens_details: bool = True
    force_include_usage: bool = False


@dataclass(frozen=True, slots=True)
class Shape:
    """The engine that the options describe; `capacity_tokens` may end in a part of a block, as vLLM reports it."""

    hardware: Hardware
    block_size: int
    capacity_tokens: int
    max_model_len: int

    @property
    def num_blocks(self) -> int:
        """Whole blocks in the cache."""
        return self.capacity_tokens // self.block_size


def resolve_shape(options: SimOptions) -> Shape:
    """Fills in what the identity implies; raises `OptionsRefused` when the engine could not start so."""
    try:
        hardware = find_hardware(options.identity)
    except UnknownHardware as unknown:
        raise OptionsRefused(str(unknown)) from unknown
    if not (math.isfinite(options.time_scale) and options.time_scale > 0):
        raise OptionsRefused(f"--time-scale {options.time_scale:g} must be a number above 0")
    if not options.model:
        raise OptionsRefused("--model is empty: give the name the worker serves")
    counts = {
        "--block-size": options.block_size,
        "--capacity-tokens": options.capacity_tokens,
        "--max-model-len": options.max_model_len,
        "--max-num-batched-tokens": options.max_num_batched_tokens,
        "--max-num-seqs": options.max_num_seqs,
    }
    for flag, count in counts.items():
        if count is not None and count < 1:
            raise OptionsRefused(f"{flag} {count} must be at least 1")
    return _fit(options, hardware)


def _fit(options: SimOptions, hardware: Hardware) -> Shape:
    """Fits the context into the cache, as vLLM does at start: one longest request must find room."""
    block_size = options.block_size or _BLOCK_TOKENS
    capacity = options.capacity_tokens or hardware.capacity_tokens
    room = capacity // block_size * block_size
    if room == 0:
        raise OptionsRefused(
            f"--capacity-tokens {capacity} is less than one block of {block_size} tokens: give at least one block"
        )
    longest = options.max_model_len or min(_NATIVE_CONTEXT_TOKENS, room)
    if longest > room:
        raise OptionsRefused(
            f"--max-model-len {longest} does not fit into the cache of {room} tokens in whole blocks: "
            f"lower it to {room} or raise --capacity-tokens"
        )
    return Shape(hardware, block_size, capacity, longest)
