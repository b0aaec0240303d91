"""What streams say: first content, usage, errors, the end."""

import json

import pytest

from proxy.core.stream import TAIL_BYTES, StreamScanner, has_content, read_answer, read_error_type, read_usage
from proxy.core.types import Usage

ROLE = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
DONE = b"data: [DONE]\n\n"


def event(frame):
    return b"data: " + json.dumps(frame).encode() + b"\n\n"


def delta(**fields):
    return event({"choices": [{"index": 0, "delta": fields, "finish_reason": None}]})


def finish(reason):
    return event({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})


def scan(*pieces, end=True):
    scanner = StreamScanner()
    for piece in pieces:
        scanner.feed(piece)
    if end:
        scanner.finish()
    return scanner


@pytest.mark.parametrize(
    "fields",
    [
        {"content": "a"},
        {"content": " "},
        {"reasoning": "a"},
        {"reasoning_content": "a"},
        {"tool_calls": [{"index": 0, "function": {"name": "f"}}]},
        {"function_call": {"name": "f"}},
        {"refusal": "no"},
        {"role": "assistant", "content": "a"},
    ],
)
def test_content_is_seen_when_it_passes(fields):
    scanner = scan(event(ROLE), end=False)
    assert not scanner.has_content
    scanner.feed(delta(**fields))
    assert scanner.has_content


@pytest.mark.parametrize(
    "piece",
    [
        b": keep-alive\n\n",
        b": ping\r\n\r\n",
        event(ROLE),
        delta(role="assistant", content=None, tool_calls=[], reasoning=None),
        delta(),
        finish("stop"),
        event({"choices": []}),
        event({"choices": [], "usage": {"prompt_tokens": 3}}),
        event({"choices": [None, 5, {"delta": None}, {"delta": "x"}, {"text": ""}]}),
        event({"choices": None}),
        event([]),
        event("content"),
        b"data: {broken\n\n",
        b"data:\n\n",
        b"event: message\nid: 3\n\n",
        b"\n\n\n\n",
        b"data: " + b"[" * 100_000 + b"\n\n",
        DONE,
    ],
)
def test_what_is_no_content_is_not_taken_for_it(piece):
    assert not scan(piece, piece).has_content


def test_content_is_not_seen_before_its_event_is_whole():
    whole = delta(content="a")
    scanner = scan(event(ROLE), whole[:-1], end=False)
    assert not scanner.has_content
    scanner.feed(whole[-1:])
    assert scanner.has_content


def test_content_is_seen_under_both_line_ends():
    assert scan((event(ROLE) + delta(content="a")).replace(b"\n", b"\r\n"), end=False).has_content
    assert scan(event(ROLE)[:-1] + b"\r\n" + delta(content="a"), end=False).has_content


def test_completions_stream_text():
    assert has_content({"text": "a"})
    assert not has_content({"text": ""})
    assert scan(event({"choices": [{"index": 0, "text": "a"}]})).has_content


def test_a_data_line_needs_no_space():
    assert scan(b'data:{"choices":[{"text":"a"}]}\n\ndata:[DONE]\n\n').done


USAGE = {"prompt_tokens": 417, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 416}}


def test_a_whole_stream_is_read():
    last = event({"choices": [], "usage": USAGE})
    scanner = scan(b": keep-alive\n\n", event(ROLE), delta(content="a"), finish("length"), last, DONE)
    assert scanner.usage == Usage(417, 416, 4)
    assert (scanner.done, scanner.aborted, scanner.error) == (True, False, None)


def test_of_continuous_usage_the_last_counts():
    def running(tokens):
        choice = {"index": 0, "delta": {"content": "a"}}
        return event({"choices": [choice], "usage": {"prompt_tokens": 417, "completion_tokens": tokens}})

    assert scan(event(ROLE), running(1), running(2)).usage == Usage(417, None, 2)
    assert scan(running(1), running(2), event({"choices": [], "usage": USAGE}), DONE).usage == Usage(417, 416, 4)


def test_null_usage_does_not_wipe_what_was_said():
    assert scan(event({"choices": [], "usage": USAGE}), event({"choices": [], "usage": None})).usage == Usage(
        417, 416, 4
    )


def test_an_engines_error_inside_the_stream_is_seen_before_and_after_content():
    broken = event(
        {"error": {"message": "EngineCore encountered an issue.", "type": "InternalServerError", "code": 500}}
    )
    for start in ([], [event(ROLE)], [event(ROLE), delta(content="a")]):
        scanner = scan(*start, broken, DONE)
        assert scanner.error == "InternalServerError"  # the message may quote the prompt
        assert scanner.done


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("out of memory", "out of memory"),
        ({"code": 500}, "error"),
        ({"message": "x"}, "x"),
        ({"message": "x", "type": "T"}, "T"),
        (None, None),
    ],
)
def test_errors_come_in_many_forms(error, message):
    assert scan(event({"error": error})).error == message


