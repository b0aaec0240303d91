"""Verification of a joining worker: does it answer, and does its prefix cache work.

One probe prompt of a few cache blocks is sent, and then the same prompt again. The second answer must deliver cached
tokens; the two times are the worker's first speed estimate. A worker that fails is held out, with the reason, and is
tried again.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from ..core.stream import read_answer
from ..core.types import Usage
from .registry import Facts, Worker

# The probe prompt: three blocks hit at least one whatever the rounding, and this many tokens give a time worth reading.
PROBE_BLOCKS, PROBE_TOKENS = 3, 512
# Bytes per token of the probe's text, on the safe side: most tokenizers need more.
PROBE_BYTES = 4
# One probe answer: a cold prefill of three large blocks on a slow card, behind a queue.
ANSWER_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Verification:
    """What two probes of one incarnation showed. Times are seconds; what is not known is None.

    Attributes:
        trust: `inferred` (delivered tokens are reported) or `blind` (they are not).
        reason: why it failed, or what is missing although it passed.
        prefill_tokens_per_second: the first speed estimate, from what the second send saved.
    """

    incarnation: str
    passed: bool
    trust: str
    reason: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    first_seconds: float | None = None
    second_seconds: float | None = None
    prefill_tokens_per_second: float | None = None

    def report(self) -> dict[str, object]:
        """Renders it for `GET /workers` and for the store."""
        return asdict(self)


def read_verification(stored: Mapping[str, Any]) -> Verification | None:
    """Reads what `report` rendered; None for what cannot be read."""
    try:
        return Verification(**stored)
    except TypeError:
        return None


class Verifier:
    """Probes workers.

    Args:
        client: for the probes.
        clock: a steady clock, seconds.
    """

    def __init__(self, client: httpx.AsyncClient, clock: Callable[[], float]) -> None:
        self._client = client
        self._clock = clock

    async def verify(self, worker: Worker) -> Verification:
        """Sends the probe twice and judges the answers."""
        if worker.facts.prefix_caching is False:
            return self._failed(worker, "its prefix caching is off; start the engine with --enable-prefix-caching")
        body = {
            "model": min(worker.facts.model_ids),
            "prompt": probe_text(worker.facts),
            "max_tokens": 1,
            "temperature": 0,
        }
        times: list[float] = []
        usages: list[Usage] = []
        for _ in range(2):
            started = self._clock()
            try:
                answer = await self._client.post(f"{worker.url}/v1/completions", json=body, timeout=ANSWER_SECONDS)
            except httpx.HTTPError as problem:
                return self._failed(worker, f"it did not answer a probe completion ({type(problem).__name__})")
            times.append(self._clock() - started)
            if not answer.is_success:
                return self._failed(worker, f"it answered a probe completion with {answer.status_code}")
            usages.append(read_answer(answer.content)[0])
        return judge(worker, usages[0], usages[1], times[0], times[1])

    def _failed(self, worker: Worker, reason: str) -> Verification:
        return Verification(worker.incarnation, passed=False, trust="blind", reason=reason)


def judge(worker: Worker, first: Usage, second: Usage, first_seconds: float, second_seconds: float) -> Verification:
    """Says what two answers to the same prompt show."""
    cached, prompt = second.cached_tokens, second.prompt_tokens
    saved = first_seconds - second_seconds
    gained = None if cached is None or first.cached_tokens is None else cached - first.cached_tokens
    reason = None
    passed = True
    if cached is None:
        reason = "it reports no cached tokens; start the engine with --enable-prompt-tokens-details"
    elif cached == 0 and worker.facts.block_tokens is None:
        reason = "nothing was delivered from its cache; its block size is not known, and may be longer than the probe"
    elif cached == 0 and prompt is not None and prompt > (worker.facts.block_tokens or 1):
        passed = False
        reason = (
            f"the second send of the same {prompt}-token prompt delivered no cached tokens; its prefix cache is off"
        )
    return Verification(
        incarnation=worker.incarnation,
        passed=passed,
        trust="blind" if cached is None else "inferred",
        reason=reason,
        prompt_tokens=prompt,
        cached_tokens=cached,
        first_seconds=round(first_seconds, 6),
        second_seconds=round(second_seconds, 6),
        prefill_tokens_per_second=round(gained / saved, 1) if gained and gained > 0 and saved > 0 else None,
    )


def probe_text(facts: Facts) -> str:
    """Returns a prompt that no cache holds yet, of a few blocks, within the model's window."""
    tokens = max(PROBE_BLOCKS * (facts.block_tokens or 0), PROBE_TOKENS)
    windows = [length for model in facts.models if isinstance(length := model.get("max_model_len"), int)]
    if windows:
        tokens = min(tokens, min(windows) // 2)
    words = f"probe {secrets.token_hex(8)} of a worker that joins: "
    return (words + "count the lines of this text again. " * (tokens * PROBE_BYTES // 36 + 1))[: tokens * PROBE_BYTES]
