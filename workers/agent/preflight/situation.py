"""Everything an examination knows: a command line, the machine, the model's files, and what follows from them.

What follows is read through properties that raise `Missing` when a fact is not there; `examine` turns that into a
finding of its own, so that no rule passes for want of a fact.
"""

import re
from dataclasses import dataclass
from typing import TypeVar

from workers.agent.preflight.model import ModelFiles
from workers.agent.preflight.quantization import Quantization, name_method
from workers.agent.preflight.shape import Shape, read_shape
from workers.agent.recipe import CommandLine, HostFacts, overlay

_T = TypeVar("_T")

_GIB = 1024**3
_DTYPES = {"half": "float16", "float": "float32"}
_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([kmgKMG]?)")


class Missing(Exception):
    """A fact that a rule needs is not known; the message names it."""


@dataclass(frozen=True, slots=True)
class Situation:
    """What is to be examined; `files` and `vllm_version` are `None` when they are not on this machine."""

    line: CommandLine
    host: HostFacts
    files: ModelFiles | None
    profile: str | None = None
    vllm_version: str | None = None

    @property
    def shape(self) -> Shape:
        """The model's dimensions, with what `--hf-overrides` says in place."""
        files = self.know(self.files, "the model's config.json, which is not on this machine")
        return read_shape(overlay(files.config, self.line.read_object("--hf-overrides")))

    @property
    def capability(self) -> tuple[int, int]:
        """The GPU's compute capability."""
        return self.know(self.host.capability, "the GPU's compute capability")

    @property
    def quantization(self) -> Quantization | None:
        """How the weights are quantized: in the checkpoint, or while they are loaded."""
        stated = self.shape.quantization
        asked = self.line.value("--quantization")
        return name_method(asked) if stated is None and asked is not None else stated

    @property
    def dtype(self) -> str:
        """The dtype of the activations; vLLM takes a float32 checkpoint as bfloat16 where the GPU has it."""
        asked = self.line.value("--dtype") or "auto"
        if asked != "auto":
            return _DTYPES.get(asked, asked)
        stated = self.know(self.shape.dtype, "the dtype in the model's config.json")
        if stated == "float32":
            return "bfloat16" if self.capability >= (8, 0) else "float16"
        return stated

    @property
    def cache_dtype(self) -> str:
        """The KV cache's dtype as vLLM resolves it: `auto` is the checkpoint's own, else that of the activations."""
        asked = self.line.value("--kv-cache-dtype") or "auto"
        if asked != "auto":
            return asked
        own = self.shape.quantization.cache if self.shape.quantization else None
        return own or self.dtype

    @property
    def context(self) -> int:
        """The longest context asked for, in tokens; without `--max-model-len` it is the model's own."""
        asked = self.line.value("--max-model-len")
        if asked in {None, "auto", "-1"}:
            return self.know(self.shape.reach, "the model's longest context")
        return read_number(str(asked), "--max-model-len")

    @property
    def prefix_caching(self) -> bool:
        """Whether the prefix cache is on; it is by vLLM's default."""
        return self.line.is_on("--enable-prefix-caching") is not False

    @property
    def draft_tokens(self) -> int:
        """Tokens that multi-token prediction guesses in each step; 0 when it is off."""
        table = self.line.read_object("--speculative-config")
        method = table.get("method") or self.line.value("--spec-method") or ""
        stated = table.get("num_speculative_tokens", self.line.value("--spec-tokens"))
        return int(stated or 1) if "mtp" in str(method) else 0

    @property
    def memory_bytes(self) -> int:
        """One GPU's memory."""
        return self.know(self.host.memory_bytes, "the GPU's memory")

    @property
    def batched_tokens(self) -> int:
        """Tokens in one step; the defaults are those of vLLM 0.32 for its API server."""
        default = 16384 if self.memory_bytes >= 160 * _GIB else 8192 if self._is_large else 2048
        return self.number("--max-num-batched-tokens", default)

    @property
    def sequences(self) -> int:
        """Requests in one step; the defaults are those of vLLM 0.32 for its API server."""
        return self.number("--max-num-seqs", 1024 if self._is_large else 256)

    @property
    def _is_large(self) -> bool:
        return self.memory_bytes >= 70 * _GIB and not (self.host.name or "").startswith("A100")

    def number(self, name: str, default: int) -> int:
        """Returns a flag's whole number."""
        stated = self.line.value(name)
        return default if stated is None else read_number(stated, name)

    @staticmethod
    def know(fact: _T | None, name: str) -> _T:
        """Returns a fact; raises `Missing` with its name when it is not there."""
        if fact is None:
            raise Missing(name)
        return fact


def read_number(text: str, name: str) -> int:
    """Reads a whole number as vLLM does, `32k` and `1M` included; raises `Missing` for anything else."""
    found = _NUMBER.fullmatch(text.strip())
    if found is None:
        raise Missing(f"a number in {name} {text}")
    return int(float(found[1]) * _SUFFIXES.get(found[2], 1))
