"""Whatever happens to attempts, a worker gets back exactly what was booked on it, once."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from proxy.core.lifecycle import Event
from proxy.fleet.registry import Facts, Registry, Source, Worker


class Bookings(RuleBasedStateMachine):
    """One worker that fails, restarts, leaves and comes back, with leases on it all the while."""

    leases = Bundle("leases")

    def __init__(self):
        super().__init__()
        self.registry = Registry()
        self.seen = []
        self.open = {}
        self.join("1")

    def join(self, incarnation):
        worker = self.registry.upsert(Worker("a", "http://a", incarnation, Source.REGISTERED, facts=Facts()))
        if worker not in self.seen:
            self.seen.append(worker)

    @rule(target=leases, tokens=st.integers(0, 1000), seconds=st.sampled_from([0.0, 0.1, 0.13, 0.2, 0.7, 30.0]))
    def book(self, tokens, seconds):
        try:
            lease = self.registry.lease("a", tokens, seconds)
        except KeyError:
            assert self.registry.get("a") is None
            return None
        self.open[lease] = (tokens, seconds)
        return lease

    @rule(lease=leases)
    def prefilled(self, lease):
        if lease is not None:
            lease.prefilled()
            if lease in self.open:
                self.open[lease] = (0, 0.0)

    @rule(lease=leases)
    def release(self, lease):
        if lease is not None:
            lease.release()
            self.open.pop(lease, None)

    @rule(lease=consumes(leases))
    def release_and_then_prefilled(self, lease):
        if lease is not None:
            lease.release()
            lease.prefilled()
            lease.release()
            self.open.pop(lease, None)

    @rule(event=st.sampled_from([Event.FAILED, Event.PROBED, Event.DRAIN, Event.REMOVED]))
    def happen(self, event):
        worker = self.registry.get("a")
        if worker is not None:
            self.registry.apply(worker, event)

    @rule(incarnation=st.sampled_from("123"))
    def register(self, incarnation):
        self.join(incarnation)

    @invariant()
    def what_is_booked_is_what_is_open(self):
        for worker in self.seen:
            mine = [booked for lease, booked in self.open.items() if lease.worker is worker]
            assert worker.inflight == sum(1 for lease in self.open if lease.worker is worker)
            assert worker.pending_tokens == sum(tokens for tokens, _ in mine)
            assert worker.pending_seconds >= 0
            if worker.pending_tokens and all(tokens for tokens, _ in mine if _):
                assert worker.pending_seconds == pytest.approx(sum(seconds for _, seconds in mine), abs=1e-6)

    def teardown(self):
        for lease in list(self.open):
            lease.release()
        for worker in self.seen:
            assert (worker.inflight, worker.pending_tokens, worker.pending_seconds) == (0, 0, 0.0)


TestBookings = Bookings.TestCase
TestBookings.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
