"""The simulated worker on a real socket: the shapes of vLLM's surface, and what happens when a client leaves."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Self

import httpx
import openai
import pytest
import uvicorn

from workers.agent.exposition import read_cache, read_incarnation
from workers.sim.app import Application, create_app
from workers.sim.options import SimOptions

BLOCK = 16
OPTIONS = SimOptions(
    listen="127.0.0.1:0",
    identity="H200 SXM",
    model="tiny",
    time_scale=1000,
    block_size=BLOCK,
    capacity_tokens=BLOCK * 512,
    max_model_len=4096,
)


class Worker:
    """A worker served from a thread."""

    def __init__(self, app: Application) -> None:
        self.app = app
        config = uvicorn.Config(app, port=0, lifespan="on", log_level="warning", access_log=False, ws="none")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run)

    def __enter__(self) -> Self:
        self._thread.start()
        until(lambda: self._server.started)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.client = httpx.Client(base_url=self.url, timeout=20)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self._server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()

    def chat(self, text: str = "Hello there", **fields: object) -> dict:
        body = {"model": "tiny", "messages": [{"role": "user", "content": text}], **fields}
        response = self.client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def stream(self, path: str = "/v1/chat/completions", **fields: object) -> list[dict]:
        """Returns a stream's chunks, having checked its frame."""
        response = self.client.post(path, json={"stream": True, **fields})
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        frames = response.text.split("\n\n")
        assert frames[-2:] == ["data: [DONE]", ""]
        return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]

    def meter(self, name: str) -> float:
        lines = self.client.get("/metrics").text.splitlines()
        return float(next(line for line in lines if line.startswith(f"vllm:{name}{{")).split()[-1])


def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.005)


@contextlib.contextmanager
def working(**changes: object) -> Iterator[Worker]:
    with Worker(create_app(replace(OPTIONS, **changes))) as worker:
        yield worker


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with working() as worker:
        yield worker


@pytest.fixture(scope="module")
def slow() -> Iterator[Worker]:
    with working(time_scale=1.0) as worker:
        yield worker


MESSAGES = [{"role": "user", "content": "What is a prefix?"}]


def test_small_pages(worker: Worker) -> None:
    client = worker.client
    health = client.get("/health")
    assert (health.status_code, health.content) == (200, b"")
    assert client.head("/health").status_code == 405
    assert client.get("/ping").status_code == client.post("/ping").status_code == 200
    assert client.get("/version").json() == {"version": "0.32.0+sim"}
    assert client.get("/load").json() == {"server_load": 0}
    assert client.get("/none").json() == {"detail": "Not Found"}
    wrong = client.get("/v1/chat/completions")
    assert (wrong.status_code, wrong.json()) == (405, {"detail": "Method Not Allowed"})
    (model,) = client.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"], model["object"]) == ("tiny", 4096, "model")
    assert len(model["permission"]) == 1


def test_request_id_is_echoed_and_names_the_answer(worker: Worker) -> None:
    response = worker.client.post(
        "/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 1}, headers={"x-request-id": "mine-7"}
    )
    assert response.headers["x-request-id"] == "mine-7"
    assert response.json()["id"] == "chatcmpl-mine-7"
    assert len(worker.client.get("/health").headers["x-request-id"]) == 32


def test_first_and_second_send_report_what_was_cached(worker: Worker) -> None:
    text = "first and second " * 40
    first, second = (worker.chat(text, max_tokens=4)["usage"] for _ in range(2))
    tokens = first["prompt_tokens"]
    assert tokens % BLOCK != 0
    full = tokens // BLOCK * BLOCK
    assert first == {
        "prompt_tokens": tokens,
        "total_tokens": tokens + 4,
        "completion_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 0, "created_cache_tokens": full, "multimodal_tokens": None},
        "completion_tokens_details": None,
    }
    assert second["prompt_tokens_details"] == {
        "cached_tokens": full,
        "created_cache_tokens": 0,
        "multimodal_tokens": None,
    }


