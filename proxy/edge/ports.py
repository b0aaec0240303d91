"""What the director needs of the other rooms, as protocols. The composition root hands in what fits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from ..core.blocks import Blocks
from ..core.prompt import Dialect
from ..core.types import Overlap, Placement, Snapshot, Usage
from ..errors import HomingError
from .asgi import Headers


class Booking(Protocol):
    """A lease, booked from the moment it is given out."""

    def prefilled(self) -> None:
        """The prompt is computed."""

    def release(self) -> None:
        """Gives the share back; harmless when called again."""


class Fleet(Protocol):
    """Who may be chosen, and what is booked on them."""

    def snapshot(self) -> Snapshot:
        """Returns the workers that may be chosen now."""

    def lease(self, worker_id: str, tokens: int, seconds: float) -> Booking:
        """Books a share of a worker and returns it, or raises KeyError when the worker has just left."""

    def failed(self, worker_id: str) -> None:
        """Notes that the worker could not be reached."""

    def address(self, worker_id: str) -> str:
        """Returns the worker's base URL, or raises KeyError when it has just left."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request as it came in. `received` is on the director's clock, in seconds; `target` is path and query."""

    request_id: str
    dialect: Dialect
    target: bytes
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes
    received: float


class Trail(Protocol):
    """A prompt, and how far the index knows it."""

    tokens: int
    turn: int


T = TypeVar("T", bound=Trail)
A = TypeVar("A")


class Index(Protocol[T, A]):
    """Who holds which prefix. `T` is its view of one prompt, `A` its note of what it assumed."""

    def find(self, blocks: Blocks, model: str) -> T:
        """Finds how far a prompt is known: its length in tokens, and which request of its prefix it is."""

    def overlap(self, trail: T, workers: Iterable[str], now: float) -> Overlap:
        """Returns what each worker is believed to hold."""

    def assume(self, worker: str, trail: T, now: float) -> A | None:
        """Records that a worker is about to hold a prompt."""

    def withdraw(self, assumption: A) -> None:
        """Takes that back."""

    def confirm(self, assumption: A, prompt_tokens: int | None, delivered_tokens: int | None, turn: int) -> int:
        """Corrects the view by what the engine counted and delivered."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request to a worker: where, the headers that may travel, and the client's bytes.

    `target` is path and query as the client sent them; `headers` have lower-case names and no length.
    """

    base_url: str
    target: bytes
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes


class Sink(Protocol):
    """Who hears what comes of a call. One head, then data, then one of end and fault; or a fault alone."""

    def on_head(self, status: int, headers: Headers) -> None:
        """The answer has begun; header names are in lower case."""

    def on_data(self, chunk: bytes) -> None:
        """A piece of the body has come."""

    def on_end(self) -> None:
        """The answer is whole."""

    def on_fault(self, fault: HomingError) -> None:
        """There is no (more) answer: ConnectFailed, ReuseFailed, FirstByteTimeout or WorkerDied."""


class Exchange(Protocol):
    """A running call."""

    def pause(self) -> None:
        """Stops reading from the worker until `resume`: the client is behind."""

    def resume(self) -> None:
        """Reads again."""

    def abort(self) -> None:
        """Ends the call at once. The worker sees its connection close; the sink hears nothing more."""


class Transport(Protocol):
    """Carries calls to workers."""

    def open(self, worker_id: str, call: Call, sink: Sink) -> Exchange:
        """Starts a call. Nothing is told to the sink before this returns."""

    async def close(self) -> None:
        """Closes every connection."""


class Client(Protocol):
    """The client's side of one request, as a door offers it."""

    def start(self, status: int, headers: Headers) -> None:
        """Begins the response. Without a content-length among the headers its end is marked by the door."""

    def write(self, chunk: bytes) -> None:
        """Sends a piece of the body."""

    def end(self) -> None:
        """Completes the response."""

    def cut(self) -> None:
        """Breaks the response off so that the client sees that it is not whole."""


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
