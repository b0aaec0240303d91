"""The prefix law: equal leading hashes mean equal leading bytes, cut alike."""

from itertools import takewhile

from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.blocks import chain, root, span_at

FEW = settings(max_examples=80, deadline=None)

# Long and short pieces of few letters, so that prompts share and part in all ways.
piece = st.builds(lambda letter, size: letter * size, st.sampled_from([b"a", b"b"]), st.integers(0, 400))
segment = st.lists(piece, max_size=3).map(b"".join)
prompt = st.lists(segment, max_size=5)
start = st.integers(0, 2**64 - 1)


def shared(one, other):
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def pieces(segments, blocks):
    """The bytes of every block, cut out of the whole prompt by its ends."""
    whole, begin = b"".join(segments), 0
    out = []
    for end in blocks.ends:
        out.append(whole[begin:end])
        begin = end
    return out


@FEW
@given(prompt, prompt, start)
def test_leading_hashes_are_equal_exactly_where_leading_blocks_are(one, other, seed):
    first, second = chain(one, seed), chain(other, seed)
    depth = shared(pieces(one, first), pieces(other, second))
    assert shared(first.hashes, second.hashes) == depth
    assert not set(first.hashes[depth:]) & set(second.hashes[depth:])


@FEW
@given(prompt, prompt, start)
def test_a_longer_prompt_keeps_every_hash_of_the_shorter(head, tail, seed):
    short, long = chain(head, seed), chain(head + tail, seed)
    assert long.hashes[: len(short)] == short.hashes
    assert long.ends[: len(short)] == short.ends


@FEW
@given(prompt, start)
def test_ends_increase_and_reach_the_size(segments, seed):
    blocks = chain(segments, seed)
    assert blocks.size == sum(map(len, segments))
    begins = (0, *blocks.ends[:-1])
    assert all(0 < end - begin <= span_at(begin) for begin, end in zip(begins, blocks.ends, strict=False))
    boundaries, total = set(), 0
    for part in segments:
        total += len(part)
        boundaries.add(total)
    assert boundaries - {0} <= set(blocks.ends)


@FEW
@given(segment, segment, start)
def test_open_text_keeps_its_closed_blocks_when_it_goes_on(text, more, seed):
    short, long = chain([text], seed, open_ended=True), chain([text + more], seed, open_ended=True)
    assert long.hashes[: short.closed] == short.hashes[: short.closed]
    assert len(short) - short.closed <= 1


@FEW
@given(st.binary(min_size=1, max_size=300), start, start)
def test_different_seeds_share_nothing(text, one, other):
    first, second = chain([text], root(one, "m")), chain([text], root(other, "m"))
    assert (not set(first.hashes) & set(second.hashes)) or one == other


@FEW
@given(prompt, start)
def test_empty_segments_change_nothing(segments, seed):
    padded = [part for segment in segments for part in (b"", segment, b"")]
    assert chain(padded, seed) == chain(segments, seed)
