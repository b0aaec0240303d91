"""However the network cuts a stream, it says the same."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.stream import StreamScanner

FEW = settings(max_examples=120, deadline=None)


def data(frame):
    return b"data: " + json.dumps(frame).encode()


def choice(**fields):
    return data({"choices": [{"index": 0} | fields]})


usage = st.fixed_dictionaries(
    {"prompt_tokens": st.integers(0, 999)},
    optional={"prompt_tokens_details": st.fixed_dictionaries({"cached_tokens": st.none() | st.integers(0, 999)})},
)
QUIET = st.sampled_from(
    [
        b": keep-alive",
        choice(delta={"role": "assistant", "content": ""}),
        choice(delta={}),
        b"event: x",
        b"data: {",
        b"",
    ]
)
LOUD = st.sampled_from(
    [
        choice(delta={"content": "hällo\r\n\r\n"}),
        choice(delta={"content": "data: [DONE]"}),
        choice(delta={"reasoning": "hm"}),
        choice(delta={"reasoning_content": "hm"}),
        choice(delta={"tool_calls": [{"index": 0}]}),
        choice(text="a"),
        choice(delta={"content": "x" * 9000}),
    ]
)
LAST = st.sampled_from(
    [
        data({"error": {"message": "the engine broke"}}),
        choice(delta={}, finish_reason="abort"),
        choice(delta={}, finish_reason="stop"),
        b"data: [DONE]",
    ]
) | usage.map(lambda said: data({"choices": [], "usage": said}))


@st.composite
def streams(draw):
    events = draw(st.lists(QUIET, max_size=4)) + draw(st.lists(LOUD, max_size=4)) + draw(st.lists(LAST, max_size=4))
    end = draw(st.sampled_from([b"\n\n", b"\r\n\r\n"]))
    whole = b"".join(event + end for event in events)
    return whole[: draw(st.sampled_from([len(whole), len(whole), max(len(whole) - 3, 0)]))]


def findings(pieces):
    scanner = StreamScanner()
    for piece in pieces:
        scanner.feed(piece)
    between, content = scanner.is_between_events, scanner.has_content
    scanner.finish()
    return between, content, scanner.done, scanner.aborted, scanner.error, scanner.usage


@FEW
@given(streams(), st.data())
def test_any_cut_gives_the_same_findings(stream, cuts):
    places = sorted(cuts.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    pieces = [stream[begin:end] for begin, end in zip([0, *places], [*places, len(stream)], strict=True)]
    assert findings(pieces) == findings([stream])


@settings(max_examples=25, deadline=None)
@given(streams())
def test_byte_by_byte_gives_the_same_findings(stream):
    assert findings([stream[at : at + 1] for at in range(len(stream))]) == findings([stream])


@FEW
@given(st.lists(QUIET, max_size=6), st.lists(LAST, max_size=3))
def test_no_content_is_seen_where_there_is_none(quiet, last):
    assert not findings([b"".join(event + b"\n\n" for event in [*quiet, *last])])[1]


@FEW
@given(st.binary(max_size=400), st.binary(max_size=400))
def test_bytes_of_any_kind_are_survived(one, other):
    findings([one, other])
