"""The life of a worker as a printed table: (state, event) → state. What is not in the table changes nothing."""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """Where a worker is in its life. Only `ready` takes new requests."""

    JOINING = "joining"
    READY = "ready"
    SUSPECT = "suspect"
    CORDONED = "cordoned"
    DRAINING = "draining"
    GONE = "gone"


class Event(StrEnum):
    """What can happen to it."""

    PROBED = "probed"  # it answered, and serves at least one model
    FAILED = "failed"  # a connection to it failed, or it did not answer its probe
    RESTARTED = "restarted"  # another incarnation stands in its place
    CORDON = "cordon"  # no new placements, by an operator's word
    UNCORDON = "uncordon"
    DRAIN = "drain"
    LAPSED = "lapsed"  # its lease ran out
    REMOVED = "removed"


TABLE: dict[tuple[State, Event], State] = {
    (State.JOINING, Event.PROBED): State.READY,
    (State.READY, Event.FAILED): State.SUSPECT,
    (State.SUSPECT, Event.PROBED): State.READY,
    (State.JOINING, Event.CORDON): State.CORDONED,
    (State.READY, Event.CORDON): State.CORDONED,
    (State.SUSPECT, Event.CORDON): State.CORDONED,
    (State.CORDONED, Event.UNCORDON): State.JOINING,
    (State.DRAINING, Event.UNCORDON): State.JOINING,
    **{(state, Event.RESTARTED): State.JOINING for state in State if state is not State.CORDONED},
    **{(state, Event.DRAIN): State.DRAINING for state in State if state is not State.GONE},
    **{(state, Event.LAPSED): State.GONE for state in State},
    **{(state, Event.REMOVED): State.GONE for state in State},
}


def step(state: State, event: Event) -> State:
    """Returns the state after an event."""
    return TABLE.get((state, event), state)
