"""The bench's two programs against each other: every answer whole, every figure there."""

import contextlib
import json
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from tests.bench.natives import build
from workers.bench.children import free_ports


@pytest.fixture(scope="module")
def natives(tmp_path_factory):
    return build(tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="module")
def worker(natives):
    ports = free_ports(2)
    with subprocess.Popen([str(natives.upstream), *map(str, ports)]) as process:
        try:
            with contextlib.closing(httpx.Client(base_url=f"http://127.0.0.1:{ports[0]}", trust_env=False)) as client:
                deadline = time.monotonic() + 10
                while True:
                    assert process.poll() is None
                    assert time.monotonic() < deadline
                    with contextlib.suppress(httpx.ConnectError):
                        client.get("/health").raise_for_status()
                        break
                yield client, ports[0], process.pid
        finally:
            process.terminate()


def run_load(natives, worker, *words):
    _, port, pid = worker
    command = [str(natives.load), f"port={port}", f"processes={pid}", "seconds=0.5", "warm=0.1", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    result = json.loads(done.stdout)
    assert (result["errors"], result["short"], result["reconnects"]) == (0, 0, 0), done.stderr
    return result


@pytest.mark.parametrize("body", [1024, 800_000])
def test_whole_answers(natives, worker, body):
    before = worker[0].get("/fake/stats").json()["requests"]
    result = run_load(natives, worker, "connections=4", f"body={body}", "prompts=2")
    assert 0 < result["requests"] <= worker[0].get("/fake/stats").json()["requests"] - before
    assert result["latency_ms"]["n"] == result["requests"]
    assert 0 < result["latency_ms"]["p50"] <= result["latency_ms"]["p99"] <= result["latency_ms"]["max"]
    assert result["first_ms"] is result["delay_ms"] is None
    assert 1000 < result["bytes"] / result["requests"] < 2500
    [process] = result["processes"]
    assert (process["pid"], process["name"]) == (worker[2], "upstream")
    assert 0 < process["cpu_s"] <= result["seconds"]
    assert process["rss_kb"] > 0


@pytest.mark.parametrize(("step_us", "path"), [(0, "/v1/chat/completions"), (2000, "/v1/completions")])
def test_streamed_answers(natives, worker, step_us, path):
    result = run_load(natives, worker, "connections=8", "stream=5", f"step_us={step_us}", f"path={path}")
    assert result["requests"] > 0
    # Streams that lie across an edge of the window are counted by the chunk, and by the answer only at its end.
    assert abs(result["chunks"] - 5 * result["requests"]) <= 5 * 8
    assert abs(result["first_ms"]["n"] - result["requests"]) <= 8
    assert result["delay_ms"]["n"] == result["chunks"]
    assert 0 <= result["delay_ms"]["p50"] <= result["latency_ms"]["max"]
    assert result["first_ms"]["p50"] <= result["latency_ms"]["p50"]


def test_what_the_load_does_not_get_is_an_error(natives, worker):
    command = [str(natives.load), f"port={worker[1]}", "path=/nowhere", "seconds=5", "warm=0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert "404" in done.stderr
    assert json.loads(done.stdout)["errors"] > 100
    assert json.loads(done.stdout)["requests"] == 0


def test_a_stream_has_the_shape_of_an_engine(worker):
    client, _, _ = worker
    asked = {
        "model": "bench",
        "messages": [],
        "stream": True,
        "max_tokens": 3,
        "stream_options": {"include_usage": True},
    }
    lines = client.post("/v1/chat/completions", json=asked).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert lines[-2:] == ["data: [DONE]", ""]
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    stamps = [int(delta["content"].split("@")[1].split()[0]) for delta in deltas[1:-1]]
    assert stamps == sorted(stamps)
    assert len(stamps) == 3
    assert all(230 < len(line) < 280 for line in lines[1:4])
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    usage = events[-1]["usage"]
    assert usage["completion_tokens"] == 3
    assert usage["total_tokens"] == usage["prompt_tokens"] + 3
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}


def test_the_worker_counts_a_client_that_left(worker):
    client, port, _ = worker
    before = client.get("/fake/stats").json()["aborted"]
    asked = {"stream": True, "max_tokens": 1000, "seed": 1000, "messages": []}
    with httpx.stream("POST", f"http://127.0.0.1:{port}/v1/chat/completions", json=asked, trust_env=False) as answer:
        next(answer.iter_bytes())
    deadline = time.monotonic() + 10
    while client.get("/fake/stats").json()["aborted"] == before:
        assert time.monotonic() < deadline
    assert client.get("/fake/stats").json()["active"] == 0


def test_sources_that_do_not_compile_say_so(tmp_path, monkeypatch):
    from workers.bench.errors import BenchError

    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(BenchError, match="install one"):
        build(tmp_path)
    assert list(Path(tmp_path).iterdir()) == []
