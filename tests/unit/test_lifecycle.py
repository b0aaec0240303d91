"""The life of a worker, row by row."""

import pytest

from proxy.core.lifecycle import TABLE, Event, State, step

J, R, S, C, D, G = State

# For every event what becomes of joining, ready, suspect, cordoned, draining, gone.
ROWS = {
    Event.PROBED: (R, R, R, C, D, G),
    Event.FAILED: (J, S, S, C, D, G),
    Event.RESTARTED: (J, J, J, C, J, J),
    Event.CORDON: (C, C, C, C, D, G),
    Event.UNCORDON: (J, R, S, J, J, G),
    Event.DRAIN: (D, D, D, D, D, G),
    Event.LAPSED: (G, G, G, G, G, G),
    Event.REMOVED: (G, G, G, G, G, G),
}


@pytest.mark.parametrize("event", Event)
def test_every_state_under_every_event(event):
    assert tuple(step(state, event) for state in State) == ROWS[event]


def test_only_what_changes_something_may_change_to_ready():
    assert {state for (state, event), after in TABLE.items() if after is R and event is not Event.PROBED} == set()


def test_names_are_the_ones_on_the_wire():
    assert [state.value for state in State] == ["joining", "ready", "suspect", "cordoned", "draining", "gone"]
