"""A run as it stands in the store."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.index.records import HEAD, KEY, Record, pack_key, unpack

u64 = st.integers(1, 2**64 - 1)
u32 = st.integers(0, 2**32 - 1)


@settings(max_examples=50, deadline=None)
@given(
    st.builds(
        Record,
        st.none() | u64,
        u32.map(float),
        u32,
        u32,
        st.integers(0, 2**16 - 1),
        st.lists(u64, min_size=1, max_size=20).map(tuple),
    )
)
def test_a_record_comes_back_as_it_was(record):
    assert unpack(pack_key(record.key), record.pack()) == record


def test_what_does_not_fit_is_capped():
    record = Record(None, -5.0, 1 << 40, 1 << 40, 70_000, (7,))
    assert unpack(pack_key(7), record.pack()) == Record(None, 0.0, 2**32 - 1, 2**32 - 1, 2**16 - 1, (7,))


def test_the_layout_is_the_one_that_is_documented():
    assert HEAD.size == 22
    record = Record(1, 2.9, 3, 4, 5, (6, 7))
    assert record.pack().hex() == "0100000000000000020000000300000004000000050006000000000000000700000000000000"
    assert pack_key(7).hex() == "0700000000000000"


good = Record(None, 1.0, 2, 3, 4, (5, 6))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (b"", good.pack()),
        (b"x", good.pack()),
        (pack_key(5), good.pack()),  # not the name of its last block
        (pack_key(6), b""),
        (pack_key(6), b"\0" * HEAD.size),
        (pack_key(6), good.pack()[:-1]),
        (pack_key(6), good.pack() + b"\0"),
        (pack_key(6), good.pack()[: HEAD.size]),
        (pack_key(6), b"\0" * KEY.size),
    ],
)
def test_what_no_proxy_wrote_is_left_alone(name, value):
    assert unpack(name, value) is None
