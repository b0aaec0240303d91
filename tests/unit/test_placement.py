"""Choosing a worker: cases as a table, laws as properties, and whole fleets over time."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.blocks import chain
from proxy.core.placement import expected_hit, place, wait
from proxy.core.speed import SpeedCurve, curve_of
from proxy.core.types import (
    Ask,
    Overlap,
    Placement,
    Reason,
    Refusal,
    RefusalReason,
    Room,
    Snapshot,
    WorkerView,
)
from proxy.index.memory import MemoryIndex

FEW = settings(max_examples=100, deadline=None)


def view(name, **fields):
    return WorkerView(**({"id": name, "incarnation": "1", "models": frozenset({"m"}), "speed": SpeedCurve()} | fields))


def change(worker, **fields):
    return WorkerView(**({name: getattr(worker, name) for name in WorkerView.__annotations__} | fields))


def choose(workers, tokens=None, *, prompt=4000, room=None, excluded=(), seed=0, model="m"):
    snapshot = Snapshot(tuple(workers), frozenset({"m", "away"}))
    ask = Ask(model, prompt, frozenset(excluded))
    return place(snapshot, Overlap(tokens or {}, room or {}), ask, 0.0, random.Random(seed))


def winners(*args, **kwargs):
    return {choose(*args, **kwargs, seed=seed).winner.worker for seed in range(40)}


A, B, C = view("a"), view("b"), view("c")
SLOW, FAST = curve_of("GeForce RTX 5090"), curve_of("B200")


@pytest.mark.parametrize(
    ("workers", "tokens", "more", "won", "reason"),
    [
        ([A, B, C], {}, {}, {"a", "b", "c"}, Reason.LOAD),
        ([A], {}, {}, {"a"}, Reason.ONLY_CANDIDATE),
        ([A], {"a": 3000}, {}, {"a"}, Reason.ONLY_CANDIDATE),
        ([A, B], {"b": 3000}, {}, {"b"}, Reason.OVERLAP),
        ([A, B], {"a": 3000, "b": 3900}, {}, {"b"}, Reason.OVERLAP),
        ([A, B], {"a": 3000, "b": 3000}, {}, {"a", "b"}, Reason.LOAD),
        ([A, B], {"b": 3000}, {"excluded": {"b"}}, {"a"}, Reason.FALLBACK),
        ([A, B], {"b": 3000, "stranger": 4000}, {}, {"b"}, Reason.OVERLAP),
        # A long queue before a short hit sends it elsewhere, a short queue before a long hit does not.
        ([A, change(B, pending_seconds=5.0, pending_tokens=60_000)], {"b": 1000}, {}, {"a"}, Reason.LOAD),
        ([A, change(B, pending_seconds=0.5, pending_tokens=6000)], {"b": 3900}, {}, {"b"}, Reason.OVERLAP),
        ([A, change(B, inflight=8)], {}, {}, {"a"}, Reason.LOAD),
        ([A, change(B, engine_waiting=3)], {}, {}, {"a"}, Reason.LOAD),
        # A hit of 1,000 on a slow card against a recompute on a fast one, and a hit that is worth the slow card.
        ([change(A, speed=SLOW), change(B, speed=FAST)], {"a": 1000}, {"prompt": 30_000}, {"b"}, Reason.LOAD),
        ([change(A, speed=SLOW), change(B, speed=FAST)], {"a": 29_000}, {"prompt": 30_000}, {"a"}, Reason.OVERLAP),
        # Where both are full, what is cold goes first.
        (
            [A, B],
            {},
            {"room": {"a": Room(0, 1.0), "b": Room(0, 3000.0)}},
            {"b"},
            Reason.LOAD,
        ),
        ([A, B], {}, {"room": {"a": Room(0, 1.0), "b": Room(100_000, 1.0)}}, {"b"}, Reason.LOAD),
        # Only whole blocks of the engine can hit: 1,000 tokens are nothing to a hybrid with blocks of 1,056.
        ([change(A, block_tokens=1056), B], {"a": 1000, "b": 900}, {}, {"b"}, Reason.OVERLAP),
    ],
)
def test_who_wins_and_why(workers, tokens, more, won, reason):
    assert winners(workers, tokens, **more) == won
    assert choose(workers, tokens, **more).reason is reason


@pytest.mark.parametrize(
    ("workers", "model", "excluded", "reason"),
    [
        ([A, B], "nope", (), RefusalReason.UNKNOWN_MODEL),
        ([A, B], "away", (), RefusalReason.NO_WORKER),
        ([], "m", (), RefusalReason.NO_WORKER),
        ([A, B], "m", ("a", "b"), RefusalReason.NO_WORKER),
        ([A], "M", (), RefusalReason.UNKNOWN_MODEL),
    ],
)
def test_who_is_refused(workers, model, excluded, reason):
    assert choose(workers, model=model, excluded=excluded) == Refusal(reason)


def test_an_empty_fleet_knows_no_model_and_so_calls_none_unknown():
    assert place(Snapshot(()), Overlap(), Ask("m", 5), 0.0, random.Random(0)) == Refusal(RefusalReason.NO_WORKER)


@pytest.mark.parametrize(
    ("block", "held", "prompt", "hit"),
    [
        (32, 416, 417, 416),
        (32, 416, 416, 384),  # the last token is always computed
        (32, 1000, 417, 416),
        (32, 31, 417, 0),
        (None, 300, 301, 300),
        (None, 300, 300, 299),
        (1056, 5000, 5212, 4224),
        (16, 0, 0, 0),
        (16, 50, 0, 0),
        (16, 50, 1, 0),
    ],
)
def test_the_expected_hit(block, held, prompt, hit):
    assert expected_hit(view("a", block_tokens=block), Overlap({"a": held}), prompt) == hit


def test_the_wait_counts_what_is_booked_once():
    booked = view("a", pending_seconds=2.0, inflight=3, engine_waiting=3)
    assert wait(booked) == pytest.approx(2.0 + 3 * 0.02)
    assert wait(change(booked, engine_waiting=5)) == pytest.approx(2.0 + 3 * 0.02 + 2 * 0.13)
    assert wait(view("a")) == 0


def test_the_same_arguments_give_the_same_placement():
    def once():
        return choose([A, B, C], {"a": 500}, prompt=600, seed=3)

    assert once() == once()
    assert winners([A, B, C]) == {"a", "b", "c"}


tokens = st.integers(0, 60_000)
workers = st.builds(
    view,
    st.just("x"),
    speed=st.sampled_from([SpeedCurve(), SLOW, FAST]),
    pending_seconds=st.floats(0, 20),
    inflight=st.integers(0, 30),
    engine_waiting=st.none() | st.integers(0, 30),
    block_tokens=st.none() | st.sampled_from([16, 32, 1056]),
)
rooms = st.builds(Room, st.none() | st.integers(-1000, 60_000), st.none() | st.floats(0, 4000))


@st.composite
def fleets(draw, kind=workers):
    names = "abcde"[: draw(st.integers(1, 5))]
    fleet = [change(draw(kind), id=name) for name in names]
    held = {name: draw(tokens) for name in names if draw(st.booleans())}
    room = {name: draw(rooms) for name in names if draw(st.booleans())}
    return fleet, held, room


@FEW
@given(fleets(), st.integers(0, 70_000), st.integers(0, 99))
def test_a_placement_explains_itself(case, prompt, seed):
    fleet, held, room = case
    placed = choose(fleet, held, prompt=prompt, room=room, seed=seed)
    assert placed == choose(fleet, held, prompt=prompt, room=room, seed=seed)
    assert placed.candidates == len(fleet)
    assert (placed.runner_up is None) == (len(fleet) == 1)
    for candidate in (placed.winner, placed.runner_up):
        if candidate is not None:
            parts = (candidate.cost.wait, candidate.cost.uncached, candidate.cost.avoidable, candidate.cost.eviction)
            assert sum(parts) == pytest.approx(candidate.cost.total)
            assert min(parts) >= 0
            by_id = {worker.id: worker for worker in fleet}
            block = by_id[candidate.worker].block_tokens or 1
            assert candidate.expected_tokens % block == 0
            assert 0 <= candidate.expected_tokens <= max(prompt - 1, 0) // block * block
    if placed.runner_up is not None:
        assert placed.winner.worker != placed.runner_up.worker
        assert placed.winner.cost.total <= placed.runner_up.cost.total * 1.03 + 1e-9


@FEW
@given(fleets(), st.integers(1, 70_000), st.data())
def test_who_is_excluded_is_never_chosen(case, prompt, data):
    fleet, held, room = case
    names = [worker.id for worker in fleet]
    out = data.draw(st.sets(st.sampled_from(names)))
    placed = choose(fleet, held, prompt=prompt, room=room, excluded=out)
    if len(out) == len(names):
        assert placed == Refusal(RefusalReason.NO_WORKER)
    else:
        assert placed.winner.worker not in out
        assert placed.runner_up is None or placed.runner_up.worker not in out
        assert placed.candidates == len(names) - len(out)


equal = workers.map(lambda worker: change(worker, speed=SpeedCurve(), block_tokens=16))


def cost_of(fleet, held, room, prompt, name):
    """One worker's cost among equals, made visible by making it the only one left besides the best."""
    return next(
        candidate.cost.total
        for seed in range(200)
        for candidate in (choose(fleet, held, prompt=prompt, room=room, seed=seed),)
        for candidate in (candidate.winner, candidate.runner_up)
        if candidate is not None and candidate.worker == name
    )


