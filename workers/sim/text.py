"""What a prompt looks like to the simulated model: rendered, cut into tokens, and answered.

The template and the tokens are the simulator's own; neither is any real model's.
A token is a short word with its leading space, a run of blanks or a few other bytes: about four bytes of English or
code. Cutting depends on the bytes alone, so an answer that comes back in a later prompt is cut as it was emitted.
"""

import json
import random
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

_TOKEN = rb" ?+[A-Za-z_]{1,8}+|\n\s*+|<\|[a-z_]{1,16}+\|>| ?+[^\sA-Za-z_]{1,4}+|\s"
_VOCABULARY = 151_936
_END = b"<|im_end|>"
_SHORTEST_ANSWER, _LONGEST_ANSWER = 16, 64

# Each word with its leading space is one token, so that an answer has as many tokens as words.
_WORDS = (
    "the", "cache", "holds", "a", "block", "and", "then", "each", "token", "goes", "home", "to", "its",
    "page", "where", "we", "read", "one", "more", "line", "of", "code", "so", "this", "test", "can",
    "pass", "before", "any", "slow", "path", "is", "taken", "again", "while", "long", "prompts", "share",
    "their", "first", "part",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt in tokens: the bytes of its full blocks, then the tokens after them."""

    blocks: tuple[bytes, ...]
    tail: tuple[bytes, ...]
    tokens: int


class Tokenizer:
    """Cuts text into tokens and full blocks of `block_size` tokens."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._token = re.compile(_TOKEN)
        # One match for each block instead of one object for each token keeps a prompt of 60k tokens under 10 ms.
        self._block = re.compile(rb"(?:%b){%d}+" % (_TOKEN, block_size))

    def cut(self, text: bytes) -> Prompt:
        """Cuts a rendered prompt."""
        blocks: list[bytes] = []
        position = 0
        while match := self._block.match(text, position):
            blocks.append(match[0])
            position = match.end()
        tail = self._token.findall(text, position)
        return Prompt(tuple(blocks), tuple(tail), len(blocks) * self._block_size + len(tail))

    def group(self, token_ids: Sequence[int]) -> Prompt:
        """Groups a prompt that came as token ids."""
        size = self._block_size
        pieces = [b"%d " % token for token in token_ids]
        full = len(pieces) // size * size
        blocks = tuple(b"".join(pieces[start : start + size]) for start in range(0, full, size))
        return Prompt(blocks, tuple(pieces[full:]), len(pieces))

    def encode(self, text: bytes) -> list[tuple[int, str]]:
        """Returns id and text of every token; ids are checksums, stable but not unique."""
        return [
            (zlib.crc32(piece) % _VOCABULARY, piece.decode("utf-8", "replace")) for piece in self._token.findall(text)
        ]


class Answer:
    """The text that follows one prompt: a function of the seed and the prompt's tokens alone."""

    end = _END
    """The bytes of the token that ends an answer; as in a later prompt, where a message ends with it."""

    def __init__(self, seed: int, prompt: Prompt, *, spaced: bool) -> None:
        digest = blake2b(b"%d\0" % seed, digest_size=16)
        for piece in (*prompt.blocks, *prompt.tail):
            digest.update(piece)
        self._random = random.Random(digest.digest())
        self._spaced = spaced
        self.natural_tokens = self._random.randint(_SHORTEST_ANSWER, _LONGEST_ANSWER)
        """Words before the model would stop on its own."""

    def word(self) -> str:
        """Returns the next token's text; a chat answer starts without a space, as it follows a line break."""
        word = _WORDS[int(self._random.random() * len(_WORDS))]
        if self._spaced:
            return " " + word
        self._spaced = True
        return word


def render_chat(
    messages: Sequence[dict[str, Any]], tools: Sequence[Any] | None, *, add_generation_prompt: bool
) -> bytes:
    """Renders a conversation: tools, then messages in order, then the head of the answer."""
    parts: list[str] = []
    if tools:
        listed = "\n".join(_dump(tool) for tool in tools)
        parts.append(f"<|im_start|>tools\n{listed}<|im_end|>\n")
    for message in messages:
        calls = "".join(f"<|call|>{_dump(call)}" for call in message.get("tool_calls") or ())
        reply = message.get("tool_call_id") or ""
        content = _flatten(message.get("content"))
        parts.append(f"<|im_start|>{message.get('role')}{reply}\n{content}{calls}<|im_end|>\n")
    if add_generation_prompt:
        parts.append("<|im_start|>assistant\n")
    return "".join(parts).encode("utf-8", "surrogatepass")


def _flatten(content: object) -> str:
    """Returns a message's text; what is not text stands as its JSON."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(_flatten_part(part) for part in content)
    return _dump(content)


def _flatten_part(part: object) -> str:
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    # A picture's bytes cost a model a bounded number of tokens, so its digest stands for it.
    return f"<|part|>{blake2b(_dump(part).encode('utf-8', 'surrogatepass'), digest_size=16).hexdigest()}"


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
