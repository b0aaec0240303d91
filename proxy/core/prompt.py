"""A request body, read: which model, streamed or not, and the canonical prompt as the engine will cache it.

Reading only: the bytes go to the worker as they came. Key order and white space of the JSON do not reach the canonical
prompt; the order inside a tool's schema does, because chat templates render the schema as given. Whatever parses and
names a model is accepted, however odd its messages: judging them is the engine's business.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import cast

from xxhash import xxh3_128_hexdigest

from ..errors import BadJson, MissingModel
from .blocks import Blocks, chain, root

# Stands between the fields of a segment; 0x1f (unit separator) does not occur in rendered text.
SEPARATOR = b"\x1f"


class Dialect(StrEnum):
    """The forms in which a prompt can arrive."""

    CHAT = "chat"
    COMPLETIONS = "completions"


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is known of a request before it is placed.

    Attributes:
        dialect: the form it arrived in.
        model: the model as the client named it.
        stream: whether the client wants events.
        salt: the client's `cache_salt`, which separates caches in the engine; None when not given.
        segments: the canonical prompt, in rendering order.
        open_ended: the last segment is raw text that a longer prompt may continue.
        exact_tokens: prompt length where the client sent token ids; None otherwise.
        reads_cache: the engine will look into its cache; it does not where log probabilities of the prompt are asked
            for, and a hit of nothing then says nothing.
    """

    dialect: Dialect
    model: str
    stream: bool
    salt: str | None
    segments: tuple[bytes, ...]
    open_ended: bool = False
    exact_tokens: int | None = None
    reads_cache: bool = True

    def blocks(self, seed: int) -> Blocks:
        """Hashes the prompt under the fleet's secret seed."""
        return chain(
            self.segments,
            root(seed, self.dialect_root, self.model, self.salt or ""),
            open_ended=self.open_ended,
        )

    @property
    def dialect_root(self) -> str:
        """Token ids, raw text and chat renderings never share an engine's cache by their bytes."""
        if self.dialect is Dialect.CHAT:
            return "chat"
        return "text" if self.exact_tokens is None else "ids"


def read_prompt(dialect: Dialect, body: bytes) -> Prompt:
    """Reads a request body.

    Raises:
        BadJson: it is not a JSON object, or nested too deeply to be read.
        MissingModel: it names no model.
    """
    try:
        return prompt_of(dialect, read_object(body))
    except RecursionError:
        raise BadJson("The request body is nested too deeply. Send one JSON object.") from None


def prompt_of(dialect: Dialect, request: dict[str, object]) -> Prompt:
    """Reads a parsed request. What can be parsed can still be nested too deeply to be rendered: RecursionError."""
    model = request.get("model")
    if not isinstance(model, str) or not model:
        shown = "is missing" if "model" not in request else f"is {json.dumps(model)[:40]}"
        raise MissingModel(f"`model` {shown}; name one of GET /v1/models", param="model")
    salt = request.get("cache_salt")
    stream, salt = request.get("stream") is True, salt if isinstance(salt, str) else None
    if dialect is Dialect.CHAT:
        prompt = Prompt(dialect, model, stream, salt, tuple(chat_segments(request)))
    else:
        prompt = completion_prompt(request.get("prompt"), model, stream=stream, salt=salt)
    is_scored = request.get("prompt_logprobs") is not None or (request.get("echo") is True and "logprobs" in request)
    return replace(prompt, reads_cache=False) if is_scored else prompt


def read_object(body: bytes) -> dict[str, object]:
    """Parses a JSON object, or raises BadJson."""
    try:
        request = json.loads(body)
    except ValueError as problem:  # broken JSON, or bytes that are not UTF-8
        raise BadJson(f"The request body is not valid JSON: {problem}. Send one JSON object.") from None
    if not isinstance(request, dict):
        raise BadJson(f"The request body is a JSON {type(request).__name__}. Send one JSON object.")
    return request


def chat_segments(request: dict[str, object]) -> Iterator[bytes]:
    """Yields the segments of a chat request: each tool, then each message."""
    tools = request.get("tools")
    for tool in tools if isinstance(tools, list) else ():
        yield tool_segment(tool)
    messages = request.get("messages")
    if not isinstance(messages, list):
        yield as_json(messages)
        return
    for message in messages:
        yield message_segment(message) if isinstance(message, dict) else odd_segment(message)


def tool_segment(tool: object) -> bytes:
    """Renders one tool definition, with the order inside its schema as it came."""
    return b"tool" + SEPARATOR + as_json(tool)


def odd_segment(message: object) -> bytes:
    """Renders what stands where a message should."""
    return b"?" + SEPARATOR + as_json(message)


# The fields that chat templates render, besides role and content.
RENDERED = ("name", "tool_call_id", "reasoning_content", "reasoning", "tool_calls")


def message_segment(message: dict[str, object]) -> bytes:
    """Renders one message: role, content, and the fields that templates render, in a fixed order."""
    pieces = [as_text(message.get("role")), *content_pieces(message.get("content"))]
    for field in RENDERED:
        value = message.get(field)
        if value is not None:
            pieces += [field.encode(), as_text(value)]
    return SEPARATOR.join(pieces) + b"\n"


def content_pieces(content: object) -> Iterator[bytes]:
    """Yields the text of a message's content, and a digest for every part that is not text."""
    if not isinstance(content, list):
        if content is not None:
            yield as_text(content)
        return
    for part in content:
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            yield as_text(part["text"])
        else:
            # An image arrives as megabytes of base64: its digest is enough to tell pictures apart.
            yield b"part:" + xxh3_128_hexdigest(as_json(part, sort_keys=True)).encode()


def completion_prompt(prompt: object, model: str, *, stream: bool, salt: str | None) -> Prompt:
    """Reads the `prompt` of /v1/completions: text, token ids, or a batch of either.

    The engine counts the tokens of a batch in one sum, so its prompts are the segments of one canonical prompt.
    """
    is_batch = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str | list)
    batch = cast("list[object]", prompt) if is_batch else [prompt]
    ids = [item for item in batch if isinstance(item, list) and all(map(is_token_id, item))]
    if len(ids) < len(batch):
        return Prompt(Dialect.COMPLETIONS, model, stream, salt, tuple(map(as_text, batch)), open_ended=True)
    segments = tuple(struct.pack(f"<{len(item)}I", *item) for item in ids)
    exact = sum(map(len, ids))
    return Prompt(Dialect.COMPLETIONS, model, stream, salt, segments, open_ended=True, exact_tokens=exact)


def is_token_id(value: object) -> bool:
    """Tells whether a JSON value can be a token id: a whole number of 32 bits."""
    return type(value) is int and 0 <= value < 1 << 32


def as_text(value: object) -> bytes:
    """Renders a string as it is, anything else as JSON. A lone surrogate in the JSON must not stop a request."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    return as_json(value)


def as_json(value: object, *, sort_keys: bool = False) -> bytes:
    """Renders a value as compact JSON, by default with its own key order."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=sort_keys)
    return text.encode("utf-8", "surrogatepass")
