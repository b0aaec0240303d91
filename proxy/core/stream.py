"""Reads a response stream beside the pump: first content token, usage, how it ended. It never alters a byte.

Sans-I/O: feed it bytes in any cut, and the findings are the same. Until the first content token every event is
parsed; after it only the tail is kept, since usage, errors and the end come last, and what is between is the client's.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

from msgspec import MsgspecError, Struct
from msgspec.json import Decoder

from .types import Usage

# Bytes kept after the first token. A usage event is under 1 KiB; an engine's error message can be a few.
TAIL_BYTES = 16384
BLANK_LINE = re.compile(rb"\r?\n\r?\n")


@dataclass(slots=True)
class StreamScanner:
    """What a stream of server-sent events has said so far.

    Attributes:
        has_content: the first content token has passed (content, reasoning, tool call or text; not a role-only frame).
        done: the engine's own end marker has passed.
        aborted: the engine ended the answer itself (`finish_reason: "abort"`).
        error: message of an error object inside the stream; None when there was none.
        usage: what the engine reported.
    """

    has_content: bool = False
    done: bool = False
    aborted: bool = False
    error: str | None = None
    usage: Usage = field(default_factory=Usage)
    _buffer: bytes = b""

    def feed(self, chunk: bytes) -> None:
        """Takes the next bytes of the stream."""
        self._buffer += chunk
        if not self.has_content and b"\n" in chunk:  # no event ends elsewhere, and a first one can be megabytes
            self._seek_content()
        if self.has_content:
            self._buffer = self._buffer[-TAIL_BYTES:]

    def _seek_content(self) -> None:
        *events, rest = split_events(self._buffer)
        while events and not self.has_content:
            self._read(events.pop(0))
        # What follows the first content in the same chunk belongs to the tail.
        self._buffer = b"\n\n".join([*events, rest])

    @property
    def is_between_events(self) -> bool:
        """The last event is complete: what is written next begins a new one."""
        return not self._buffer or self._buffer.endswith((b"\n\n", b"\r\n\r\n"))

    def finish(self) -> None:
        """Reads the tail. Call it once, when the stream has ended in whatever way."""
        for event in split_events(self._buffer):
            self._read(event)
        self._buffer = b""

    def _read(self, event: bytes) -> None:
        for line in event.splitlines():
            if line.startswith(b"data:"):
                self._read_data(line[5:].strip())

    def _read_data(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.done = True
            return
        try:
            frame = json.loads(data)
        except (ValueError, RecursionError):
            return  # the first event of a cut-off tail, or not JSON: nothing to learn from it
        if isinstance(frame, dict):
            self._learn(frame)

    def _learn(self, frame: dict[str, object]) -> None:
        if isinstance(frame.get("error"), dict | str):
            self.error = error_message(frame["error"])
        if isinstance(frame.get("usage"), dict):
            self.usage = read_usage(frame["usage"])
        for choice in as_list(frame.get("choices")):
            self.has_content = self.has_content or has_content(choice)
            self.aborted = self.aborted or (isinstance(choice, dict) and choice.get("finish_reason") == "abort")


def split_events(buffer: bytes) -> list[bytes]:
    """Splits at blank lines, for both line endings; the last item is the unfinished rest."""
    return BLANK_LINE.split(buffer)


CONTENT_FIELDS = ("content", "reasoning_content", "reasoning", "tool_calls", "function_call", "refusal")


def has_content(choice: object) -> bool:
    """Tells whether one choice of a stream frame carries content: an empty string or list is none."""
    if not isinstance(choice, dict):
        return False
    if choice.get("text"):
        return True
    delta = choice.get("delta")
    return isinstance(delta, dict) and any(delta.get(name) for name in CONTENT_FIELDS)


class AnsweredChoice(Struct, gc=False):
    """The part of a choice that is read."""

    finish_reason: object = None


class Answered(Struct, gc=False):
    """The parts of a whole answer that are read."""

    usage: object = None
    choices: list[AnsweredChoice] = []


DECODE_ANSWER = Decoder(Answered).decode


def read_answer(body: bytes) -> tuple[Usage, bool]:
    """Reads a whole JSON answer: its usage, and whether the engine aborted it."""
    try:
        answer = DECODE_ANSWER(body)
    except (MsgspecError, ValueError, RecursionError):
        return Usage(), False
    return read_usage(answer.usage), any(choice.finish_reason == "abort" for choice in answer.choices)


def read_error_type(body: bytes) -> str | None:
    """Returns the type of an engine's error object. Its message may quote the prompt, so nobody keeps that."""
    try:
        error = json.loads(body).get("error")
    except (ValueError, RecursionError, AttributeError):
        return None
    kind = error.get("type") if isinstance(error, dict) else None
    return kind if isinstance(kind, str) else None


def read_usage(usage: object) -> Usage:
    """Reads a usage object of the OpenAI dialect. What is absent or not a number stays None."""
    if not isinstance(usage, dict):
        return Usage()
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return Usage(as_count(usage.get("prompt_tokens")), as_count(cached), as_count(usage.get("completion_tokens")))


def as_count(value: object) -> int | None:
    """Returns a non-negative integer as it is, anything else as None."""
    return value if type(value) is int and value >= 0 else None


def as_list(value: object) -> list[object]:
    """Returns a list as it is, anything else as an empty one."""
    return value if isinstance(value, list) else []


def error_message(error: object) -> str:
    """Returns what kind of in-band error it is; a bare string has no kind but itself."""
    if isinstance(error, dict):
        return str(error.get("type") or error.get("message") or "error")
    return str(error)
