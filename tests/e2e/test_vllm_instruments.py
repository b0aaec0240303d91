"""The instruments of the real-vLLM run, by themselves: how sessions grow, and what the checks catch."""

import gzip
import json
from pathlib import Path

import pytest

from tests.support.vllm import sessions
from tests.support.vllm.checks import judge
from tests.support.vllm.drive import Delivery
from tests.support.vllm.sessions import grow_chat, make_sessions, read_sessions, repeat_single

LONG = "x" * sessions.OPENING_CHARACTERS


def say(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def deliver(turn: int, *, worker: str = "a", expected: int = 0, cached: int | None = 0) -> Delivery:
    return Delivery("s", turn, worker, "load", expected, 100, cached, None)


def test_a_request_adds_the_last_answer_and_what_is_newly_said() -> None:
    assert list(grow_chat([(LONG, "one"), ("next", "two"), ("", "three"), ("last", "unsent")])) == [
        (say("user", LONG),),
        (say("assistant", "one"), say("user", "next")),
        (say("assistant", "two"), say("assistant", "three"), say("user", "last")),
    ]


def test_short_exchanges_are_gathered_into_the_opening() -> None:
    assert list(grow_chat([("hello", "hi"), (LONG, "")])) == [
        (say("user", "hello"), say("assistant", "hi"), say("user", LONG))
    ]
    assert list(grow_chat([("hello", "hi")])) == [(say("user", "hello"), say("assistant", "hi"))]


def test_a_chat_ends_at_the_longest_context() -> None:
    turns = list(grow_chat([("x" * (sessions.CONTEXT_CHARACTERS - 2), ""), ("abc", ""), ("more", "")]))
    assert turns[1:] == [(say("user", "ab"),)]


def test_a_single_request_is_sent_twice() -> None:
    assert repeat_single([(say("user", LONG),)]) == ((say("user", LONG),), ())


def test_each_request_repeats_and_extends_the_one_before() -> None:
    for session in make_sessions(5):
        chats = [session.messages(turn) for turn in range(len(session.turns))]
        assert len(chats) == sessions.TURNS
        assert all(later[: len(earlier)] == earlier for earlier, later in zip(chats, chats[1:], strict=False))


def test_recorded_lines_are_grouped_by_session(tmp_path: Path) -> None:
    lines = [
        {"agent": "a", "session_id": "1", "lcp": 0, "input_suffix": LONG, "output": "o1"},
        {"agent": "a", "session_id": "2", "lcp": 0, "input_suffix": LONG, "output": ""},
        {"agent": "a", "session_id": "1", "lcp": len(LONG), "input_suffix": "more", "output": ""},
    ]
    trace = tmp_path / "trace.jsonl.gz"
    with gzip.open(trace, "wt", encoding="utf-8") as out:
        out.writelines(json.dumps(line) + "\n" for line in lines)
    first, second = read_sessions(trace)
    assert first.messages(1) == [say("user", LONG), say("assistant", "o1"), say("user", "more")]
    assert second.messages(1) == second.messages(0) == [say("user", LONG)]


@pytest.mark.parametrize(
    ("second", "counted", "missed"),
    [
        (deliver(1, expected=96, cached=64), {"a": 64}, []),
        (deliver(1, worker="b"), {}, ["second_request_same_worker"]),
        (
            deliver(1, expected=96, cached=32),
            {"a": 32},
            ["second_request_within_one_block", "expected_within_one_block"],
        ),
        (
            deliver(1, expected=0, cached=None),
            {"a": 0},
            ["second_request_within_one_block", "expected_within_one_block"],
        ),
        (deliver(1, expected=64, cached=64), {"a": 32, "b": 32}, ["hits_unlike_engine_counter"]),
    ],
)
def test_each_bar_catches_its_own_fault(second: Delivery, counted: dict[str, int], missed: list[str]) -> None:
    bars = judge([deliver(0), second], counted)
    assert [bar.id for bar in bars if not bar.ok] == missed


def test_a_run_that_sent_nothing_misses_its_bars() -> None:
    assert [bar.ok for bar in judge([], {})] == [False, False, False, True]
