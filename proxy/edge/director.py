"""Takes requests on their one-way path, whichever door they came in by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from ..core.types import Rng
from .journey import Arrival, Journey
from .ports import Client, Fleet, History, Index, Telemetry, Transport

A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class Rooms(Generic[A]):
    """The rooms that the director works with."""

    fleet: Fleet
    index: Index[A]
    history: History
    transport: Transport
    telemetry: Telemetry


class Director(Generic[A]):
    """Serves inference requests.

    Args:
        rooms: fleet, index, history, transport, telemetry.
        clock: a steady clock, in seconds.
        rng: breaks ties between equal workers.
        seed: returns the fleet's secret hash seed.
    """

    def __init__(self, rooms: Rooms[A], clock: Callable[[], float], rng: Rng, seed: Callable[[], int]) -> None:
        self.rooms = rooms
        self.clock = clock
        self.rng = rng
        self.seed = seed

    def begin(self, arrival: Arrival, client: Client) -> Journey[A]:
        """Sends a request on its way. The door tells the journey when the client leaves, falls behind or catches up."""
        journey = Journey(self, arrival, client)
        journey.begin()
        return journey
