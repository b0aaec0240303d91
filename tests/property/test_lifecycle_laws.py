"""What holds after any sequence of events."""

from hypothesis import given
from hypothesis import strategies as st

from proxy.core.lifecycle import Event, State, step

events = st.lists(st.sampled_from(list(Event)), max_size=30)


def run(start, sequence):
    for event in sequence:
        start = step(start, event)
    return start


@given(events)
def test_ready_needs_a_probe_after_the_last_start(sequence):
    if run(State.JOINING, sequence) is State.READY:
        begins = [at for at, event in enumerate(sequence) if event in (Event.RESTARTED, Event.CORDON, Event.DRAIN)]
        assert Event.PROBED in sequence[(begins or [-1])[-1] + 1 :]


@given(st.sampled_from([State.CORDONED, State.DRAINING]), events)
def test_who_is_out_stays_out_until_a_word_or_a_new_life(start, sequence):
    without = [event for event in sequence if event not in (Event.RESTARTED, Event.UNCORDON)]
    assert run(start, without) in (State.CORDONED, State.DRAINING, State.GONE)


@given(events)
def test_only_another_life_brings_back_what_is_gone(sequence):
    after = run(State.GONE, sequence)
    assert after is State.GONE or Event.RESTARTED in sequence


@given(st.sampled_from(list(State)), st.sampled_from(list(Event)))
def test_an_event_that_is_told_twice_changes_nothing_more(state, event):
    assert step(step(state, event), event) is step(state, event)
