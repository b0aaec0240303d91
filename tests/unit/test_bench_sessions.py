"""The planned conversations: deterministic, in their size bands, each request extending the one before."""

import json
import statistics

import pytest

from workers.bench import sessions

ANSWER = "The fix is in the ledger."


@pytest.fixture(scope="module")
def planned() -> tuple[sessions.Conversation, ...]:
    return sessions.plan(40, seed=0)


def final_tokens(conversation: sessions.Conversation) -> int:
    return sessions.estimated_tokens(conversation, [ANSWER] * len(conversation.steps))


def test_same_seed_gives_the_same_bytes_and_another_seed_others(planned):
    again = sessions.plan(40, seed=0)
    assert [sessions.body(c, [ANSWER], "m") for c in again] == [sessions.body(c, [ANSWER], "m") for c in planned]
    assert sessions.plan(1, seed=1)[0].task != planned[0].task


def test_first_prompts_spread_over_their_band(planned):
    sizes = [sessions.estimated_tokens(c, []) for c in planned]
    assert 3_900 <= min(sizes) < 6_000
    assert 40_000 < max(sizes) <= 43_000
    assert 24_000 <= statistics.median(sizes) <= 28_000


def test_contexts_grow_towards_the_limit_and_never_past_it(planned):
    assert 48_000 < max(final_tokens(c) for c in planned) <= sessions.CONTEXT_TOKENS


def test_a_turn_adds_what_a_coding_agent_adds(planned):
    added = [len(step.result) // 4 for c in planned for step in c.steps]
    assert 450 <= statistics.median(added) <= 900
    assert max(added) <= sessions.WHOLE_FILE_TOKENS[1] + 100


def test_every_request_extends_the_one_before(planned):
    for conversation in planned[:6]:
        answers: list[str] = []
        before = sessions.messages(conversation, answers)
        for number in range(len(conversation.steps)):
            answers.append(f"{ANSWER} {number}")
            after = sessions.messages(conversation, answers)
            assert after[: len(before)] == before
            said, result = after[len(before) :]
            assert said["content"] == f"{ANSWER} {number}"
            assert result["role"] == "tool"
            assert result["tool_call_id"] == said["tool_calls"][0]["id"]
            before = after


def test_agents_of_a_kind_share_their_opening_and_kinds_differ(planned):
    openings = {c.kind.name: (c.kind.system, json.dumps(c.kind.tools)) for c in planned}
    assert len(set(openings.values())) == 3
    assert all((c.kind.system, json.dumps(c.kind.tools)) == openings[c.kind.name] for c in planned)
    assert all(1_500 < (len(system) + len(tools)) // 4 < 4_000 for system, tools in openings.values())


def test_arrivals_are_in_order_and_tasks_are_private(planned):
    starts = [c.start for c in planned]
    assert all(i <= start < i + 1 for i, start in enumerate(starts))
    assert len({c.task[:60] for c in planned}) == len(planned)


def test_the_body_is_a_streamed_chat_completion_with_usage(planned):
    request = json.loads(sessions.body(planned[0], [], "Qwen3.8-27B"))
    assert request["model"] == "Qwen3.8-27B"
    assert request["stream"] is True
    assert request["stream_options"] == {"include_usage": True}
    assert request["max_tokens"] == planned[0].max_tokens[0]
    assert [m["role"] for m in request["messages"]] == ["system", "user"]
    assert len(planned[0].max_tokens) == planned[0].requests
