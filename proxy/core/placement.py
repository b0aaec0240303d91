"""Chooses one worker for one request: one number per worker, in seconds, and the least wins.

    cost(w) = wait(w) + work(uncached(w))                        what this request waits
            + a · avoidable(w)                                   recomputing what another worker holds, at fleet speed
            + eviction(w)                                        what w's cache must give up for it, by recency

A prefix that every worker holds is in every `uncached` alike, so only differences count. `a` comes from simulation on
real traces (3 at 60 % load; greedy predicted TTFT alone, a = 0, scatters conversations). Pure: the same arguments give
the same placement for ever.
"""

from __future__ import annotations

import math

from .types import (
    Ask,
    Candidate,
    Cost,
    Overlap,
    Placement,
    Reason,
    Refusal,
    RefusalReason,
    Rng,
    Room,
    Snapshot,
    WorkerView,
)

AVOIDABLE_PRICE = 3.0
# Costs this close are equal: the estimates behind them are not better than a few per cent.
TIE = 0.03
# An entry untouched for this long costs 1/e of a recompute to evict: 76 % of real chat reuse comes within 5 min.
RECENCY_SECONDS = 300.0
# What one running stream costs a prefill beside it: a few steps of some milliseconds each.
STREAM_SECONDS = 0.02


def place(  # `now` is part of the signature for terms that age
    snapshot: Snapshot,
    overlap: Overlap,
    request: Ask,
    now: float,  # noqa: ARG001
    rng: Rng,
) -> Placement | Refusal:
    """Chooses a worker, or says why there is none.

    Args:
        snapshot: the workers that may be chosen.
        overlap: what each is believed to hold of this prompt.
        request: what is asked.
        now: the moment of the choice, seconds on any steady clock.
        rng: breaks ties.
    """
    model, excluded = request.model, request.excluded
    serving = [worker for worker in snapshot.workers if model in worker.models]
    candidates = [worker for worker in serving if worker.id not in excluded] if excluded else serving
    if not candidates:
        known = bool(serving) or not snapshot.known_models or model in snapshot.known_models
        return Refusal(RefusalReason.NO_WORKER if known else RefusalReason.UNKNOWN_MODEL)
    hits = [expected_hit(worker, overlap, request.prompt_tokens) for worker in candidates]
    parts = costs(candidates, hits, overlap, request.prompt_tokens)
    order = rank(parts, rng)
    first = order[0]
    return Placement(
        winner=candidate(candidates[first], hits[first], parts[first]),
        runner_up=candidate(candidates[order[1]], hits[order[1]], parts[order[1]]) if len(order) > 1 else None,
        reason=reason_of(hits[first], hits, request),
        prompt_tokens=request.prompt_tokens,
        candidates=len(candidates),
    )


def expected_hit(worker: WorkerView, overlap: Overlap, prompt_tokens: int) -> int:
    """Returns the tokens that the worker's engine can serve from cache.

    Whole engine blocks only, and never the last token of the prompt: `floor((prompt − 1) / block) · block` at most.
    """
    block = worker.block_tokens or 1
    held = min(overlap.tokens.get(worker.id, 0), max(prompt_tokens - 1, 0))
    return held // block * block


# Wait, uncached, avoidable, eviction, and their sum: the parts of one cost, in seconds.
Parts = tuple[float, float, float, float, float]


def costs(candidates: list[WorkerView], hits: list[int], overlap: Overlap, prompt_tokens: int) -> list[Parts]:
    """Returns the cost of each candidate, given its expected hit."""
    most, count = max(hits), len(candidates)
    # The avoidable work delays everybody who comes after, wherever it runs: it is priced at the fleet's mean speed.
    # Work is linear in a curve's coefficients, so the mean of the work is the work of the mean curve.
    linear = quadratic = 0.0
    for worker in candidates:
        linear += worker.speed.linear
        quadratic += worker.speed.quadratic
    linear, quadratic = AVOIDABLE_PRICE * linear / count, AVOIDABLE_PRICE * quadratic / count
    parts: list[Parts] = []
    for worker, hit in zip(candidates, hits, strict=True):
        waiting = wait(worker)
        uncached = worker.speed.seconds(prompt_tokens, hit)
        avoidable = linear * (most - hit) + quadratic * (most * most - hit * hit) if hit < most else 0.0
        room = overlap.room.get(worker.id)
        evicting = 0.0 if room is None else eviction(worker, prompt_tokens - hit, room)
        parts.append((waiting, uncached, avoidable, evicting, waiting + uncached + avoidable + evicting))
    return parts


def rank(parts: list[Parts], rng: Rng) -> list[int]:
    """Returns positions by cost: a random one of those within a tie leads, the next best follows."""
    order = sorted(range(len(parts)), key=lambda position: parts[position][4])
    limit = parts[order[0]][4] * (1 + TIE)
    tied = 1
    while tied < len(order) and parts[order[tied]][4] <= limit:
        tied += 1
    lead = order.pop(int(rng.random() * tied))
    return [lead, *order]


def candidate(worker: WorkerView, hit: int, parts: Parts) -> Candidate:
    """Renders one worker's part in the decision."""
    return Candidate(worker.id, hit, Cost(*parts[:4]))


def wait(worker: WorkerView) -> float:
    """Returns the seconds until the worker can begin: what is booked on it, plus what its engine has queued.

    A request that waits in the engine and is not booked here (another proxy's, or direct) has an unknown length; it
    counts as one base time. A running stream slows a prefill by its share of every step.
    """
    unbooked = max((worker.engine_waiting or 0) - worker.inflight, 0)
    return worker.pending_seconds + worker.inflight * STREAM_SECONDS + unbooked * worker.speed.base


def eviction(worker: WorkerView, new_tokens: int, room: Room) -> float:
    """Returns the price, in seconds, of pushing `new_tokens` into the worker's cache: a recompute, by recency."""
    if room.free_tokens is None or room.coldest_age is None:
        return 0.0
    pushed_out = max(new_tokens - max(room.free_tokens, 0), 0)
    decay = math.exp(-room.coldest_age / RECENCY_SECONDS)
    return worker.speed.work(pushed_out) * decay


def reason_of(hit: int, hits: list[int], request: Ask) -> Reason:
    """Names why the winner, whose expected hit is `hit`, won."""
    if request.excluded:
        return Reason.FALLBACK
    if len(hits) == 1:
        return Reason.ONLY_CANDIDATE
    if hit > min(hits):
        return Reason.OVERLAP
    return Reason.LOAD