@FEW
@given(equal, equal, tokens, tokens, tokens, rooms, st.integers(1, 70_000))
def test_more_overlap_never_makes_a_worker_dearer(one, other, mine, theirs, more, room, prompt):
    fleet = [change(one, id="a"), change(other, id="b")]
    before = cost_of(fleet, {"a": mine, "b": theirs}, {"a": room}, prompt, "a")
    after = cost_of(fleet, {"a": mine + more, "b": theirs}, {"a": room}, prompt, "a")
    assert after <= before + 1e-9


@FEW
@given(equal, equal, st.integers(0, 4000), st.integers(0, 1000), st.integers(0, 1000))
def test_what_everybody_holds_changes_no_difference(one, other, common, mine, theirs):
    # The lengths are whole blocks; `common` more tokens of prompt are held by both.
    common, mine, theirs = common * 16, mine * 16, theirs * 16
    fleet = [change(one, id="a"), change(other, id="b")]
    rest = max(mine, theirs) + 100

    def difference(shared):
        # Attention makes a token dearer the more stand before it; a straight curve shows the rule alone.
        straight = [change(worker, speed=SpeedCurve(quadratic=0.0)) for worker in fleet]
        held = {"a": shared + mine, "b": shared + theirs}
        return [cost_of(straight, held, {}, shared + rest, name) for name in "ab"]

    (a, b), (a_more, b_more) = difference(0), difference(common)
    assert a_more - b_more == pytest.approx(a - b, abs=1e-6)


