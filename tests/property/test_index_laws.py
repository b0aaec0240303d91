"""The memory index under any sequence of what happens to it, against what its books must add up to."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from proxy.core.blocks import chain
from proxy.index import memory
from proxy.index.memory import MemoryIndex

WORKERS = "abc"
# Few pieces, so that prompts meet and part all the time; 4 bytes are a token until a model has answered.
segments = st.lists(st.sampled_from([b"x" * 40, b"x" * 64, b"x" * 90, b"y" * 300, b"z" * 130]), max_size=4)
capacities = st.sampled_from([None, 20, 90, 150, 400])


def runs_of(index):
    return set(index._where.values())


def check_tree(index):
    runs = runs_of(index)
    assert sum(len(run.blocks) for run in runs) == len(index)
    children = Counter(run.parent for run in runs if run.parent is not None)
    for run in runs:
        assert run.blocks
        assert all(index._where[block] is run for block in run.blocks)
        assert run.first == (0 if run.parent is None else run.parent.end)
        assert run.parent is None or run.parent in runs
        assert run.children == children[run]
        assert run.weight >= 0
    assert set(index._idle) == {run for run in runs if not run.holders and not run.children}


def check_shelf(index, shelf):
    runs = runs_of(index)
    held = set(shelf.used)
    assert held == {run for run in runs if run.holders & shelf.bit}
    assert shelf.held_tokens == sum(run.weight for run in held)
    assert shelf.held_blocks == sum(len(run.blocks) for run in held)
    kids = Counter(run.parent for run in held if run.parent is not None)
    assert set(kids) <= held, "what is held is a prefix"
    assert shelf.kids == kids
    assert set(shelf.leaves) == held - set(kids)
    times = [shelf.used[run] for run in shelf.leaves]
    assert times == sorted(times), "the least recently used goes first"
    for run in held:
        assert run.parent is None or shelf.used[run.parent] >= shelf.used[run]


def view_of(index, worker):
    """What a worker is believed to hold: when each block was last used."""
    return {block: used for run, used in index.held(worker) for block in run.blocks}


class Books(RuleBasedStateMachine):
    """Workers come and go, prompts are assumed, withdrawn and confirmed, in any order."""

    attempts = Bundle("attempts")

    @initialize(bound=st.sampled_from([12, 60, 1_000_000]), capacity=capacities)
    def open(self, bound, capacity):
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(memory, "EVIDENT_TOKENS", 20)
        self.index = MemoryIndex(bound)
        self.bound = bound
        self.now = 0.0
        self.prompts = []
        for worker in WORKERS:
            self.index.begin(worker, "1", capacity)

    def tick(self):
        self.now += 1.0
        return self.now

    @rule(worker=st.sampled_from(WORKERS), incarnation=st.sampled_from("12"), capacity=capacities)
    def begin(self, worker, incarnation, capacity):
        shelf = self.index._shelves.get(worker)
        is_new = self.index.begin(worker, incarnation, capacity)
        assert is_new == (shelf is None or shelf.incarnation != incarnation)
        if is_new:
            assert self.index.shelf_sizes()[worker] == (0, 0)
        assert self.index.shelf_sizes()[worker][1] <= self.index._shelves[worker].bound

    @rule(worker=st.sampled_from(WORKERS), way=st.sampled_from(["forget", "suspend"]))
    def close(self, worker, way):
        getattr(self.index, way)(worker)
        assert worker not in self.index.shelf_sizes()
        assert self.index.held(worker) == []

    @rule(target=attempts, worker=st.sampled_from(WORKERS), parts=segments, is_raw=st.booleans())
    def assume(self, worker, parts, is_raw):
        blocks = chain(parts, 1, open_ended=is_raw)
        self.prompts.append(blocks)
        trail = self.index.find(blocks, "m")
        self.check_trail(trail)
        assumption = self.index.assume(worker, trail, self.tick())
        shelf = self.index._shelves.get(worker)
        assert (assumption is None) == (shelf is None or not blocks.closed)
        if assumption is not None and self.bound > 1000:
            assert shelf.held_tokens <= shelf.bound
            view = view_of(self.index, worker)
            there = [view.get(block) for block in blocks.hashes[: blocks.closed]]
            kept = there.count(self.now)
            assert there == [self.now] * kept + [None] * (blocks.closed - kept)
            fits = sum(run.weight for run in self.path(blocks)) <= shelf.bound
            assert kept == blocks.closed if fits else kept < blocks.closed
        return assumption, trail.turn

    def path(self, blocks):
        return {self.index._where[block] for block in blocks.hashes[: blocks.closed] if block in self.index._where}

    def check_trail(self, trail):
        known = [block in self.index._where for block in trail.blocks.hashes[: trail.blocks.closed]]
        assert known == sorted(known, reverse=True)
        assert trail.depth == sum(known)
        assert trail.tokens >= 0
        assert trail.turn >= 1

    @rule(attempt=consumes(attempts))
    def withdraw(self, attempt):
        if attempt[0] is not None:
            self.index.withdraw(attempt[0])

    @rule(worker=st.sampled_from(WORKERS), parts=segments)
    def assume_and_withdraw(self, worker, parts):
        if worker not in self.index.shelf_sizes() or self.bound < 1000:
            return
        before = view_of(self.index, worker)
        others = {name: view_of(self.index, name) for name in WORKERS if name != worker}
        assumption = self.index.assume(worker, self.index.find(chain(parts, 1), "m"), self.tick())
        if assumption is not None:
            self.index.withdraw(assumption)
        assert view_of(self.index, worker) == before
        assert {name: view_of(self.index, name) for name in others} == others

    @rule(
        attempt=consumes(attempts),
        tokens=st.none() | st.integers(0, 600),
        delivered=st.sampled_from([None, 0, 0, 50]),
    )
    def confirm(self, attempt, tokens, delivered):
        assumption, turn = attempt
        if assumption is not None:
            live = self.index._is_live(assumption.shelf)
            before = view_of(self.index, assumption.shelf.worker) if live else {}
            gone = self.index.confirm(assumption, tokens, delivered, turn)
            if live:
                after = view_of(self.index, assumption.shelf.worker)
                assert after.items() <= before.items()
                assert not gone or (delivered == 0 and assumption.is_evident)
                if delivered == 0 and assumption.is_evident:
                    assert min(after.values(), default=self.now) > max(assumption.was_used.values())
                assert assumption.shelf.held_tokens <= assumption.shelf.bound

    @rule(delta=st.integers(-3, 3))
    def look(self, delta):
        for blocks in self.prompts[-4:]:
            trail = self.index.find(blocks, "m")
            self.check_trail(trail)
            overlap = self.index.overlap(trail, WORKERS, self.now)
            assert set(overlap.room) == set(self.index.shelf_sizes())
            for worker in WORKERS:
                view = view_of(self.index, worker)
                assert (worker in overlap.tokens) == (blocks.closed > 0 and blocks.hashes[0] in view)

    @precondition(lambda self: hasattr(self, "index"))
    @invariant()
    def the_books_add_up(self):
        check_tree(self.index)
        for shelf in self.index._shelves.values():
            check_shelf(self.index, shelf)
            assert shelf.held_tokens <= shelf.bound

    def teardown(self):
        if hasattr(self, "index"):
            self.patch.undo()
            for worker in WORKERS:
                self.index.forget(worker)
            assert all(not run.holders for run in runs_of(self.index))
            self.index._bound = 0
            assert self.index.prune()
            assert len(self.index) == 0


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
