"""The values that cross a door. All are frozen; missing is None, never 0.

They are msgspec structs: a tenth of a data class to make, and a log line renders them as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Protocol

from msgspec import Struct, field

from .speed import SpeedCurve


class Rng(Protocol):
    """The one kind of chance that placement uses."""

    def random(self) -> float:
        """Returns a float in [0, 1)."""


class WorkerView(Struct, frozen=True, gc=False):
    """One worker as a choice sees it.

    Attributes:
        id: the worker's stable name.
        incarnation: the life of the engine this view is of.
        models: the model names it serves.
        speed: prompt tokens to prefill seconds.
        pending_tokens: prompt tokens booked by leases here and not yet prefilled.
        pending_seconds: the prefill seconds that they were booked at.
        inflight: requests leased here and not yet settled.
        engine_waiting: requests queued in the engine at the last probe; None when not known.
        block_tokens: tokens in one cache block of the engine; None when not known.
        capacity_tokens: what its prefix cache can hold; None when not known.
        hardware: edition name of the hardware ledger; None when not known.
    """

    id: str
    incarnation: str
    models: frozenset[str]
    speed: SpeedCurve
    pending_tokens: int = 0
    pending_seconds: float = 0.0
    inflight: int = 0
    engine_waiting: int | None = None
    block_tokens: int | None = None
    capacity_tokens: int | None = None
    hardware: str | None = None


class Snapshot(Struct, frozen=True, gc=False):
    """The workers that may be chosen, at one moment, and the models that the fleet is known to serve.

    A known model whose workers are all away is a matter of time (503); an unknown one is a mistake (404).
    """

    workers: tuple[WorkerView, ...]
    known_models: frozenset[str] = frozenset()


class Room(Struct, frozen=True, gc=False):
    """What a worker's cache would have to give up.

    Attributes:
        free_tokens: capacity minus what it is believed to hold; None when the capacity is not known.
        coldest_age: seconds since its least recently used entry was used; None when it holds nothing.
    """

    free_tokens: int | None = None
    coldest_age: float | None = None


class Overlap(Struct, frozen=True, gc=False):
    """What each worker is believed to hold of one prompt, in tokens; a worker that is absent holds nothing."""

    tokens: Mapping[str, int] = field(default_factory=dict)
    room: Mapping[str, Room] = field(default_factory=dict)


class Ask(Struct, frozen=True, gc=False):
    """What a request asks of placement.

    Attributes:
        model: the model as the client named it.
        prompt_tokens: length of the prompt (an estimate until the engine says).
        excluded: workers that failed an earlier attempt of this request.
    """

    model: str
    prompt_tokens: int
    excluded: frozenset[str] = frozenset()


class Reason(StrEnum):
    """Why the winner won."""

    OVERLAP = "overlap"
    LOAD = "load"
    ONLY_CANDIDATE = "only-candidate"
    FALLBACK = "fallback"


class RefusalReason(StrEnum):
    """Why nobody was chosen."""

    NO_WORKER = "no-worker"
    UNKNOWN_MODEL = "unknown-model"


class Cost(Struct, frozen=True, gc=False):
    """The parts of one worker's cost, each in seconds; lower is better."""

    wait: float
    uncached: float
    avoidable: float
    eviction: float

    @property
    def total(self) -> float:
        """The number that is compared."""
        return self.wait + self.uncached + self.avoidable + self.eviction


class Candidate(Struct, frozen=True, gc=False):
    """One worker in a placement, with its expected hit (tokens) and its cost."""

    worker: str
    expected_tokens: int
    cost: Cost


class Placement(Struct, frozen=True, gc=False):
    """A decision with its explanation."""

    winner: Candidate
    runner_up: Candidate | None
    reason: Reason
    prompt_tokens: int
    candidates: int


class Refusal(Struct, frozen=True, gc=False):
    """A decision not to place."""

    reason: RefusalReason


class Usage(Struct, frozen=True, gc=False):
    """What the engine says it did, in tokens; None where it did not say."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