class Fleet:
    """Equal workers with queues, an index, and a clock that the test moves."""

    def __init__(self, count, seed):
        self.index = MemoryIndex()
        self.views = {name: view(name, block_tokens=16, capacity_tokens=262_144) for name in "abcdefgh"[:count]}
        self.rng = random.Random(seed)
        self.now = 0.0
        for name in self.views:
            self.index.begin(name, "1", 262_144)

    def send(self, segments):
        """Places one prompt and books it; returns where it went and how to settle it."""
        trail = self.index.find(chain(segments, 1), "m")
        overlap = self.index.overlap(trail, self.views, self.now)
        placed = place(Snapshot(tuple(self.views.values())), overlap, Ask("m", trail.tokens), self.now, self.rng)
        assert isinstance(placed, Placement)
        name, seconds = placed.winner.worker, placed.winner.cost.uncached
        assumption = self.index.assume(name, trail, self.now)
        self.book(name, seconds)

        def settle():
            self.book(name, -seconds)
            self.index.confirm(assumption, trail.blocks.size // 4, placed.winner.expected_tokens, trail.turn)

        return name, settle

    def book(self, name, seconds):
        worker = self.views[name]
        pending = max(worker.pending_seconds + seconds, 0.0)
        self.views[name] = change(
            worker, pending_seconds=pending, inflight=worker.inflight + (1 if seconds > 0 else -1)
        )


@pytest.mark.parametrize("seed", range(5))
def test_a_shared_system_prompt_spreads_and_every_conversation_stays_home(seed):
    fleet, rng = Fleet(4, seed), random.Random(seed)
    system = b"system\x1f" + b"You are an agent. " * 667 + b"\n"  # 12,000 characters
    said = {number: [b"user\x1f" + (b"%d " % number) * 700 + b"\n"] for number in range(40)}
    homes, settles = {}, []
    for number, messages in said.items():
        homes[number], settle = fleet.send([system, *messages])
        settles.append(settle)
        fleet.now += 0.05
    for settle in settles:
        settle()
    counts = sorted(list(homes.values()).count(name) for name in "abcd")
    assert counts[0] >= 6
    assert counts[-1] <= 14
    turns = [number for number in said for _ in range(5)]
    rng.shuffle(turns)
    away = 0
    for number in turns:
        said[number] += [b"assistant\x1f" + b"answer " * 20 + b"\n", b"user\x1f" + b"more " * 20 + b"\n"]
        name, settle = fleet.send([system, *said[number]])
        away += name != homes[number]
        fleet.now += 0.2
        settle()
    assert away <= 4  # 2 % of 200


def test_long_streams_count_as_load_though_nothing_completes():
    fleet = Fleet(2, 1)
    fleet.views["a"] = change(fleet.views["a"], inflight=8)
    first = []
    for number in range(20):
        name, settle = fleet.send([b"user\x1f" + (b"%d " % number) * 200 + b"\n"])
        first.append(name)
        settle()
        fleet.now += 1
    assert first.count("b") >= 18


def test_an_equal_fleet_shares_cold_load_evenly():
    fleet = Fleet(4, 2)
    homes = [fleet.send([b"user\x1f" + (b"%d " % number) * 400 + b"\n"])[0] for number in range(40)]
    assert sorted(homes.count(name) for name in "abcd") == [10, 10, 10, 10]
