"""What served prompts teach: their lengths to the token, which turn they were, bytes per token."""

import pytest

from proxy.core.blocks import chain
from proxy.index.tree import FIRST_RATIO, PromptTree

SYSTEM, FIRST, ANSWER, SECOND = (
    letter * size for letter, size in zip((b"s", b"u", b"a", b"v"), (700, 90, 210, 45), strict=True)
)


def serve(tree, segments, tokens, *, raw=False, model="m"):
    trail = tree.find(chain(segments, 1, open_ended=raw), model)
    tip = tree.grow(trail)
    if tip is not None:
        tree.learn(trail, tip, tokens, trail.turn)
    return trail


def look(tree, segments, *, raw=False, model="m"):
    return tree.find(chain(segments, 1, open_ended=raw), model)


def test_an_unseen_prompt_is_estimated_by_bytes():
    trail = look(PromptTree(), [b"x" * 400])
    assert (trail.run, trail.depth, trail.known_tokens, trail.tokens, trail.turn) == (None, 0, 0, 100, 1)


def test_the_length_of_a_served_prompt_is_known_to_the_token():
    tree = PromptTree()
    serve(tree, [SYSTEM, FIRST], 317)
    again = look(tree, [SYSTEM, FIRST])
    assert (again.known_tokens, again.tokens, again.depth) == (317, 317, len(again.blocks))
    longer = look(tree, [SYSTEM, FIRST, ANSWER, SECOND])
    assert longer.known_tokens == 317
    assert longer.tokens == 317 + round(255 / tree.bytes_per_token("m"))


def test_it_stays_known_when_others_branch_off():
    tree = PromptTree()
    serve(tree, [SYSTEM, FIRST], 317)
    for other in (b"w" * 90, b"x" * 5000):
        serve(tree, [SYSTEM, other], 900)
        serve(tree, [SYSTEM[:100], other], 77)
    assert look(tree, [SYSTEM, FIRST]).tokens == 317
    assert look(tree, [SYSTEM, FIRST, ANSWER]).known_tokens == 317


def test_inside_a_served_prompt_lengths_are_interpolated_by_bytes():
    tree = PromptTree()
    serve(tree, [SYSTEM, FIRST], 395)  # two bytes a token
    parted = look(tree, [SYSTEM, b"w" * 90])
    assert parted.known_tokens == 350
    serve(tree, [SYSTEM, b"w" * 90], 395)
    assert look(tree, [SYSTEM, FIRST]).tokens == 395


def test_a_served_prompt_inside_a_longer_one_fixes_a_point():
    tree = PromptTree()
    serve(tree, [SYSTEM], 100)
    serve(tree, [SYSTEM, FIRST], 200)
    assert look(tree, [SYSTEM]).tokens == 100
    assert look(tree, [SYSTEM, b"w" * 10]).known_tokens == 100


def test_a_prompt_served_without_usage_keeps_an_estimate_and_its_turn():
    tree = PromptTree()
    serve(tree, [SYSTEM, FIRST], None)
    trail = look(tree, [SYSTEM, FIRST])
    assert (trail.tokens, trail.turn) == (round(790 / FIRST_RATIO), 2)
    assert tree.ratios() == {}


def test_turns_count_what_extends_or_repeats_a_served_prompt():
    tree = PromptTree()
    assert serve(tree, [SYSTEM, FIRST], 10).turn == 1
    assert serve(tree, [SYSTEM, FIRST, ANSWER, SECOND], 20).turn == 2
    assert serve(tree, [SYSTEM, FIRST, ANSWER, SECOND, ANSWER], 30).turn == 3
    assert look(tree, [SYSTEM, FIRST]).turn == 2
    assert look(tree, [SYSTEM, FIRST, ANSWER]).turn == 2


