"""The load against a worker made of a few lines, on real sockets."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from workers.bench import load, sessions

pytestmark = pytest.mark.anyio

ROLE = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
USAGE = {"choices": [], "usage": {"prompt_tokens": 900, "prompt_tokens_details": {"cached_tokens": 784}}}


def words(text: str) -> dict:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}


def events(*said: dict | str) -> list[bytes]:
    return [b"data: " + (e if isinstance(e, str) else json.dumps(e)).encode() + b"\n\n" for e in said]


WHOLE = [b": keep-alive\n\n", *events(ROLE, words("Done"), words(" so."), USAGE, "[DONE]")]


class FakeWorker:
    """Answers every chat completion with the same pieces; ``release`` holds back all after the first ``held``."""

    def __init__(self, pieces: list[bytes], status: str = "200 OK", headers: str = "", held: int | None = None) -> None:
        self.pieces, self.status, self.headers, self.held = pieces, status, headers, held
        self.bodies: list[dict] = []
        self.waiting = asyncio.Event()
        self.release = asyncio.Event()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(int(x.split(b":")[1]) for x in head.lower().split(b"\r\n") if x.startswith(b"content-length"))
            self.bodies.append(json.loads(await reader.readexactly(length)))
            writer.write(f"HTTP/1.1 {self.status}\r\nconnection: close\r\n{self.headers}\r\n".encode())
            for number, piece in enumerate(self.pieces):
                if number == self.held:
                    self.waiting.set()
                    await self.release.wait()
                writer.write(piece)
                await writer.drain()
        finally:
            writer.close()


@asynccontextmanager
async def served(worker: FakeWorker) -> AsyncIterator[str]:
    listening = await asyncio.start_server(worker.handle, "127.0.0.1", 0)
    async with listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"


async def ask(worker: FakeWorker) -> tuple[load.Sample, str]:
    async with served(worker) as url, httpx.AsyncClient(base_url=url, trust_env=False) as client:
        return await load.ask(client, b"{}", 3, 1)


async def test_a_whole_answer_gives_usage_placement_and_words():
    headers = "x-homing-worker: h200\r\nx-homing-reason: overlap\r\nx-homing-expected-tokens: 784\r\n"
    sample, answer = await ask(FakeWorker(WHOLE, headers=headers))
    assert answer == "Done so."
    assert (sample.conversation, sample.turn, sample.error) == (3, 1, None)
    assert (sample.prompt_tokens, sample.cached_tokens, sample.expected_tokens) == (900, 784, 784)
    assert (sample.worker, sample.reason) == ("h200", "overlap")


async def test_what_is_not_said_stays_unknown():
    silent = {"choices": [], "usage": {"prompt_tokens": 900, "prompt_tokens_details": None}}
    sample, _ = await ask(FakeWorker(events(ROLE, words("x"), silent, "[DONE]")))
    assert sample.error is None
    assert (sample.cached_tokens, sample.expected_tokens, sample.worker, sample.reason) == (
        None,
        None,
        None,
        None,
    )


async def test_ttft_ends_at_content_and_not_at_the_role():
    worker = FakeWorker(WHOLE, held=2)
    asking = asyncio.create_task(ask(worker))
    await asyncio.wait_for(worker.waiting.wait(), 5)
    loop = asyncio.get_running_loop()
    held_until = loop.time() + 0.2
    loop.call_at(held_until, worker.release.set)
    sample, _ = await asyncio.wait_for(asking, 5)
    assert sample.ttft >= 0.2


@pytest.mark.parametrize(
    ("worker", "said"),
    [
        (lambda: FakeWorker([b'{"error":{}}'], status="503 Service Unavailable"), "HTTP 503"),
        (lambda: FakeWorker(events(ROLE, words("x"))), "without [DONE]"),
        (lambda: FakeWorker(events(ROLE, USAGE, "[DONE]")), "no content"),
        (lambda: FakeWorker(events(ROLE, {"error": {"message": "engine died"}}, "[DONE]")), "engine died"),
        (lambda: FakeWorker(events("{broken", "[DONE]")), "not JSON"),
        (lambda: FakeWorker([b"data: x"], headers="content-length: 99\r\n"), "RemoteProtocolError"),
    ],
)
async def test_every_kind_of_failure_is_a_sample_with_its_reason(worker, said):
    sample, _ = await ask(worker())
    assert said in sample.error


async def test_requests_take_turns_and_feed_real_answers_back():
    conversations = sessions.plan(2, seed=3)
    workers = [FakeWorker(WHOLE) for _ in range(3)]
    samples: list[load.Sample] = []
    async with served(workers[0]) as a, served(workers[1]) as b, served(workers[2]) as c:
        await load.drive(load.Load(conversations, "m", seconds=60.0, gap=0.05, pause=0.05), (a, b, c), samples.append)
    made = sum(conversation.requests for conversation in conversations)
    assert len(samples) == made
    assert not [sample.error for sample in samples if sample.error]
    assert [len(w.bodies) for w in workers] == [made // 3 + (made % 3 > i) for i in range(3)]
    later = [body for w in workers for body in w.bodies if len(body["messages"]) > 2]
    assert len(later) == made - 2
    assert all(m["content"] == "Done so." for body in later for m in body["messages"] if m["role"] == "assistant")


async def test_a_failed_request_ends_its_conversation_alone():
    samples: list[load.Sample] = []
    async with served(FakeWorker([b"no"], status="500 Internal Server Error")) as url:
        await load.drive(
            load.Load(sessions.plan(2, seed=3), "m", seconds=60.0, gap=0.05, pause=0.05), (url,), samples.append
        )
    assert sorted((s.conversation, s.turn) for s in samples) == [(0, 0), (1, 0)]


async def test_what_hangs_past_the_grace_is_dropped_unrecorded():
    samples: list[load.Sample] = []
    async with served(FakeWorker(WHOLE, held=1)) as url:
        await asyncio.wait_for(
            load.drive(
                load.Load(sessions.plan(2, seed=3), "m", seconds=0.5, gap=0.05, pause=0.05), (url,), samples.append
            ),
            10,
        )
    assert samples == []
