"""Plausible text for coding agents: source files, test output, listings, prose, tool definitions.

Every function draws from the ``random.Random`` it is given and from nothing else, so a seed fixes every byte.
Sizes are in tokens at ``BYTES_PER_TOKEN`` and are met within one line of text.
All text is ASCII: one character is one byte.
"""

import random
from collections.abc import Callable
from typing import Any

BYTES_PER_TOKEN = 4
"""Bytes of English and code per token: the usual rule of thumb, and the simulated tokenizer's ratio."""

# fmt: off
_NOUNS = (
    "account", "batch", "buffer", "cache", "channel", "client", "cursor", "deadline", "draft",
    "event", "field", "filter", "frame", "gateway", "handle", "header", "invoice", "journal",
    "ledger", "lease", "limit", "message", "metric", "order", "packet", "parser", "payload",
    "policy", "queue", "quota", "record", "region", "report", "request", "resource", "retry",
    "route", "schema", "segment", "session", "shard", "snapshot", "socket", "stream", "tenant",
    "token", "window",
)
_VERBS = (
    "accept", "advance", "append", "apply", "build", "cancel", "check", "claim", "close", "collect",
    "commit", "compare", "compute", "count", "decode", "drain", "emit", "encode", "expand",
    "expire", "fetch", "flush", "format", "index", "load", "lock", "merge", "notify", "open",
    "parse", "plan", "publish", "read", "rebuild", "release", "remove", "render", "replay",
    "reserve", "resolve", "rotate", "sample", "save", "scan", "schedule", "seal", "select", "send",
    "settle", "split", "store", "sync", "track", "trim", "update", "validate", "verify", "wait",
    "write",
)
# fmt: on
_TYPES = (
    "int",
    "str",
    "bytes",
    "float",
    "bool",
    "Path",
    "Decimal",
    "datetime",
    "Sequence[str]",
    "Mapping[str, int]",
)

_STATEMENTS = (
    "{noun} = {verb}_{other}({third}, limit={number})",
    "if {noun}.{other} is None: raise Missing({noun}.id, {number})",
    "self._{noun}[{other}.key] = {third}.{verb}({number})",
    'log.info("{verb} {noun}", extra={{"{other}": {third}.size}})',
    "for {noun} in self.{other}s: await {noun}.{verb}()",
    "assert {verb}_{noun}({other}) == {number}",
)
_SENTENCES = (
    "The {noun} must {verb} each {other} before the {third} can {second} it.",
    "When a {noun} fails to {verb}, keep the {other} and {second} the {third} again.",
    "Never {verb} a {noun} while its {other} is open; {second} the {third} first.",
    "Use the {noun} of the {other} to {verb} what the {third} has yet to {second}.",
)

Tool = dict[str, Any]


def source_file(rng: random.Random, tokens: int) -> str:
    """Returns a Python source file of about ``tokens`` tokens, numbered as a read tool shows them."""
    return _fill(tokens, _numbered(rng, _function))


def test_output(rng: random.Random, tokens: int) -> str:
    """Returns the output of a test run of about ``tokens`` tokens, failures last."""
    return _fill(tokens, lambda: _test_lines(rng))


def listing(rng: random.Random, tokens: int) -> str:
    """Returns search results or a directory listing of about ``tokens`` tokens."""
    return _fill(tokens, lambda: [f"{path(rng)}:{rng.randrange(1, 900)}:    {_statement(rng)}"])


def prose(rng: random.Random, tokens: int) -> str:
    """Returns working notes, guidelines or a task text of about ``tokens`` tokens."""
    return _fill(tokens, lambda: [f"- {_sentence(rng)} {_sentence(rng)}"])


def path(rng: random.Random) -> str:
    """Returns the path of one source file in an imagined repository."""
    return f"src/{rng.choice(_NOUNS)}/{rng.choice(_NOUNS)}_{rng.choice(_NOUNS)}.py"


def tool(rng: random.Random, name: str, tokens: int) -> Tool:
    """Returns one tool definition in the OpenAI form, of about ``tokens`` tokens."""
    properties = {
        f"{noun}_{i}": {"type": rng.choice(("string", "integer", "boolean")), "description": _sentence(rng)}
        for i, noun in enumerate(rng.sample(_NOUNS, 3))
    }
    parameters = {"type": "object", "properties": properties, "required": sorted(properties)[:1]}
    description = prose(rng, max(20, tokens - 120))
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


def _fill(tokens: int, draw: Callable[[], list[str]]) -> str:
    """Joins drawn lines until ``tokens`` are reached, then cuts at the last line that fits."""
    room = tokens * BYTES_PER_TOKEN
    lines: list[str] = []
    while room > 0:
        for line in draw():
            lines.append(line)
            room -= len(line) + 1
            if room <= 0:
                break
    return "\n".join(lines)


def _numbered(rng: random.Random, draw: Callable[[random.Random], list[str]]) -> Callable[[], list[str]]:
    at = 0

    def lines() -> list[str]:
        nonlocal at
        drawn = draw(rng)
        at += len(drawn)
        return [f"{at - len(drawn) + i + 1:>6}  {line}" for i, line in enumerate(drawn)]

    return lines


def _function(rng: random.Random) -> list[str]:
    noun, other = rng.sample(_NOUNS, 2)
    head = f"def {rng.choice(_VERBS)}_{noun}({noun}: {rng.choice(_TYPES)}, {other}: {rng.choice(_TYPES)})"
    body = [f"    {_statement(rng)}" for _ in range(rng.randrange(3, 9))]
    return [
        f"{head} -> {rng.choice(_TYPES)}:",
        f'    """{_sentence(rng)}"""',
        *body,
        f"    return {noun}",
        "",
        "",
    ]


def _statement(rng: random.Random) -> str:
    return _worded(rng, _STATEMENTS)


def _test_lines(rng: random.Random) -> list[str]:
    noun, other = rng.sample(_NOUNS, 2)
    name = f"tests/test_{noun}.py::test_{rng.choice(_VERBS)}_{other}"
    if rng.random() < 0.85:
        return [f"{name} PASSED  [{rng.randrange(100):>3}%] {rng.random():.3f}s"]
    wrong = f"E       assert {rng.randrange(999)} == {rng.randrange(999)}"
    return [
        f"{name} FAILED",
        f">       {_statement(rng)}",
        wrong,
        f"{path(rng)}:{rng.randrange(900)}: AssertionError",
    ]


def _sentence(rng: random.Random) -> str:
    return _worded(rng, _SENTENCES)


def _worded(rng: random.Random, forms: tuple[str, ...]) -> str:
    """Fills one of ``forms`` with drawn words."""
    noun, other, third = rng.choices(_NOUNS, k=3)
    verb, second = rng.choices(_VERBS, k=2)
    number = int(rng.random() * 9999)
    return rng.choice(forms).format(noun=noun, other=other, third=third, verb=verb, second=second, number=number)