def test_the_next_turn_hits_the_answer_too(worker: Worker) -> None:
    opening = {"role": "user", "content": "turn " * 50}
    first = worker.client.post(
        "/v1/chat/completions", json={"messages": [opening], "max_tokens": 100, "ignore_eos": True}
    ).json()
    answer = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
    later = worker.client.post(
        "/v1/chat/completions",
        json={"messages": [opening, answer, {"role": "user", "content": "more"}], "max_tokens": 1},
    ).json()
    computed = first["usage"]["total_tokens"] - 1
    assert later["usage"]["prompt_tokens_details"]["cached_tokens"] == computed // BLOCK * BLOCK


def test_salts_do_not_share(worker: Worker) -> None:
    text = "salted " * 60
    hits = [
        worker.chat(text, max_tokens=1, **salt)["usage"]["prompt_tokens_details"]["cached_tokens"]
        for salt in ({"cache_salt": "a"}, {"cache_salt": "a"}, {"cache_salt": "b"}, {}, {})
    ]
    assert [hit > 0 for hit in hits] == [False, True, False, False, True]


def test_chat_stream(worker: Worker) -> None:
    chunks = worker.stream(messages=MESSAGES, max_tokens=3, stream_options={"include_usage": True})
    opening, *content, usage = chunks
    assert opening["choices"][0] == {
        "index": 0,
        "delta": {"role": "assistant", "content": ""},
        "logprobs": None,
        "finish_reason": None,
    }
    assert [chunk["choices"][0]["finish_reason"] for chunk in content] == [None, None, "length"]
    assert all(chunk["choices"][0]["delta"]["content"] for chunk in content)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 3
    assert set(usage["usage"]["prompt_tokens_details"]) == {"cached_tokens", "created_cache_tokens"}
    assert "system_fingerprint" in usage
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_usage_only_when_asked_and_everywhere_when_continuous(worker: Worker) -> None:
    plain = worker.stream(messages=MESSAGES, max_tokens=2)
    assert not any("usage" in chunk for chunk in plain)
    assert "system_fingerprint" in plain[-1]
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = worker.stream(messages=MESSAGES, max_tokens=2, stream_options=options)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [0, 1, 2, 2]
    assert ["prompt_tokens_details" in chunk["usage"] for chunk in chunks] == [False, False, False, True]


def test_completions(worker: Worker) -> None:
    chunks = worker.stream("/v1/completions", prompt="Once upon", max_tokens=2, stream_options={"include_usage": True})
    assert [chunk["object"] for chunk in chunks] == ["text_completion"] * 3
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None, "length"]
    assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    whole = worker.client.post("/v1/completions", json={"prompt": list(range(40)), "max_tokens": 2}).json()
    assert whole["id"].startswith("cmpl-")
    assert whole["usage"]["prompt_tokens"] == 40
    assert whole["usage"]["prompt_tokens_details"]["created_cache_tokens"] is None


def test_an_answer_ends_on_its_own_unless_told_otherwise(worker: Worker) -> None:
    free = worker.chat()
    assert free["choices"][0]["finish_reason"] == "stop"
    assert 17 <= free["usage"]["completion_tokens"] <= 65
    assert len(free["choices"][0]["message"]["content"].split()) == free["usage"]["completion_tokens"] - 1
    exact = worker.chat(max_tokens=256, min_tokens=256, ignore_eos=True)
    assert exact["choices"][0]["finish_reason"] == "length"
    assert exact["usage"]["completion_tokens"] == 256
    late = worker.chat(max_completion_tokens=400, min_tokens=300)
    assert (late["choices"][0]["finish_reason"], late["usage"]["completion_tokens"]) == ("stop", 301)


