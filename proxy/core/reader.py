"""Reads requests and hashes their prompts, at a cost that follows what is new in them.

A conversation sends its whole past with every turn. The past is not parsed again: messages are cut out of the body as
raw bytes, and what a message comes to, after what precedes it, is remembered. The result is the same as that of
`prompt.read_prompt` and `Prompt.blocks`, which serve whatever is unusual.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import NamedTuple

import msgspec
from xxhash import xxh3_64_intdigest

from .blocks import Blocks, chain_from, root
from .prompt import Dialect, message_segment, odd_segment, read_prompt, tool_segment

# Blocks remembered, about 100 bytes each where nothing else holds them.
MOST_BLOCKS = 500_000


class Reading(NamedTuple):
    """What is known of a request before it is placed; fields as in `prompt.Prompt`, and the prompt's blocks."""

    model: str
    stream: bool
    exact_tokens: int | None
    blocks: Blocks
    reads_cache: bool = True


class ChatBody(msgspec.Struct, gc=False):
    """The parts of a chat request that are read."""

    model: str
    messages: list[msgspec.Raw]
    tools: list[msgspec.Raw] | None = None
    stream: object = False
    cache_salt: object = None
    prompt_logprobs: object = None


class Memory(NamedTuple):
    """What one piece came to: its block hashes, and where each ends in the whole prompt."""

    hashes: tuple[int, ...]
    ends: tuple[int, ...]


class PromptReader:
    """Reads bodies. It remembers only what it could compute again."""

    def __init__(self, bound: int = MOST_BLOCKS) -> None:
        self._decode = msgspec.json.Decoder(ChatBody).decode
        self._memories: dict[int, Memory] = {}
        self._bound = bound
        self._kept = 0

    def read(self, dialect: Dialect, body: bytes, seed: int) -> Reading:
        """Reads a request body under the fleet's secret seed.

        Raises:
            BadJson: it is not a JSON object, or nested too deeply to be read.
            MissingModel: it names no model.
        """
        if dialect is Dialect.CHAT:
            try:
                reading = self._read_chat(self._decode(body), seed)
            except (msgspec.MsgspecError, ValueError, RecursionError):
                reading = None  # not a plain chat request: the other way finds out what it is
            if reading is not None:
                return reading
        prompt = read_prompt(dialect, body)
        return Reading(prompt.model, prompt.stream, prompt.exact_tokens, prompt.blocks(seed), prompt.reads_cache)

    def _read_chat(self, request: ChatBody, seed: int) -> Reading | None:
        if not request.model:
            return None
        salt = request.cache_salt if isinstance(request.cache_salt, str) else ""
        start = root(seed, "chat", request.model, salt)
        hashes: list[int] = []
        ends: list[int] = []
        # A tool and a message of the same bytes are different pieces: the kind is part of what is looked up.
        digest = self._append(request.tools or (), True, start, hashes, ends)
        self._append(request.messages, False, digest, hashes, ends)
        if not hashes:
            return None
        blocks = Blocks(tuple(hashes), tuple(ends), len(hashes))
        return Reading(request.model, request.stream is True, None, blocks, request.prompt_logprobs is None)

    def _append(
        self, pieces: Iterable[msgspec.Raw], is_tool: bool, digest: int, hashes: list[int], ends: list[int]
    ) -> int:
        memories = self._memories
        for piece in pieces:
            key = xxh3_64_intdigest(piece, digest ^ is_tool)
            memory = memories.get(key)
            if memory is None:
                memory = self._remember(key, segment_of(bytes(piece), is_tool), digest, ends[-1] if ends else 0)
            hashes += memory.hashes
            ends += memory.ends
            digest = memory.hashes[-1]
        return digest

    def _remember(self, key: int, segment: bytes, digest: int, offset: int) -> Memory:
        memory = Memory(*chain_from(segment, digest, offset))
        self._memories[key] = memory
        self._kept += len(memory.hashes)
        while self._kept > self._bound and len(self._memories) > 1:
            oldest = next(iter(self._memories))
            self._kept -= len(self._memories.pop(oldest).hashes)
        return memory


def segment_of(piece: bytes, is_tool: bool) -> bytes:
    """Renders one piece of a chat request as it stands in the canonical prompt."""
    try:
        value = msgspec.json.decode(piece)
    except (msgspec.MsgspecError, ValueError):
        value = json.loads(piece)  # more lenient: lone surrogates, NaN
    if is_tool:
        return tool_segment(value)
    return message_segment(value) if isinstance(value, dict) else odd_segment(value)
