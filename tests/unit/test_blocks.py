"""How a canonical prompt is cut and hashed."""

import pytest

from proxy.core.blocks import chain, is_whole, root, span_at


@pytest.mark.parametrize(
    ("offset", "span"),
    [(0, 64), (4095, 64), (4096, 256), (65535, 256), (65536, 1024), (10_000_000, 1024)],
)
def test_spans_grow_with_depth(offset, span):
    assert span_at(offset) == span


@pytest.mark.parametrize(
    ("offset", "length", "ends"),
    [
        (0, 0, []),
        (0, 1, [1]),
        (0, 64, [64]),
        (0, 65, [64, 65]),
        (10, 100, [64, 100]),
        (4090, 300, [64, 300]),  # the first block begins before 4096 and keeps its span, the second is long
        (65536, 2000, [1024, 2000]),
    ],
)
def test_a_segment_is_cut_by_span_and_at_its_end(offset, length, ends):
    blocks = chain([b"b" * offset, b"a" * length], 1)
    assert [end - offset for end in blocks.ends if end > offset] == ends


def test_ends_are_those_of_the_whole_prompt():
    blocks = chain([b"a" * 100, b"b" * 10], 1)
    assert blocks.ends == (64, 100, 110)
    assert len(blocks) == len(blocks.hashes) == 3
    assert (blocks.size, blocks.closed) == (110, 3)


@pytest.mark.parametrize("segments", [[], [b""], [b"", b""]])
def test_a_prompt_without_bytes_has_no_blocks(segments):
    for open_ended in (False, True):
        blocks = chain(segments, 1, open_ended=open_ended)
        assert (len(blocks), blocks.size, blocks.closed) == (0, 0, 0)


@pytest.mark.parametrize(
    ("length", "closed"),
    [(1, 0), (63, 0), (64, 1), (65, 1), (128, 2), (4096, 64), (4097, 64), (4096 + 256, 65)],
)
def test_raw_text_may_go_on_in_its_last_partial_block(length, closed):
    assert chain([b"x" * length], 1, open_ended=True).closed == closed
    assert chain([b"x" * length], 1).closed == len(chain([b"x" * length], 1))


def test_is_whole_looks_at_the_last_block_alone():
    assert is_whole([64])
    assert not is_whole([63])
    assert not is_whole([63, 64])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((1, "chat", "m", ""), (2, "chat", "m", "")),
        ((1, "chat", "m", ""), (1, "text", "m", "")),
        ((1, "chat", "m", ""), (1, "chat", "n", "")),
        ((1, "chat", "m", ""), (1, "chat", "m", "salt")),
        ((1, "chat", "ab", "c"), (1, "chat", "a", "bc")),
        ((1, "chat", "", "m"), (1, "chat", "m", "")),
    ],
)
def test_what_separates_caches_shares_no_hash(one, other):
    segments = [b"the same prompt " * 100]
    first, second = chain(segments, root(*one)), chain(segments, root(*other))
    assert not set(first.hashes) & set(second.hashes)


def test_the_root_is_the_same_in_every_process():
    # Replicas and restarts share what they stored under these numbers.
    assert root(7, "chat", "m", "") == 6457457454986740877
    assert chain([b"a" * 65], root(7, "chat", "m", "")).hashes == (7051037015949123783, 6758383328496011815)
