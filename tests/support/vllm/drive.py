"""Sends sessions through the proxy as agents do, and notes what each response says of itself."""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx

from tests.support.vllm.sessions import Session
from tests.support.vllm.worker import MODEL

LAG = 5  # sessions that open between one session's first and second request
IN_FLIGHT = 3  # more than the workers, so that some wait beside others
STAGGER_SECONDS = 0.15
TIMEOUT_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Delivery:
    """One answered request. Tokens are the engine's; `cached` None means that it did not say.

    `ttft` is the seconds from sending to the first content, None where the answer was not streamed.
    """

    session: str
    turn: int
    worker: str
    reason: str
    expected: int
    prompt: int
    cached: int | None
    ttft: float | None


def drive(url: str, sessions: Sequence[Session], progress: Callable[[int], None] = lambda _: None) -> list[Delivery]:
    """Sends every session's requests, each session's in order; raises httpx.HTTPError when one is refused.

    First and second requests go one at a time, since only then is the same worker right for every session: placement
    may well move a short chat, which is computed anew in no time, from a busy home to an idle worker. What
    follows goes some sessions at a time. `progress` is called with the count of answered requests.
    """
    return asyncio.run(drive_all(url, sessions, progress))


async def drive_all(url: str, sessions: Sequence[Session], progress: Callable[[int], None]) -> list[Delivery]:
    """Sends the calm part, then the busy one."""
    deliveries: list[Delivery] = []

    async def deliver(number: int, turn: int) -> None:
        if turn < len(sessions[number].turns):
            # Two of three are streamed, whatever the turn.
            streamed = (number + turn) % 3 != 0
            deliveries.append(await send(client, sessions[number], turn, streamed=streamed))
            progress(len(deliveries))

    async def follow(agent: int) -> None:
        await asyncio.sleep(agent * STAGGER_SECONDS)
        for number in range(agent, len(sessions), IN_FLIGHT):
            for turn in range(2, len(sessions[number].turns)):
                await deliver(number, turn)

    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_SECONDS) as client:
        for step in range(len(sessions) + LAG):
            if step < len(sessions):
                await deliver(step, 0)
            if step >= LAG:
                await deliver(step - LAG, 1)
        async with asyncio.TaskGroup() as group:
            for agent in range(IN_FLIGHT):
                group.create_task(follow(agent))
    return deliveries


async def send(client: httpx.AsyncClient, session: Session, turn: int, *, streamed: bool) -> Delivery:
    """Sends one request and reads the whole answer."""
    body = {"model": MODEL, "messages": session.messages(turn), "max_tokens": 4, "temperature": 0}
    if streamed:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    start = time.perf_counter()
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.is_error:
            await response.aread()
            raise httpx.HTTPStatusError(
                f"{session.name}, request {turn + 1}: HTTP {response.status_code} {response.text}",
                request=response.request,
                response=response,
            )
        usage, first = await (read_stream(response) if streamed else read_whole(response))
    details = usage.get("prompt_tokens_details") or {}
    return Delivery(
        session=session.name,
        turn=turn,
        worker=response.headers["x-homing-worker"],
        reason=response.headers["x-homing-reason"],
        expected=int(response.headers["x-homing-expected-tokens"]),
        prompt=usage["prompt_tokens"],
        cached=details.get("cached_tokens"),
        ttft=None if first is None else first - start,
    )


async def read_whole(response: httpx.Response) -> tuple[dict, None]:
    """Returns a plain answer's usage."""
    return json.loads(await response.aread())["usage"], None


async def read_stream(response: httpx.Response) -> tuple[dict, float | None]:
    """Returns a stream's usage and the moment (perf_counter) of its first content."""
    usage: dict = {}
    first = None
    async for line in response.aiter_lines():
        if not line.startswith("data: {"):
            continue
        event = json.loads(line.removeprefix("data: "))
        if first is None and any(choice["delta"].get("content") for choice in event["choices"]):
            first = time.perf_counter()
        usage = event.get("usage") or usage
    return usage, first
