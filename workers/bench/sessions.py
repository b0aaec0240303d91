"""Coding-agent conversations, planned whole before the first request is sent.

A plan is a pure function of (count, seed): the same arrivals, prompts and pauses drive every side.
Only the assistant's words are not in the plan: the agent feeds back what the worker really answered.

Shapes follow published coding-agent traces: first prompts of some 20k tokens, turns that add a median of
about 640 tokens with a heavy tail (whole files read), agents of a kind sharing their tools and system prompt.
"""

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workers.bench import corpus
from workers.bench.corpus import BYTES_PER_TOKEN, Tool

Message = dict[str, Any]

FIRST_TOKENS = (4_000, 42_000)
FIRST_LEAN = 0.8
"""First prompts spread over this range, the even share raised to the lean: the median is 26k tokens."""
CONTEXT_TOKENS = 60_000
"""No conversation grows beyond this; long ones come near it."""
STEPS = (2, 3)
"""Tool calls in a conversation, so it makes one request more than this."""
GROWTH_MEDIAN = 640
GROWTH_SIGMA = 0.8
GROWTH_LEAST = 150
WHOLE_FILE_SHARE = 0.12
WHOLE_FILE_TOKENS = (4_000, 10_000)
MAX_TOKENS = (16, 24)
"""Answers are short: the demo measures prompts, and decoding only takes time."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of agent: all its conversations begin with these bytes."""

    name: str
    system: str
    tools: tuple[Tool, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """What an agent does with an answer: one tool call, its result, and the pause until the next request.

    ``pause`` is in units of the load's mean pause, so a plan holds at any pace.
    """

    tool: str
    arguments: str
    result: str
    pause: float


@dataclass(frozen=True, slots=True)
class Conversation:
    """One agent at work. ``start`` is its arrival in units of the load's mean gap between arrivals."""

    index: int
    kind: Kind
    start: float
    task: str
    steps: tuple[Step, ...]
    max_tokens: tuple[int, ...]

    @property
    def requests(self) -> int:
        """How many requests the whole conversation makes."""
        return len(self.steps) + 1


def plan(count: int, seed: int) -> tuple[Conversation, ...]:
    """Returns ``count`` conversations in order of arrival; the same ``seed`` gives the same bytes."""
    rng = random.Random(f"plan:{seed}")
    kinds = tuple(_kind(name, seed) for name in _TOOLS)
    starts = [i + rng.random() for i in range(count)]
    strata = rng.sample(range(count), count)
    low, high = FIRST_TOKENS
    sizes = [int(low + (high - low) * ((stratum + rng.random()) / count) ** FIRST_LEAN) for stratum in strata]
    return tuple(
        _conversation(i, kinds[i % len(kinds)], start, size, random.Random(f"conversation:{seed}:{i}"))
        for i, (start, size) in enumerate(zip(starts, sizes, strict=True))
    )


def messages(conversation: Conversation, answers: Sequence[str]) -> list[Message]:
    """Returns the messages of the request that follows ``answers``; none gives the first request.

    Each list extends the one before it: ``messages(c, a[:k])`` is a prefix of ``messages(c, a[:k + 1])``.
    """
    said: list[Message] = [
        {"role": "system", "content": conversation.kind.system},
        {"role": "user", "content": conversation.task},
    ]
    for number, (answer, step) in enumerate(zip(answers, conversation.steps, strict=False)):
        call_id = f"call_{conversation.index}_{number}"
        function = {"name": step.tool, "arguments": step.arguments}
        calls = [{"id": call_id, "type": "function", "function": function}]
        said.append({"role": "assistant", "content": answer, "tool_calls": calls})
        said.append({"role": "tool", "tool_call_id": call_id, "content": step.result})
    return said


def body(conversation: Conversation, answers: Sequence[str], model: str) -> bytes:
    """Returns the JSON body of the streamed chat completion that follows ``answers``."""
    request = {
        "model": model,
        "messages": messages(conversation, answers),
        "tools": conversation.kind.tools,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": conversation.max_tokens[len(answers)],
    }
    return json.dumps(request, separators=(",", ":")).encode()


def estimated_tokens(conversation: Conversation, answers: Sequence[str]) -> int:
    """Returns the prompt's length in tokens by the bytes of its parts; a worker's count differs by a few."""
    said = messages(conversation, answers)
    size = len(json.dumps(conversation.kind.tools)) + sum(len(m["content"]) for m in said)
    return size // BYTES_PER_TOKEN


_TOOLS = {
    "fixer": ("read_file", "edit_file", "run_tests", "search"),
    "reviewer": ("read_file", "search", "show_diff", "comment"),
    "builder": ("read_file", "write_file", "run_command", "search", "run_tests"),
}


def _kind(name: str, seed: int) -> Kind:
    """Draws the part that all agents of one kind share: about 2,000 tokens of tools and system prompt."""
    rng = random.Random(f"kind:{seed}:{name}")
    tools = tuple(corpus.tool(rng, tool, 220) for tool in _TOOLS[name])
    opening = f"You are a {name}: a coding agent at work in one repository.\n"
    return Kind(name, opening + corpus.prose(rng, 900), tools)


def _conversation(index: int, kind: Kind, start: float, first: int, rng: random.Random) -> Conversation:
    shared = (len(json.dumps(kind.tools)) + len(kind.system)) // BYTES_PER_TOKEN
    room = max(500, first - shared)
    task = (
        f"Task {index}: {corpus.prose(rng, min(400, room // 4))}\n\n"
        f"# {corpus.path(rng)}\n{corpus.source_file(rng, room - min(400, room // 4))}"
    )
    steps: list[Step] = []
    size = first
    for _ in range(rng.randint(*STEPS)):
        grown = min(_growth(rng), CONTEXT_TOKENS - size - MAX_TOKENS[1] - 50)
        if grown < GROWTH_LEAST:
            break
        size += grown + MAX_TOKENS[1]
        steps.append(_step(kind, grown, rng))
    return Conversation(
        index, kind, start, task, tuple(steps), tuple(rng.randint(*MAX_TOKENS) for _ in range(len(steps) + 1))
    )


def _growth(rng: random.Random) -> int:
    """Draws the tokens one tool result adds: log-normal about the median, at times a whole file."""
    if rng.random() < WHOLE_FILE_SHARE:
        return rng.randint(*WHOLE_FILE_TOKENS)
    return max(GROWTH_LEAST, int(rng.lognormvariate(math.log(GROWTH_MEDIAN), GROWTH_SIGMA)))


def _step(kind: Kind, tokens: int, rng: random.Random) -> Step:
    name = rng.choice(_TOOLS[kind.name])
    if name == "run_tests":
        arguments, result = {"select": corpus.path(rng)}, corpus.test_output(rng, tokens)
    elif name == "search":
        arguments, result = {"pattern": corpus.path(rng)}, corpus.listing(rng, tokens)
    else:
        arguments, result = {"path": corpus.path(rng)}, corpus.source_file(rng, tokens)
    # Half a fixed share, half exponential: tools take at least some time, and some take long. The mean is 1.
    return Step(name, json.dumps(arguments), result, 0.5 + 0.5 * rng.expovariate(1.0))
