"""A conversation outlives the proxy: stopped or killed, and started again, it sends the next turn home."""

import contextlib
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import redis
from prometheus_client.parser import text_string_to_metric_families

from proxy.index.records import unpack
from tests.support.clients import Response, ask, chat, request
from tests.support.fleet import LOOP
from tests.support.scripted import Scripted, answers, completion, until
from tests.support.serving import Serving, environment, free_port, serving, short_folder

pytestmark = pytest.mark.anyio
TOKEN = "open-sesame"


@pytest.fixture
def anyio_backend():
    return LOOP


class Talk:
    """A conversation whose prompt grows by two messages with every turn; a token is four bytes to its engine."""

    def __init__(self, name: str) -> None:
        self.messages = [f"{name}: " + "background of the matter " * 80]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.messages)) // 4

    async def turn(self, proxy: Serving, workers: list[Scripted]) -> Response:
        for worker in workers:
            worker.play = answers(completion(self.tokens, None))
        answer = await proxy.ask(chat(*self.messages))
        assert answer.status == 200, proxy.stderr
        self.messages += ["Hello", f"and then, {len(self.messages)}?"]
        return answer


def facts(answer: Response) -> tuple[str | None, str | None, int]:
    return (
        answer.header("x-homing-worker"),
        answer.header("x-homing-reason"),
        int(answer.header("x-homing-expected-tokens") or "-1"),
    )


async def first_requests(proxy: Serving) -> dict[str, float]:
    """How many requests with content were a first or a repeat of their prefix."""
    page = (await ask(proxy.port, request(b"", "/metrics", (), "GET"))).body.decode()
    counts: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == "homing_ttft_seconds_count":
                reuse = sample.labels["reuse"]
                counts[reuse] = counts.get(reuse, 0.0) + sample.value
    return counts


def third_turns(stored: redis.Redis) -> int:
    """How many conversations the store knows up to their third turn."""
    sets = [stored.hgetall(key) for key in stored.keys("*:prefixes:*")]
    records = [unpack(name, value) for fields in sets for name, value in fields.items()]
    return sum(record is not None and record.turn == 3 for record in records)


async def stop(proxy: Serving, number: signal.Signals) -> None:
    if number is signal.SIGKILL:
        # A crash may lose the last fifth of a second: it comes when the third turns are in the store.
        with redis.Redis.from_url(f"unix://{proxy.state / 'valkey.sock'}") as stored:
            await until(lambda: third_turns(stored) == 4)
    proxy.signal(number)
    assert await proxy.end() == (0 if number is signal.SIGTERM else -number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_the_next_turn_after_a_restart_goes_home(number: signal.Signals) -> None:
    async with Scripted() as one, Scripted() as two:
        workers = [one, two]
        named = ["--worker", f"w0={one.url}", "--worker", f"w1={two.url}"]
        port = free_port()
        with short_folder() as state:
            talks = [Talk(name) for name in "abcd"]
            with serving(state, port, *named, HOMING_VERIFY="false") as proxy:
                await proxy.ready()
                await until(lambda: one.probes and two.probes)
                homes = []
                for talk in talks:
                    turns = [facts(await talk.turn(proxy, workers)) for _ in range(3)]
                    assert turns[1][:2] == turns[2][:2] == (turns[0][0], "overlap")
                    assert turns[0][2] == 0 < turns[1][2] <= turns[2][2]
                    homes.append(turns[2])
                await stop(proxy, number)
            with serving(state, port, *named, HOMING_VERIFY="false") as proxy:
                await proxy.ready()
                await until(lambda: len(one.probes) > 3 and len(two.probes) > 3)
                for talk, home in zip(talks, homes, strict=True):
                    before = talk.tokens
                    worker, reason, expected = facts(await talk.turn(proxy, workers))
                    assert (worker, reason) == (home[0], "overlap")
                    # All but the last turn is known to the token: whole blocks of it are expected.
                    assert home[2] <= expected <= before
                assert await first_requests(proxy) == {"repeat": 4}
                proxy.signal(signal.SIGTERM)
                assert await proxy.end() == 0


async def test_simulated_workers_that_registered_are_found_again() -> None:
    """They register, are verified, and after the restart they register again: home is still home."""
    port = free_port()
    with short_folder() as state, contextlib.ExitStack() as stack:
        for name in ("sim-a", "sim-b"):
            stack.enter_context(simulated(state, name, f"http://127.0.0.1:{port}"))
        talk, turns = Talk("a"), []
        for _ in range(2):
            with serving(state, port, HOMING_JOIN_TOKEN=TOKEN) as proxy:
                await proxy.up()
                await until(lambda: ready_workers(proxy) == 2, 30)
                for _ in range(3 if not turns else 1):
                    turns.append(facts(await talk.turn(proxy, [])))
                proxy.signal(signal.SIGTERM)
                assert await proxy.end() == 0
        assert {worker for worker, _, _ in turns} == {turns[0][0]}
        assert [reason for _, reason, _ in turns[1:]] == ["overlap"] * 3
        expected = [tokens for _, _, tokens in turns]
        assert expected[0] == 0 < expected[1] <= expected[2] <= expected[3]


def ready_workers(proxy: Serving) -> int:
    told: int = httpx.get(f"http://127.0.0.1:{proxy.port}/readyz").json()["workers_ready"]
    return told


@contextlib.contextmanager
def simulated(folder: Path, name: str, proxy: str):
    """A stand-in for vLLM as a real process, that registers itself."""
    command = [sys.executable, "-m", "workers", "sim", "--listen", "127.0.0.1:0", "--identity", "H200 SXM"]
    command += ["--model", "m1", "--block-size", "16", "--time-scale", "50", "--proxy", proxy, "--id", name]
    with (folder / f"{name}.log").open("wb") as log:
        child = subprocess.Popen(command, env=environment(HOMING_JOIN_TOKEN=TOKEN), stdout=log, stderr=log)
    try:
        yield
    finally:
        child.kill()
        child.wait()
