"""Laws of the merge: later lists win flag by flag, order is kept, nothing is lost, and each flag knows its list."""

import json

from hypothesis import given
from hypothesis import strategies as st

from workers.agent.recipe.catalogue import Kind
from workers.agent.recipe.flags import merge, parse

# A few flags of every kind, each with a spelling of any value.
ONE = ["--dtype", "--port", "--kv-cache-dtype", "--max-model-len"]
TOGGLES = ["--enable-prefix-caching", "--enforce-eager", "--async-scheduling"]
words = st.text("abcxyz0123456789./:", min_size=1, max_size=8)
single = st.tuples(st.sampled_from(ONE), words).map(list)
several = st.tuples(st.sampled_from(["--served-model-name", "--api-key"]), st.lists(words, min_size=1, max_size=3)).map(
    lambda pair: [pair[0], *pair[1]]
)
collected = st.tuples(st.just("--middleware"), words).map(list)
boolean = st.tuples(st.sampled_from(TOGGLES), st.booleans()).map(
    lambda pair: [pair[0] if pair[1] else pair[0].replace("--", "--no-", 1)]
)
dotted = st.tuples(st.sampled_from(["mode", "level", "pass_config.fuse"]), st.integers(0, 9)).map(
    lambda pair: [f"--compilation-config.{pair[0]}", str(pair[1])]
)
objects = st.dictionaries(st.sampled_from(["mode", "level", "other"]), st.integers(0, 9), max_size=3).map(
    lambda table: ["--compilation-config", json.dumps(table)]
)
replacing = st.one_of(single, several, boolean)
anything = st.one_of(replacing, collected, dotted, objects)


def lists_of(groups):
    """Up to five lists of arguments, each a few flags long."""
    return st.lists(
        st.lists(groups, max_size=6).map(lambda parts: [token for part in parts for token in part]), max_size=5
    )


def parsed(lists):
    return [parse(tokens, f"list {number}") for number, tokens in enumerate(lists)]


@given(lists_of(replacing))
def test_the_last_list_that_names_a_flag_has_its_value_and_its_name(lists):
    given_lists = parsed(lists)
    for flag in merge(given_lists):
        last = [one for flags in given_lists for one in flags if one.name == flag.name][-1]
        assert flag == last


@given(lists_of(anything))
def test_every_name_is_kept_once_in_the_order_of_its_first_place(lists):
    given_lists = parsed(lists)
    names = list(dict.fromkeys(flag.name for flags in given_lists for flag in flags))
    assert [flag.name for flag in merge(given_lists)] == names


@given(lists_of(anything))
def test_merging_what_is_merged_changes_nothing(lists):
    merged = merge(parsed(lists))
    assert merge([merged]) == merged
    assert merge([merged, merged]) == merged


@given(lists_of(anything), lists_of(anything))
def test_merging_in_two_steps_is_merging_at_once(first, second):
    lists = parsed(first + second)
    cut = len(first)
    assert merge([merge(lists[:cut]), *lists[cut:]]) == merge(lists)


@given(lists_of(anything))
def test_what_is_rendered_reads_back_as_the_same_flags(lists):
    merged = merge(parsed(lists))
    again = parse([token for flag in merged for token in flag.tokens], "again")
    assert [(flag.name, flag.values, flag.on) for flag in again] == [
        (flag.name, flag.values, flag.on) for flag in merged
    ]


@given(lists_of(anything))
def test_a_flag_names_only_lists_that_hold_it(lists):
    given_lists = parsed(lists)
    for flag in merge(given_lists):
        holders = {
            f"list {number}" for number, flags in enumerate(given_lists) if flag.name in {one.name for one in flags}
        }
        assert set(flag.source.split(" + ")) <= holders


@given(lists_of(collected))
def test_a_collected_flag_keeps_every_value_of_every_list(lists):
    values = list(dict.fromkeys(token for tokens in lists for token in tokens if token != "--middleware"))
    merged = merge(parsed(lists))
    assert [flag.values for flag in merged] == ([tuple(values)] if values else [])
    assert all(flag.kind is Kind.APPEND for flag in merged)


@given(st.dictionaries(st.sampled_from("abcd"), st.integers()), st.sampled_from("abcd"), st.integers())
def test_a_dotted_key_changes_that_key_alone(table, key, value):
    below = parse(["--compilation-config", json.dumps(table)], "base")
    above = parse([f"--compilation-config.{key}", str(value)], "yours")
    (flag,) = merge([below, above])
    assert json.loads(flag.values[0]) == {**table, key: value}
    assert flag.source == "base + yours"
