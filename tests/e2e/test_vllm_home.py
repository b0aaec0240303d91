"""A conversation goes home on real vLLM: two engines on this machine's CPU, the proxy, and an agent beside each.

`make test-vllm` runs these; they install vLLM first where it is missing. They share one fleet and leave it whole.
"""

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.support.vllm.checks import agrees
from tests.support.vllm.drive import drive
from tests.support.vllm.fleet import Fleet, run_fleet
from tests.support.vllm.run import choose_sessions, measure
from tests.support.vllm.sessions import Session
from tests.support.vllm.worker import BLOCK_TOKENS, MODEL, find_python, make_model, run_engines

# Starting takes a minute, an installation before it some three.
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder: Path = tmp_path_factory.mktemp("vllm")
    python = find_python()
    model = make_model(python, folder)
    with run_engines(python, model, folder) as engines, run_fleet(engines, folder) as fleet:
        yield fleet


def make_chat(name: str) -> Session:
    """Two requests whose text no other test sends: some 20 blocks, and one more question."""
    opening = " ".join(f"{name} line {number} of the file" for number in range(60))
    return Session(name, (({"role": "user", "content": opening},), ({"role": "user", "content": "and then?"},)))


def test_every_session_goes_home_and_the_hits_are_as_expected(fleet: Fleet) -> None:
    sessions, _ = choose_sessions()
    deliveries, bars = measure(fleet, sessions)
    astray = [delivery for delivery in deliveries if not agrees(delivery)]
    assert [bar for bar in bars if not bar.ok] == [], astray
    assert {delivery.worker for delivery in deliveries} == set(fleet.agents)
    assert len(deliveries) == sum(len(session.turns) for session in sessions)


def test_the_fleet_lists_the_model_of_its_engines(fleet: Fleet) -> None:
    models = httpx.get(f"{fleet.url}/v1/models").raise_for_status().json()
    assert [(model["id"], model["owned_by"]) for model in models["data"]] == [(MODEL, "vllm")]


def test_the_openai_client_streams_through(fleet: Fleet) -> None:
    with openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0) as client:
        chunks = list(
            client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "Say something."}],
                max_tokens=4,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason in {"length", "stop"}
    assert chunks[-1].usage.total_tokens == chunks[-1].usage.prompt_tokens + chunks[-1].usage.completion_tokens


def test_an_agent_that_is_told_to_end_takes_its_worker_out(fleet: Fleet) -> None:
    agent = fleet.agents["vllm-1"]
    agent.child.terminate()
    assert agent.child.wait(30) == 0
    assert fleet.states() == {"vllm-0": "ready"}
    assert {delivery.worker for delivery in drive(fleet.url, [make_chat("lonely")])} == {"vllm-0"}
    fleet.join("vllm-1", agent.engine)
    fleet.wait_ready()


def test_a_restarted_proxy_still_knows_who_holds_what(fleet: Fleet) -> None:
    chats = [make_chat(f"before the restart {number}") for number in range(6)]
    openings = [Session(chat.name, chat.turns[:1]) for chat in chats]
    homes = {delivery.session: delivery.worker for delivery in drive(fleet.url, openings)}
    fleet.start_proxy()
    fleet.wait_ready()
    for chat in chats:
        # The whole chat as one request: the second one, as a proxy that has just started sees it.
        (delivery,) = drive(fleet.url, [Session(chat.name, (chat.turns[0] + chat.turns[1],))])
        assert delivery.worker == homes[chat.name]
        assert delivery.expected > BLOCK_TOKENS
        assert agrees(delivery), delivery
