"""The exact JSON that vLLM's OpenAI surface speaks, as bytes.

Shapes only: nothing here decides, waits or reads a request.
"""

import json
from dataclasses import dataclass
from typing import Any

VERSION = "0.32.0+sim"
"""The release whose wire is spoken, marked as the stand-in's."""

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Usage:
    """What one answer cost, in tokens; `details` is off where the engine does not report cached tokens."""

    prompt_tokens: int
    cached_tokens: int
    created_tokens: int | None
    details: bool

    def counts(self, emitted: int) -> dict[str, int]:
        """Returns the three totals."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + emitted,
            "completion_tokens": emitted,
        }

    def whole(self, emitted: int) -> dict[str, Any]:
        """Returns the usage of an answer that is not streamed."""
        return {
            **self.counts(emitted),
            "prompt_tokens_details": {
                "cached_tokens": self.cached_tokens,
                "created_cache_tokens": self.created_tokens,
                "multimodal_tokens": None,
            }
            if self.details
            else None,
            "completion_tokens_details": None,
        }

    def streamed(self, emitted: int) -> dict[str, Any]:
        """Returns the usage of a stream's last chunk: what is unknown in the details is left out."""
        details = {"cached_tokens": self.cached_tokens}
        if self.created_tokens is not None:
            details["created_cache_tokens"] = self.created_tokens
        return {**self.counts(emitted), "prompt_tokens_details": details if self.details else None}


@dataclass(frozen=True, slots=True)
class Envelope:
    """What all chunks of an answer, or the answer as a whole, have in common."""

    answer_id: str
    chat: bool
    created: int
    model: str
    fingerprint: str

    def render_whole(self, text: str, finish_reason: str, usage: dict[str, Any]) -> bytes:
        """Returns an answer that is not streamed."""
        choice: dict[str, Any] = {"index": 0}
        if self.chat:
            choice["message"] = {
                "role": "assistant",
                "content": text,
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                "tool_calls": [],
                "reasoning": None,
            }
        else:
            choice["text"] = text
        choice |= {"logprobs": None, "finish_reason": finish_reason, "stop_reason": None, "token_ids": None}
        return dump(
            {
                **self.head("chat.completion"),
                "choices": [choice],
                "service_tier": None,
                "system_fingerprint": self.fingerprint,
                "usage": usage,
                "prompt_logprobs": None,
                "prompt_token_ids": None,
                "kv_transfer_params": None,
            }
        )

    def head(self, kind: str) -> dict[str, Any]:
        """Returns the common fields; `kind` is the object's name in the chat dialect."""
        return {
            "id": self.answer_id,
            "object": kind if self.chat else "text_completion",
            "created": self.created,
            "model": self.model,
        }


class Stream:
    """Writes the chunks of one streamed answer, one token each."""

    def __init__(self, envelope: Envelope, usage: Usage, *, include_usage: bool, continuous: bool) -> None:
        self._chat = envelope.chat
        self._usage = usage
        self._include_usage = include_usage
        self._continuous = include_usage and continuous
        self._head = "data: " + _dump_text(envelope.head("chat.completion.chunk"))[:-1]
        self._fingerprint = f',"system_fingerprint":{_dump_text(envelope.fingerprint)}'
        self._emitted = 0

    def open(self) -> bytes:
        """Returns the chunk that names the role; completions have none."""
        if not self._chat:
            return b""
        choice = '{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
        return self._chunk(choice, ',"prompt_token_ids":null,"prompt_text":null')

    def token(self, text: str) -> bytes:
        """Returns the chunk of a token that is not the last one."""
        self._emitted += 1
        if self._chat:
            rest = '"logprobs":null,"finish_reason":null,"token_ids":null'
        else:
            rest = '"logprobs":null,"finish_reason":null,"stop_reason":null,"token_ids":null'
        return self._chunk(f'{{"index":0,{self._text(text)},{rest}}}')

    def last(self, text: str, finish_reason: str, *, counted: bool) -> bytes:
        """Returns the finishing chunk; `counted` is false when no token came with it."""
        self._emitted += counted
        choice = (
            f'{{"index":0,{self._text(text)},"logprobs":null,"finish_reason":"{finish_reason}",'
            '"stop_reason":null,"token_ids":null}'
        )
        return self._chunk(choice, "" if self._include_usage else self._fingerprint)

    def close(self) -> bytes:
        """Returns what follows the finishing chunk: the usage when it was asked for, and the end."""
        if not self._include_usage:
            return DONE
        usage = _dump_text(self._usage.streamed(self._emitted))
        return f'{self._head},"choices":[],"usage":{usage}{self._fingerprint}}}\n\n'.encode() + DONE

    def _text(self, text: str) -> str:
        # Words are plain ASCII letters: nothing in them needs escaping.
        return f'"delta":{{"content":"{text}"}}' if self._chat else f'"text":"{text}"'

    def _chunk(self, choice: str, extra: str = "") -> bytes:
        usage = ""
        if self._continuous:
            usage = f',"usage":{_dump_text(self._usage.counts(self._emitted))}'
        return f'{self._head},"choices":[{choice}]{extra}{usage}}}\n\n'.encode()


def render_error(status: int, message: str, kind: str, param: str | None) -> bytes:
    """Returns the body of a refused request."""
    return dump({"error": {"message": message, "type": kind, "param": param, "code": status}})


def render_models(model: str, max_model_len: int, created: int) -> dict[str, Any]:
    """Returns the answer of `/v1/models`."""
    permission = {
        "id": f"modelperm-{created:x}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    card = {
        "id": model,
        "object": "model",
        "created": created,
        "owned_by": "vllm",
        "root": model,
        "parent": None,
        "max_model_len": max_model_len,
        "permission": [permission],
    }
    return {"object": "list", "data": [card]}


def dump(value: object) -> bytes:
    """Returns compact JSON."""
    return _dump_text(value).encode()


def _dump_text(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