def test_a_shared_system_prompt_makes_no_second_turn():
    tree = PromptTree()
    serve(tree, [SYSTEM, FIRST], 10)
    assert look(tree, [SYSTEM, b"w" * 90]).turn == 1
    assert look(tree, [SYSTEM]).turn == 1
    serve(tree, [SYSTEM, b"w" * 90], 10)
    assert look(tree, [SYSTEM, FIRST]).turn == 2


def test_what_was_only_dispatched_is_no_turn():
    tree = PromptTree()
    tree.grow(look(tree, [SYSTEM, FIRST]))
    assert look(tree, [SYSTEM, FIRST, ANSWER]).turn == 1


def test_models_under_one_root_would_share_and_under_their_own_do_not():
    tree = PromptTree()
    serve(tree, [SYSTEM], 100)
    other = tree.find(chain([SYSTEM], 2), "n")
    assert (other.depth, other.tokens) == (0, round(700 / FIRST_RATIO))


def test_raw_text_that_goes_on_shares_its_whole_blocks():
    tree = PromptTree()
    serve(tree, [b"t" * 100], 50, raw=True)
    longer = look(tree, [b"t" * 200], raw=True)
    assert (longer.depth, longer.known_tokens) == (1, 32)
    assert longer.tokens == 32 + round(136 / tree.bytes_per_token("m"))


@pytest.mark.parametrize("segments", [[], [b""], [b"short"]])
def test_a_prompt_without_a_closed_block_leaves_nothing(segments):
    tree = PromptTree()
    serve(tree, segments, 3, raw=True)
    assert len(tree) == 0
    assert look(tree, segments, raw=True).turn == 1


def test_the_ratio_follows_long_prompts_and_hardly_short_ones():
    tree = PromptTree()
    serve(tree, [b"a" * 9000], 3000)
    assert tree.bytes_per_token("m") == pytest.approx(3.0)
    for number in range(50):
        serve(tree, [b"hello %d" % number], 6)
    assert tree.bytes_per_token("m") == pytest.approx(3.0, rel=0.05)
    serve(tree, [b"b" * 10_000], 2000)
    assert 3.2 < tree.bytes_per_token("m") < 3.5
    assert tree.bytes_per_token("n") == FIRST_RATIO


def test_a_picture_teaches_no_ratio():
    tree = PromptTree()
    serve(tree, [b"user\x1fpart:" + b"0" * 32 + b"\n"], 1500)
    assert tree.ratios() == {}


@pytest.mark.parametrize("stored", [0.0, -1.0, 0.5, float("nan"), float("inf")])
def test_a_stored_ratio_that_cannot_be_one_is_not_taken(stored):
    tree = PromptTree()
    tree.set_ratio("m", stored)
    assert tree.bytes_per_token("m") == FIRST_RATIO


def test_a_stored_ratio_gives_way_to_a_learned_one():
    tree = PromptTree()
    tree.set_ratio("m", 3.5)
    assert tree.ratios() == {"m": 3.5}
    tree.set_ratio("m", 9.0)
    assert tree.ratios() == {"m": 3.5}


def test_the_tree_is_bounded_and_forgets_the_oldest():
    tree = PromptTree(bound=100)
    for number in range(500):
        serve(tree, [SYSTEM, b"%d" % number * 100], 300)
        assert tree.prune()
        assert len(tree) <= 100
    assert look(tree, [SYSTEM, b"499" * 100]).tokens == 300
    assert look(tree, [SYSTEM, b"0" * 100]).turn == 1


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_an_engine_that_counts_strangely_does_no_harm(tokens):
    tree = PromptTree()
    serve(tree, [SYSTEM], 200)
    serve(tree, [SYSTEM, FIRST], tokens)
    trail = look(tree, [SYSTEM, FIRST, ANSWER])
    assert trail.tokens >= trail.known_tokens >= 200


def test_a_run_tells_what_it_is():
    tree = PromptTree()
    serve(tree, [b"x" * 64, b"y" * 64], 40)
    assert repr(look(tree, [b"x" * 64, b"y" * 64]).run) == "<Run blocks 0-2, 0-40 tokens, turn 1>"
