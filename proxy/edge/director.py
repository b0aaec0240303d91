"""Takes requests on their one-way path, whichever door they came in by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from ..core.reader import PromptReader
from ..core.types import Rng
from .journey import Journey
from .ports import Arrival, Client, Fleet, Index, Telemetry, Trail, Transport

T = TypeVar("T", bound=Trail)
A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class Rooms(Generic[T, A]):
    """The rooms that the director works with."""

    fleet: Fleet
    index: Index[T, A]
    transport: Transport
    telemetry: Telemetry


class Director(Generic[T, A]):
    """Serves inference requests.

    Args:
        rooms: fleet, index, transport, telemetry.
        clock: a steady clock, in seconds.
        rng: breaks ties between equal workers.
        seed: returns the fleet's secret hash seed.
    """

    def __init__(self, rooms: Rooms[T, A], clock: Callable[[], float], rng: Rng, seed: Callable[[], int]) -> None:
        self.rooms = rooms
        self.clock = clock
        self.rng = rng
        self.seed = seed
        self.reader = PromptReader()

    def begin(self, arrival: Arrival, client: Client) -> Journey[T, A]:
        """Sends a request on its way. The door tells the journey when the client leaves, falls behind or catches up."""
        journey = Journey(self, arrival, client)
        journey.begin()
        return journey
