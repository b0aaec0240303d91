"""Reads and checks a request body, with vLLM's words for what is wrong with it."""

import json
from dataclasses import dataclass
from typing import Any

from workers.sim.cache import root_key
from workers.sim.engine import Draft
from workers.sim.scheduler import Limits
from workers.sim.text import Answer, Prompt, Tokenizer, render_chat


class Rejection(Exception):
    """The request is refused with `status` and an error object."""

    def __init__(self, status: int, message: str, kind: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param


@dataclass(frozen=True, slots=True)
class Ask:
    """A generation request that will be served."""

    draft: Draft
    stream: bool
    include_usage: bool
    continuous_usage: bool


@dataclass(frozen=True, slots=True)
class Reader:
    """Turns bodies into requests for one served model."""

    model: str
    max_model_len: int
    seed: int
    tokenizer: Tokenizer
    force_include_usage: bool

    def read_ask(self, body: bytes, *, chat: bool) -> Ask:
        """Reads a chat or plain completion request; raises `Rejection`."""
        fields = read_object(body)
        if chat:
            _check_messages(fields)
        elif not isinstance(fields.get("prompt"), str | list):
            raise _invalid("prompt", "Field required")
        salt = fields.get("cache_salt")
        if salt is not None and (not isinstance(salt, str) or not salt):
            raise Rejection(400, "Parameter 'cache_salt' must be a non-empty string if provided.", "BadRequestError")
        if fields.get("n") not in (None, 1):
            raise _refuse(f"n={fields['n']} is not supported here; only n=1 is.", "n")
        options = fields.get("stream_options") or {}
        if not isinstance(options, dict):
            raise _invalid("stream_options", "Input should be a valid dictionary")
        self._check_model(fields)
        prompt = self._cut(fields, chat=chat)
        answer = Answer(self.seed, prompt, spaced=not chat)
        draft = Draft(root_key(self.model, salt), prompt, answer, self._limit(fields, prompt, answer))
        return Ask(
            draft,
            stream=bool(fields.get("stream")),
            include_usage=self.force_include_usage or bool(options.get("include_usage")),
            continuous_usage=bool(options.get("continuous_usage_stats")),
        )

    def read_tokenize(self, body: bytes) -> dict[str, Any]:
        """Answers a `/tokenize` request; raises `Rejection`."""
        fields = read_object(body)
        self._check_model(fields)
        if "messages" in fields:
            _check_messages(fields)
            text = _render(fields)
        elif isinstance(fields.get("prompt"), str):
            text = fields["prompt"].encode("utf-8", "surrogatepass")
        else:
            raise _invalid("prompt", "Field required")
        tokens = self.tokenizer.encode(text)
        return {
            "count": len(tokens),
            "max_model_len": self.max_model_len,
            "tokens": [token for token, _ in tokens],
            "token_strs": [piece for _, piece in tokens] if fields.get("return_token_strs") else None,
        }

    def _check_model(self, fields: dict[str, Any]) -> None:
        asked = fields.get("model")
        if asked is not None and asked != self.model:
            raise Rejection(
                404,
                f"The model `{asked}` does not exist. Valid aliases: {self.model}.",
                "NotFoundError",
                "model",
            )

    def _cut(self, fields: dict[str, Any], *, chat: bool) -> Prompt:
        if chat:
            return self.tokenizer.cut(_render(fields))
        prompt = fields["prompt"]
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, str) and prompt:
            return self.tokenizer.cut(prompt.encode("utf-8", "surrogatepass"))
        if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
            return self.tokenizer.group(prompt)
        raise _refuse("The prompt must be one text or one list of token ids, and not empty.", "prompt")

    def _limit(self, fields: dict[str, Any], prompt: Prompt, answer: Answer) -> Limits:
        """Says how the answer may end; raises `Rejection` where it cannot fit into the context."""
        longest = _read_count(fields, "max_completion_tokens", 1)
        if longest is None:
            longest = _read_count(fields, "max_tokens", 1)
        shortest = _read_count(fields, "min_tokens", 0) or 0
        room = self.max_model_len
        if longest is not None and longest > room:
            raise _refuse(
                f"max_tokens={longest} cannot be greater than max_model_len={room}. Ask for at most {room} tokens.",
                "max_tokens",
            )
        if prompt.tokens + (longest or 1) > room:
            raise _refuse(_describe_excess(room, prompt.tokens, longest), "input_tokens")
        limit = room - prompt.tokens if longest is None else longest
        if shortest > limit:
            raise _refuse(f"min_tokens={shortest} must be less than or equal to max_tokens={limit}.", "min_tokens")
        if fields.get("ignore_eos"):
            return Limits(limit, None)
        # The token that ends an answer counts, and may not come among the first `min_tokens`.
        return Limits(limit, max(answer.natural_tokens, shortest) + 1)


def read_object(body: bytes) -> dict[str, Any]:
    """Parses a body that must be a JSON object; raises `Rejection`."""
    try:
        fields = json.loads(body)
    except json.JSONDecodeError as error:
        place = f"body.{error.pos}"
        detail = {
            "type": "json_invalid",
            "loc": place,
            "msg": "JSON decode error",
            "input": {},
            "ctx": {"error": error.msg},
        }
        raise Rejection(400, f"1 validation error:\n  {detail}", "Bad Request", place) from error
    except (ValueError, RecursionError) as error:
        raise Rejection(400, "There was an error parsing the body", "Bad Request") from error
    if not isinstance(fields, dict):
        raise _invalid("", "Input should be a valid dictionary")
    return fields


def _check_messages(fields: dict[str, Any]) -> None:
    messages = fields.get("messages")
    if "messages" not in fields:
        raise _invalid("messages", "Field required")
    if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
        raise _invalid("messages", "Input should be a list of at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise _invalid(f"messages.{index}.role", "Field required")
        if not isinstance(message.get("tool_calls"), list | None):
            raise _invalid(f"messages.{index}.tool_calls", "Input should be a valid list")
    if not isinstance(fields.get("tools"), list | None):
        raise _invalid("tools", "Input should be a valid list")


def _render(fields: dict[str, Any]) -> bytes:
    return render_chat(
        fields["messages"],
        fields.get("tools"),
        add_generation_prompt=bool(fields.get("add_generation_prompt", True)),
    )


def _read_count(fields: dict[str, Any], name: str, least: int) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    if type(value) is not int:
        raise _invalid(name, "Input should be a valid integer")
    if value < least:
        raise _refuse(f"{name} must be at least {least}, got {value}.", name)
    return value


def _describe_excess(room: int, prompt_tokens: int, longest: int | None) -> str:
    start = f"This model's maximum context length is {room} tokens. However, "
    # The engine stops counting one token past the limit.
    counted = min(prompt_tokens, room + 1)
    if longest is None or prompt_tokens >= room:
        return f"{start}your prompt contains at least {counted} input tokens, which leaves no room for an answer."
    return (
        f"{start}you requested {longest} output tokens and your prompt contains at least {counted} input tokens, "
        f"for a total of at least {counted + longest} tokens."
    )


def _refuse(message: str, param: str) -> Rejection:
    return Rejection(400, message, "BadRequestError", param)


def _invalid(field: str, message: str) -> Rejection:
    place = f"body.{field}" if field else "body"
    detail = {"type": "invalid", "loc": place, "msg": message}
    return Rejection(400, f"1 validation error:\n  {detail}", "Bad Request", place)