def test_an_abort_is_no_clean_end():
    for start in ([], [event(ROLE), delta(content="a")]):
        scanner = scan(*start, finish("abort"), DONE)
        assert (scanner.aborted, scanner.done) == (True, True)


def test_a_stream_that_breaks_off_is_not_done():
    scanner = scan(event(ROLE), delta(content="a"), b'data: {"choices":[{"del')
    assert (scanner.done, scanner.error, scanner.aborted) == (False, None, False)


def test_an_end_mark_without_its_blank_line_is_one():
    assert scan(delta(content="a"), b"data: [DONE]").done


@pytest.mark.parametrize(
    "text", ["data: [DONE]", "\ndata: [DONE]\n", '{"error":{"message":"x"}}', '"finish_reason":"abort"']
)
def test_an_answer_that_quotes_the_protocol_is_no_protocol(text):
    scanner = scan(event(ROLE), *[delta(content=text) for _ in range(400)])
    assert (scanner.done, scanner.error, scanner.aborted) == (False, None, False)


def test_a_long_answer_keeps_only_its_tail():
    scanner = scan(event(ROLE), *[delta(content="x" * 1000) for _ in range(200)], end=False)
    assert len(scanner._buffer) <= TAIL_BYTES
    scanner.feed(event({"choices": [], "usage": USAGE}) + DONE)
    scanner.finish()
    assert (scanner.usage.cached_tokens, scanner.done) == (416, True)


def test_a_first_event_of_megabytes_in_small_pieces_is_read_once():
    # `return_token_ids` puts the whole prompt into the role-only first event.
    big = event(ROLE | {"prompt_token_ids": [123456] * 100_000})
    scanner = scan(*[big[start : start + 1000] for start in range(0, len(big), 1000)], end=False)
    assert not scanner.has_content
    scanner.feed(delta(content="a"))
    assert scanner.has_content


@pytest.mark.parametrize(
    ("pieces", "between"),
    [
        ([], True),
        ([event(ROLE)], True),
        ([event(ROLE)[:-1]], False),
        ([b": ping"], False),
        ([delta(content="a")], True),
        ([delta(content="a"), delta(content="b")[:-1]], False),
        ([delta(content="a"), delta(content="b")[:-1], b"\n"], True),
        ([b'data: {"choices":[{"text":"a"}]}\r\n\r\ndata: x\r\n\r', b"\n"], True),
        ([b'data: {"choices":[{"text":"a"}]}\r\n\r\ndata: x\r\n'], False),
    ],
)
def test_it_knows_whether_an_event_is_open(pieces, between):
    assert scan(*pieces, end=False).is_between_events == between


@pytest.mark.parametrize(
    ("usage", "read"),
    [
        (None, Usage()),
        ({}, Usage()),
        ([], Usage()),
        (USAGE, Usage(417, 416, 4)),
        ({"prompt_tokens": 3, "prompt_tokens_details": None}, Usage(3)),
        ({"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": None}}, Usage(3)),
        ({"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 0}}, Usage(3, 0)),
        ({"prompt_tokens": True, "completion_tokens": -1, "prompt_tokens_details": {"cached_tokens": 1.0}}, Usage()),
        ({"prompt_tokens": "3", "prompt_tokens_details": 5}, Usage()),
    ],
)
def test_absent_usage_is_unknown_and_not_zero(usage, read):
    assert read_usage(usage) == read


@pytest.mark.parametrize(
    ("body", "usage", "aborted"),
    [
        ({"choices": [{"finish_reason": "stop"}], "usage": USAGE}, Usage(417, 416, 4), False),
        ({"choices": [{"finish_reason": "abort"}], "usage": USAGE}, Usage(417, 416, 4), True),
        ({"choices": [None, 3]}, Usage(), False),
        ({"data": []}, Usage(), False),
        ([], Usage(), False),
    ],
)
def test_a_whole_answer_is_read(body, usage, aborted):
    assert read_answer(json.dumps(body).encode()) == (usage, aborted)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b'{"error":{"message":"m","type":"BadRequestError","code":400}}', "BadRequestError"),
        (b'{"error":{"message":"m"}}', None),
        (b'{"error":{"type":5}}', None),
        (b'{"error":"m"}', None),
        (b'{"detail":"Not Found"}', None),
        (b"[]", None),
        (b"", None),
        (b"\xff", None),
        (b"[" * 100_000, None),
    ],
)
def test_of_an_engines_error_only_its_kind_is_kept(body, kind):
    assert read_error_type(body) == kind


@pytest.mark.parametrize("body", [b"", b"not json", b"\xff", b"[" * 100_000])
def test_an_answer_that_is_no_json_says_nothing(body):
    assert read_answer(body) == (Usage(), False)