def test_details_can_be_off_and_usage_forced() -> None:
    with working(prompt_tokens_details=False, force_include_usage=True) as worker:
        assert worker.chat(max_tokens=1)["usage"]["prompt_tokens_details"] is None
        last = worker.stream(messages=MESSAGES, max_tokens=1)[-1]
        assert last["usage"]["prompt_tokens_details"] is None
        assert last["usage"]["completion_tokens"] == 1


def test_the_same_seed_gives_the_same_text_on_another_worker(worker: Worker) -> None:
    texts = [worker.chat("tell")["choices"][0]["message"]["content"] for _ in range(2)]
    for seed in (0, 1):
        with working(seed=seed) as other:
            texts.append(other.chat("tell")["choices"][0]["message"]["content"])
    assert texts[0] == texts[1] == texts[2] != texts[3]


def test_tokenize(worker: Worker) -> None:
    counted = worker.client.post("/tokenize", json={"messages": MESSAGES}).json()
    assert counted["count"] == len(counted["tokens"]) == worker.chat("What is a prefix?")["usage"]["prompt_tokens"]
    assert (counted["max_model_len"], counted["token_strs"]) == (4096, None)
    named = worker.client.post("/tokenize", json={"prompt": "Hello world", "return_token_strs": True}).json()
    assert named["token_strs"] == ["Hello", " world"]


CHAT = {"messages": MESSAGES}
LONG = {"messages": [{"role": "user", "content": "long " * 5000}]}


@pytest.mark.parametrize(
    ("body", "status", "kind", "param", "words"),
    [
        ({**CHAT, "model": "nope"}, 404, "NotFoundError", "model", "The model `nope` does not exist. Valid aliases: tiny."),
        (LONG, 400, "BadRequestError", "input_tokens", "maximum context length is 4096 tokens. However, your prompt contains at least 4097 input tokens"),
        ({**LONG, "stream": True}, 400, "BadRequestError", "input_tokens", "at least 4097 input tokens"),
        ({**CHAT, "max_tokens": 4090}, 400, "BadRequestError", "input_tokens", "you requested 4090 output tokens"),
        ({**CHAT, "max_tokens": 9000}, 400, "BadRequestError", "max_tokens", "max_tokens=9000 cannot be greater than max_model_len=4096."),
        ({**CHAT, "max_tokens": 0}, 400, "BadRequestError", "max_tokens", "at least 1"),
        ({**CHAT, "max_tokens": "9"}, 400, "Bad Request", "body.max_tokens", "valid integer"),
        ({**CHAT, "n": 2}, 400, "BadRequestError", "n", "n=2"),
        ({**CHAT, "n": [1]}, 400, "BadRequestError", "n", "only n=1"),
        ({**CHAT, "cache_salt": ""}, 400, "BadRequestError", None, "Parameter 'cache_salt' must be a non-empty string if provided."),
        ({"model": "tiny"}, 400, "Bad Request", "body.messages", "Field required"),
        ({"messages": [7]}, 400, "Bad Request", "body.messages", "list of at least one message"),
        ([], 400, "Bad Request", "body", "valid dictionary"),
    ],
)  # fmt: skip
def test_refusals(worker: Worker, body: object, status: int, kind: str, param: str | None, words: str) -> None:
    response = worker.client.post("/v1/chat/completions", json=body)
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert (error["type"], error["param"], error["code"]) == (kind, param, status)
    assert words in error["message"]


def test_broken_bodies(worker: Worker) -> None:
    kind = {"content-type": "application/json"}
    broken = worker.client.post("/v1/chat/completions", content=b'{"model": "tiny", broken', headers=kind)
    assert broken.status_code == 400
    error = broken.json()["error"]
    assert (error["type"], error["param"]) == ("Bad Request", "body.18")
    assert error["message"].startswith("1 validation error:\n  {'type': 'json_invalid', 'loc': 'body.18'")
    assert worker.client.post("/v1/chat/completions", content=b"\xff", headers=kind).status_code == 400
    plain = worker.client.post("/v1/chat/completions", content=b"{}", headers={"content-type": "text/plain"})
    assert plain.status_code == 400
    assert "Unsupported Media Type: Only 'application/json' is allowed" in plain.json()["error"]["message"]


