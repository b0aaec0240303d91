"""What the director needs of the other rooms, as protocols. The composition root hands in what fits."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self, TypeVar

from ..core.blocks import Blocks
from ..core.types import Overlap, Placement, Snapshot, Usage


class Booking(Protocol):
    """A lease: entered when the attempt begins, left on every way out."""

    def __enter__(self) -> Self:
        """Books the share."""

    def __exit__(self, *exc: object) -> None:
        """Gives it back, once."""

    def prefilled(self) -> None:
        """The prompt is computed."""


class Fleet(Protocol):
    """Who may be chosen, and what is booked on them."""

    def snapshot(self) -> Snapshot:
        """Returns the workers that may be chosen now."""

    def lease(self, worker_id: str, tokens: int, seconds: float) -> Booking:
        """Returns a lease, or raises KeyError when the worker has just left."""

    def failed(self, worker_id: str) -> None:
        """Notes that the worker could not be reached."""

    def address(self, worker_id: str) -> str:
        """Returns the worker's base URL, or raises KeyError when it has just left."""


class History(Protocol):
    """Lengths and turns of served prompts."""

    def tokens_at(self, blocks: Blocks, depth: int, model: str) -> int:
        """Returns the tokens of the first `depth` blocks."""

    def turn(self, blocks: Blocks) -> int:
        """Returns which request of its prefix this is, from 1."""

    def learn(self, blocks: Blocks, model: str, prompt_tokens: int | None, turn: int) -> None:
        """Takes in a served prompt."""


A = TypeVar("A")


class Index(Protocol[A]):
    """Who holds which prefix. `A` is the index's own note of what it assumed."""

    def overlap(self, blocks: Blocks, model: str, workers: Iterable[str], now: float) -> Overlap:
        """Returns what each worker is believed to hold."""

    def assume(self, worker: str, blocks: Blocks, model: str, now: float) -> A | None:
        """Records that a worker is about to hold a prompt."""

    def withdraw(self, assumption: A, blocks: Blocks) -> None:
        """Takes that back."""

    def confirm(self, assumption: A, blocks: Blocks, delivered_tokens: int | None) -> int:
        """Corrects the view by what was delivered."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request to a worker: the client's bytes, and the headers that may travel."""

    url: str
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes


class Answer(Protocol):
    """A worker's answer, its head read."""

    status: int
    headers: Sequence[tuple[bytes, bytes]]

    def chunks(self) -> AsyncIterator[bytes]:
        """Yields the body's bytes as they come. Raises WorkerDied when it breaks off."""

    async def close(self) -> None:
        """Ends the exchange; the worker sees the connection close if its answer is not complete."""


class Transport(Protocol):
    """Carries calls to workers."""

    async def open(self, worker_id: str, call: Call) -> Answer:
        """Sends a call and reads the head of the answer.

        Raises:
            ConnectFailed: no connection; nothing was sent.
            ReuseFailed: a kept-alive connection died before any byte of the answer.
            FirstByteTimeout: the worker stayed silent.
            WorkerDied: the connection broke.
        """

    async def close(self) -> None:
        """Closes every connection."""


@dataclass(slots=True)
class Outcome:
    """Everything that one request came to. Settle fills it, telemetry reads it.

    Times are in seconds. `ttft` is from the request's arrival to its first content token; None when there was none.
    """

    request_id: str
    dialect: str
    model: str | None = None
    is_known_model: bool = False
    stream: bool = False
    result: str = "internal"
    status: int | None = None
    placement: Placement | None = None
    hardware: str | None = None
    block_tokens: int | None = None
    turn: int = 1
    attempts: int = 0
    usage: Usage = field(default_factory=Usage)
    ttft: float | None = None
    duration: float = 0.0
    bytes_in: int = 0
    bytes_out: int = 0
    stages: dict[str, float] = field(default_factory=dict)
    error: str | None = None

    @property
    def worker(self) -> str | None:
        """The worker that answered, or was last tried; None when none was chosen."""
        return None if self.placement is None else self.placement.winner.worker


class Telemetry(Protocol):
    """Where outcomes go."""

    def observe(self, outcome: Outcome) -> None:
        """Takes in one settled request."""
