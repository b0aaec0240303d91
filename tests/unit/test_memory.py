"""Who is believed to hold what: assumed, withdrawn, corrected, given up."""

import pytest

from proxy.core.blocks import chain
from proxy.core.types import Room
from proxy.index.memory import EVIDENT_TOKENS, UNREPORTED_CAPACITY_TOKENS, MemoryIndex


class Desk:
    """An index with a clock, where one call serves a prompt. Four bytes are a token."""

    def __init__(self, *workers, capacity=None):
        self.index = MemoryIndex()
        self.now = 0.0
        for worker in workers:
            self.index.begin(worker, "1", capacity)

    def find(self, *segments):
        return self.index.find(chain(segments, 1), "m")

    def assume(self, worker, *segments):
        self.now += 1
        trail = self.find(*segments)
        return self.index.assume(worker, trail, self.now), trail

    def serve(self, worker, *segments, delivered=None):
        assumption, trail = self.assume(worker, *segments)
        return self.index.confirm(assumption, trail.blocks.size // 4, delivered, trail.turn)

    def overlap(self, *segments, workers="ab"):
        return dict(self.index.overlap(self.find(*segments), workers, self.now).tokens)


def text(letter, tokens):
    return letter.encode() * tokens * 4


S, U, V, W = text("s", 3000), text("u", 500), text("v", 500), text("w", 500)


def test_who_is_about_to_hold_a_prompt_is_believed_at_once():
    desk = Desk("a", "b")
    desk.assume("a", S, U)
    assert desk.overlap(S, U) == {"a": 3500}
    assert desk.overlap(S, V) == {"a": 3000}
    assert desk.overlap(V, S) == {}


def test_every_worker_counts_up_to_where_it_parts():
    desk = Desk("a", "b", "c")
    desk.serve("a", S, U, V)
    desk.serve("b", S, U)
    desk.serve("c", S, W)
    assert desk.overlap(S, U, V, workers="abc") == {"a": 4000, "b": 3500, "c": 3000}
    assert desk.overlap(S, U, V, workers="b") == {"b": 3500}
    assert desk.overlap(S, U, V, workers="xyz") == {}


def test_a_worker_without_a_shelf_is_not_assumed():
    desk = Desk()
    assumption, _ = desk.assume("a", S)
    assert assumption is None
    assert desk.overlap(S) == {}


def test_a_withdrawn_attempt_leaves_what_was_before():
    desk = Desk("a", "b", capacity=4000)
    desk.serve("a", S, U)
    desk.serve("a", W)
    sizes = desk.index.shelf_sizes()
    assumption, _ = desk.assume("a", S, V, V)  # too much for what is there
    assert desk.overlap(S, U) == {"a": 3000}
    desk.index.withdraw(assumption)
    assert desk.index.shelf_sizes() == sizes
    assert desk.overlap(S, U) == {"a": 3500}
    assert desk.overlap(W) == {"a": 500}
    assert desk.overlap(S, V, V) == {"a": 3000}


def test_a_withdrawn_attempt_does_not_make_anything_newer():
    desk = Desk("a", capacity=1000)
    desk.serve("a", U)
    desk.serve("a", V)
    assumption, _ = desk.assume("a", U, W[:40])
    desk.index.withdraw(assumption)
    desk.serve("a", W)
    assert desk.overlap(U) == {}
    assert desk.overlap(V) == {"a": 500}


def test_a_withdrawn_attempt_takes_nothing_from_a_sibling():
    desk = Desk("a")
    first, _ = desk.assume("a", S, U)
    desk.serve("a", S, V)
    desk.index.withdraw(first)
    assert desk.overlap(S, V) == {"a": 3500}
    assert desk.overlap(S, U) == {"a": 3000}


def test_a_withdrawn_attempt_takes_nothing_from_a_sibling_of_the_same_moment():
    desk = Desk("a")
    first, _ = desk.assume("a", S)
    desk.now -= 1
    desk.assume("a", S, V)
    desk.index.withdraw(first)
    assert desk.overlap(S, V) == {"a": 3500}
    assert desk.index.shelf_sizes()["a"][1] == 3500


def test_a_withdrawn_attempt_leaves_nothing_where_another_worker_cut_its_run():
    desk = Desk("a", "b")
    first, _ = desk.assume("a", S, U)
    desk.assume("b", S, V)
    desk.index.withdraw(first)
    assert desk.overlap(S, U) == {"b": 3000}
    assert desk.index.shelf_sizes()["a"] == (0, 0)


def test_a_shelf_keeps_its_capacity_least_recently_used_first():
    desk = Desk("a", capacity=1600)
    for part in (U, V, W):
        desk.serve("a", part)
    desk.serve("a", U)
    desk.serve("a", text("x", 500))
    assert desk.index.shelf_sizes()["a"][1] <= 1600
    assert desk.overlap(U) == {"a": 500}
    assert desk.overlap(W) == {"a": 500}
    assert desk.overlap(V).get("a", 0) < 150


def test_the_tail_of_a_prompt_goes_before_its_head():
    desk = Desk("a", capacity=4000)
    desk.serve("a", S, U)
    desk.serve("a", V, W)
    assert desk.index.shelf_sizes()["a"][1] <= 4000
    assert 2500 <= desk.overlap(S, U)["a"] <= 3000
    assert desk.overlap(V, W) == {"a": 1000}


def test_a_head_goes_by_when_it_was_used_itself():
    desk = Desk("a", capacity=2500)
    x, z = text("x", 500), text("z", 500)
    desk.serve("a", U, V)
    desk.serve("a", x)
    desk.serve("a", U)  # the head alone, again
    desk.serve("a", z)
    for letter, gone in (("1", ()), ("2", ()), ("3", (x,)), ("4", (x, U)), ("5", (x, U, z))):
        desk.serve("a", text(letter, 500))
        left = {name for name, part in (("U", U), ("x", x), ("z", z)) if desk.overlap(part)}
        assert left == {name for name, part in (("U", U), ("x", x), ("z", z)) if part not in gone}


def test_a_prompt_longer_than_the_cache_keeps_its_head():
    desk = Desk("a", capacity=1000)
    desk.serve("a", S)
    assert 900 <= desk.overlap(S)["a"] <= 1000


def test_a_worker_that_reports_no_capacity_is_bounded_too():
    desk = Desk("a")
    for number in range(12):
        desk.serve("a", text("abcdefghijkl"[number], 100_000))
    assert UNREPORTED_CAPACITY_TOKENS * 0.9 < desk.index.shelf_sizes()["a"][1] <= UNREPORTED_CAPACITY_TOKENS
    assert desk.overlap(text("l", 100_000)) == {"a": 100_000}
    assert desk.index.evicted_blocks > 0


def test_less_capacity_takes_effect_at_once():
    desk = Desk("a")
    desk.serve("a", S)
    assert desk.index.begin("a", "1", 500) is False
    assert desk.index.shelf_sizes()["a"][1] <= 500


def test_room_tells_what_a_prompt_would_push_out():
    desk = Desk("a", "b")
    desk.index.begin("a", "1", 4000)
    desk.serve("a", S)
    desk.serve("a", U)
    desk.now += 10
    rooms = desk.index.overlap(desk.find(V), "ab", desk.now).room
    assert rooms == {"a": Room(500, 11.0), "b": Room(None, None)}


def test_a_new_incarnation_is_empty_at_once():
    desk = Desk("a", "b")
    desk.serve("a", S, U)
    assert desk.index.begin("a", "1", None) is False
    assert desk.overlap(S, U) == {"a": 3500}
    assert desk.index.begin("a", "2", None) is True
    assert desk.overlap(S, U) == {}
    assert desk.find(S, U).turn == 2  # lengths and turns are the fleet's, not the worker's


@pytest.mark.parametrize("way", ["forget", "suspend"])
def test_a_worker_that_left_holds_nothing_and_others_keep_theirs(way):
    desk = Desk("a", "b")
    desk.serve("a", S, U)
    desk.serve("b", S, V)
    getattr(desk.index, way)("a")
    getattr(desk.index, way)("a")
    assert desk.overlap(S, U) == {"b": 3000}
    assert set(desk.index.shelf_sizes()) == {"b"}
    assert not any(run.holders & 1 for run in desk.index._where.values())
    desk.index.begin("c", "1", None)  # gets the place that has become free
    assert desk.overlap(S, U, workers="bc") == {"b": 3000}


def test_an_attempt_outlives_its_worker_without_harm():
    desk = Desk("a", "b")
    withdrawn, _ = desk.assume("a", S, U)
    confirmed, trail = desk.assume("a", S, V)
    desk.index.begin("a", "2", None)
    desk.index.withdraw(withdrawn)
    assert desk.index.confirm(confirmed, 3500, 0, trail.turn) == 0
    assert desk.overlap(S, U) == {}
    assert desk.find(S, V).tokens == 3500


def conversation(desk, letter):
    """A prompt long enough to tell something when it is missing, served on `a`."""
    parts = (text(letter, EVIDENT_TOKENS),)
    desk.serve("a", *parts)
    return parts


def test_a_whole_miss_of_a_served_prompt_drops_what_was_used_no_later():
    desk = Desk("a", "b")
    old, mine, new = (conversation(desk, letter) for letter in "omn")
    desk.serve("b", *old)
    assert desk.serve("a", *mine, U, delivered=0) == 1
    assert desk.overlap(*old) == {"b": EVIDENT_TOKENS}
    assert desk.overlap(*new) == {"a": EVIDENT_TOKENS}
    assert desk.overlap(*mine, U) == {"a": EVIDENT_TOKENS + 500}


def test_with_a_missing_head_go_the_branches_of_the_same_prompt():
    desk = Desk("a", "b")
    mine = conversation(desk, "m")
    desk.serve("a", *mine, V)
    assert desk.serve("a", *mine, U, delivered=0) == 1
    assert desk.overlap(*mine, V) == {"a": EVIDENT_TOKENS}


@pytest.mark.parametrize("delivered", [None, 1, 16, 2000])
def test_unknown_and_partial_hits_drop_nothing(delivered):
    desk = Desk("a", "b")
    old, mine = (conversation(desk, letter) for letter in "om")
    assert desk.serve("a", *mine, U, delivered=delivered) == 0
    assert desk.overlap(*old) == {"a": EVIDENT_TOKENS}


def test_a_miss_is_no_news_where_only_a_part_was_shared():
    # A hybrid engine keeps the last boundary of a prompt alone: who shares only the system prompt hits nothing.
    desk = Desk("a", "b")
    old = conversation(desk, "o")
    desk.serve("a", S, U)
    assert desk.serve("a", S, V, delivered=0) == 0
    assert desk.overlap(*old) == {"a": EVIDENT_TOKENS}


def test_a_miss_is_no_news_where_the_prompt_is_shorter_than_a_block():
    desk = Desk("a", "b")
    old = conversation(desk, "o")
    desk.serve("a", U)
    assert desk.serve("a", U, V, delivered=0) == 0
    assert desk.overlap(*old) == {"a": EVIDENT_TOKENS}


def test_a_miss_is_no_news_where_a_sibling_is_not_computed_yet():
    desk = Desk("a", "b")
    old = conversation(desk, "o")
    desk.assume("a", S, U)
    assert desk.serve("a", S, U, delivered=0) == 0
    assert desk.overlap(*old) == {"a": EVIDENT_TOKENS}


def test_a_repeated_attempt_judges_by_when_the_prompt_was_last_computed():
    desk = Desk("a", "b")
    mine = conversation(desk, "m")
    later = conversation(desk, "l")
    failed, _ = desk.assume("a", *mine, U)
    desk.index.withdraw(failed)
    assert desk.serve("a", *mine, U, delivered=0) == 0
    assert desk.overlap(*later) == {"a": EVIDENT_TOKENS}


def test_a_length_that_the_engine_corrects_corrects_the_shelf():
    desk = Desk("a", "b")
    one, trail = desk.assume("a", U)
    two, _ = desk.assume("b", U)
    desk.index.confirm(one, 700, None, trail.turn)
    assert {name: tokens for name, (_, tokens) in desk.index.shelf_sizes().items()} == {"a": 700, "b": 700}
    desk.index.confirm(two, 700, None, trail.turn)
    assert desk.overlap(U) == {"a": 700, "b": 700}


def test_a_shelf_weighs_what_its_parts_weigh_though_estimates_were_wrong():
    desk = Desk("a")
    first, trail = desk.assume("a", U)
    desk.assume("a", U, V)
    desk.index.confirm(first, 50, None, trail.turn)  # a tenth of the estimate that V was put after
    desk.assume("a", U, V[:1900], b"another end")
    weights = [run.weight for run, _ in desk.index.held("a")]
    assert desk.index.shelf_sizes()["a"][1] == sum(weights)
    assert min(weights) >= 0


def test_the_index_tells_what_it_holds():
    desk = Desk("a", "b")
    desk.serve("a", b"x" * 128)
    assert repr(desk.index) == "<MemoryIndex 2 blocks (a: 2, b: 0)>"
