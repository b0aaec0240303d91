"""Closed-loop agent load: each agent waits for its answer, pauses, and asks again with a longer prompt.

One call of ``drive`` is one side of a comparison. Request i of a side goes to address i modulo the number of
addresses: with one address that is a proxy, with several it is round robin with nothing in between.
Times are wall-clock seconds as this client sees them; nothing here knows of simulated time.
"""

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx

from workers.bench.sessions import Conversation, body

GRACE_SHARE = 0.25
"""Requests in flight when time is up may take this much longer, and count: a slow side is not flattered."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One request as the client saw it. ``turn`` counts from 0; None = unknown; times are in seconds."""

    conversation: int
    turn: int
    ttft: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    expected_tokens: int | None = None
    worker: str | None = None
    reason: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """What every side runs: the same conversations at the same pace, all in wall-clock seconds.

    No request starts after ``seconds``; ``gap`` is the mean time between two arrivals of conversations,
    ``pause`` the mean time between an answer and the next request.
    """

    conversations: Sequence[Conversation]
    model: str
    seconds: float
    gap: float
    pause: float


class Record(Protocol):
    """Takes a sample as soon as its request has ended."""

    def __call__(self, sample: Sample, /) -> None:
        """Keeps ``sample``."""


async def drive(load: Load, addresses: Sequence[str], record: Record) -> None:
    """Runs ``load`` against ``addresses`` and hands every ended request to ``record``.

    Returns when all conversations are over, or when ``load.seconds`` and the grace have passed: requests
    still in flight then are dropped unrecorded. A failed request raises nothing: its sample has an ``error``.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    clients = [
        httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(None, connect=5.0), limits=limits, trust_env=False)
        for url in addresses
    ]
    turn_of = itertools.cycle(clients)
    begun = time.monotonic()
    talks = [
        asyncio.create_task(_converse(conversation, load, begun, lambda: next(turn_of), record))
        for conversation in load.conversations
    ]
    try:
        if talks:
            await asyncio.wait(talks, timeout=load.seconds * (1 + GRACE_SHARE))
    finally:
        for talk in talks:
            talk.cancel()
        ended = await asyncio.gather(*talks, return_exceptions=True)
        for client in clients:
            await client.aclose()
    for outcome in ended:
        if isinstance(outcome, Exception):
            raise outcome


async def _converse(
    conversation: Conversation,
    load: Load,
    begun: float,
    choose: Callable[[], httpx.AsyncClient],
    record: Record,
) -> None:
    """Holds one conversation to its end, to its first failure, or until no new request may start."""
    await asyncio.sleep(conversation.start * load.gap)
    answers: list[str] = []
    while time.monotonic() - begun < load.seconds:
        content = body(conversation, answers, load.model)
        sample, answer = await ask(choose(), content, conversation.index, len(answers))
        record(sample)
        if sample.error is not None or len(answers) == len(conversation.steps):
            return
        pause = conversation.steps[len(answers)].pause
        answers.append(answer)
        await asyncio.sleep(pause * load.pause)


async def ask(client: httpx.AsyncClient, content: bytes, conversation: int, turn: int) -> tuple[Sample, str]:
    """Sends one streamed chat completion and returns its sample and the assistant's words."""
    answer = _Answer()
    headers = {"content-type": "application/json"}
    sent = time.monotonic()
    facts: dict[str, Any] = {}
    try:
        async with client.stream("POST", "/v1/chat/completions", content=content, headers=headers) as response:
            facts = _placement(response.headers)
            if response.status_code == httpx.codes.OK:
                async for line in response.aiter_lines():
                    answer.take(line)
            else:
                answer.error = f"HTTP {response.status_code}: {(await response.aread())[:200].decode(errors='replace')}"
    except httpx.HTTPError as error:
        answer.error = f"{type(error).__name__}: {error}"
    usage = answer.usage
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    sample = Sample(
        conversation,
        turn,
        ttft=None if answer.first is None else answer.first - sent,
        prompt_tokens=usage.get("prompt_tokens"),
        cached_tokens=cached,
        error=answer.error or answer.fault(),
        **facts,
    )
    return sample, "".join(answer.words)


def _placement(headers: httpx.Headers) -> dict[str, Any]:
    """Reads what a proxy says of its choice; a worker asked directly says nothing, which stays unknown."""
    expected = headers.get("x-homing-expected-tokens", "")
    return {
        "worker": headers.get("x-homing-worker"),
        "reason": headers.get("x-homing-reason"),
        "expected_tokens": int(expected) if expected.isdecimal() else None,
    }


@dataclass(slots=True)
class _Answer:
    """A chat-completion stream as it is read. Comments and role-only chunks are not content."""

    first: float | None = None
    words: list[str] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    done: bool = False

    def take(self, line: str) -> None:
        """Reads one line of the event stream."""
        if not line.startswith("data:"):
            return
        data = line[5:].strip()
        if data == "[DONE]":
            self.done = True
            return
        try:
            event = json.loads(data)
        except ValueError:
            self.error = f"an event that is not JSON: {data[:80]}"
            return
        if event.get("error"):
            self.error = f"error in the stream: {json.dumps(event['error'])[:200]}"
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices") or ():
            self._delta(choice.get("delta") or {})

    def _delta(self, delta: dict[str, Any]) -> None:
        words = delta.get("content")
        thought = delta.get("reasoning") or delta.get("reasoning_content") or delta.get("tool_calls")
        if self.first is None and (words or thought):
            self.first = time.monotonic()
        if words:
            self.words.append(words)

    def fault(self) -> str | None:
        """Says what a stream without an error event still lacks, None when it is whole."""
        if not self.done:
            return "the stream ended without [DONE]"
        if self.first is None:
            return "the stream carried no content"
        return None