def test_data_parallel_rank(worker: Worker) -> None:
    def ask(rank: str) -> httpx.Response:
        return worker.client.post(
            "/v1/chat/completions", json={**CHAT, "max_tokens": 1}, headers={"X-data-parallel-rank": rank}
        )

    assert [ask(rank).status_code for rank in ("0", "abc", "5")] == [200, 200, 400]
    assert ask("5").json()["error"]["message"] == "data_parallel_rank 5 is out of range [0, 1)."


def test_metrics(worker: Worker) -> None:
    text = "metered " * 50
    queries, hits = worker.meter("prefix_cache_queries_total"), worker.meter("prefix_cache_hits_total")
    usages = [worker.chat(text, max_tokens=1)["usage"] for _ in range(2)]
    assert worker.meter("prefix_cache_queries_total") - queries == 2 * usages[0]["prompt_tokens"]
    cached = usages[1]["prompt_tokens_details"]["cached_tokens"]
    assert worker.meter("prefix_cache_hits_total") - hits == cached > 0
    page = worker.client.get("/metrics").text
    shape = read_cache(page)
    assert (shape.block_size, shape.capacity_tokens, shape.prefix_caching) == (BLOCK, BLOCK * 512, True)
    assert read_incarnation(page) == worker.app.meters.incarnation
    assert 'vllm:time_to_first_token_seconds_bucket{engine="0",le="0.005",model_name="tiny"}' in page
    assert worker.meter("kv_cache_usage_perc") == worker.meter("num_requests_running") == 0.0


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_blocks(slow: Worker, stream: bool) -> None:
    body = {"messages": [{"role": "user", "content": "leaving " * 200}], "max_tokens": 3000, "ignore_eos": True}
    with httpx.Client(base_url=slow.url, timeout=10) as client:
        if stream:
            with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
                lines = response.iter_lines()
                assert next(lines).startswith("data: ")
                assert slow.meter("num_requests_running") == 1
                assert slow.meter("kv_cache_usage_perc") > 0
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/chat/completions", json=body, timeout=httpx.Timeout(10, read=0.3))
    until(lambda: slow.meter("num_requests_running") == 0, 1.0)
    assert slow.meter("kv_cache_usage_perc") == 0
    assert slow.app.cache.used == 0


def test_headers_come_before_the_prefill(slow: Worker) -> None:
    body = {"messages": [{"role": "user", "content": "headers"}], "max_tokens": 1, "stream": True}
    with slow.client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200
        assert slow.meter("num_requests_running") == 1
        assert "".join(response.iter_text()).endswith("data: [DONE]\n\n")


def test_requests_in_flight_end_with_abort_when_the_engine_stops(slow: Worker) -> None:
    body = {"messages": MESSAGES, "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with slow.client.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        slow.app.engine.shut_down()
        frames = [line for line in lines if line]
    assert frames[-1] == "data: [DONE]"
    assert json.loads(frames[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "abort"


def test_openai_sdk(worker: Worker) -> None:
    with openai.OpenAI(base_url=f"{worker.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=5)
        assert answer.usage.completion_tokens == 5
        assert answer.usage.prompt_tokens_details.cached_tokens == answer.usage.prompt_tokens // BLOCK * BLOCK
        stream = client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=5, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == answer.choices[0].message.content
        assert chunks[-1].usage.completion_tokens == 5
        plain = client.completions.create(model="tiny", prompt="Once", max_tokens=2)
        assert plain.choices[0].finish_reason == "length"
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.chat.completions.create(model="nope", messages=MESSAGES)
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            client.chat.completions.create(model="tiny", messages=LONG["messages"], stream=True)
