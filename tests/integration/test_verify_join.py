"""A worker joins: it is probed twice by the running proxy, serves when its cache works, and is held out until then."""

import json

import pytest

from proxy.fleet import probes, store, verify
from tests.support.clients import Response
from tests.support.fleet import LOOP, Proxy, proxying
from tests.support.scripted import (
    MODEL,
    Exchange,
    Scripted,
    answers,
    closes,
    completion,
    hangs,
    resets,
    response,
    until,
)

pytestmark = pytest.mark.anyio

TOKEN = "open-sesame"
PROBES = "/v1/completions"


@pytest.fixture
def anyio_backend():
    return LOOP


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    """The same steps, sooner."""
    monkeypatch.setattr(probes, "WAITING_SECONDS", 0.02)
    monkeypatch.setattr(probes, "READY_SECONDS", 0.02)
    monkeypatch.setattr(probes, "TICK_SECONDS", 0.01)
    monkeypatch.setattr(probes, "FIRST_PAUSE", 0.04)
    monkeypatch.setattr(store, "SYNC_SECONDS", 0.05)
    monkeypatch.setattr(verify, "ANSWER_SECONDS", 0.3)


class Caching:
    """A play as of an engine with a prefix cache: what it has seen it holds, less the last block."""

    def __init__(self, *, works: bool = True, tells: bool = True) -> None:
        self.works = works
        self.tells = tells
        self.held: set[str] = set()

    async def __call__(self, exchange: Exchange) -> None:
        prompt = json.loads(exchange.heard.body).get("prompt", "")
        cached = 496 if self.works and prompt in self.held else 0
        self.held.add(prompt)
        exchange.send(response(200, completion(512, cached if self.tells else None)))


class Telling(Scripted):
    """A worker whose page says whether its prefix cache is on."""

    caching = "True"

    def _page(self, target: str) -> bytes:
        return super()._page(target).replace(b"num_gpu", f'enable_prefix_caching="{self.caching}",num_gpu'.encode())


async def register(proxy: Proxy, worker: Scripted, incarnation: str = "life-1", name: str = "a") -> Response:
    models = [{"id": MODEL, "max_model_len": 32768}]
    body = {"id": name, "url": worker.url, "incarnation": incarnation, "engine": {"models": models}}
    return await proxy.call("POST", "/workers", json.dumps(body).encode(), [("authorization", f"Bearer {TOKEN}")])


async def verification(proxy: Proxy, name: str = "a") -> dict:
    return json.loads((await proxy.call("GET", f"/workers/{name}")).body)["verification"]


def running(*workers: Scripted, **given):
    return proxying(*workers, verify=True, join_token=TOKEN, **given)


def asked(worker: Scripted) -> list[str]:
    """Every prompt that verification sent."""
    return [json.loads(heard.body)["prompt"] for heard in worker.heard if heard.target == PROBES]


async def test_a_worker_is_probed_twice_and_then_serves() -> None:
    async with Scripted(play=Caching()) as worker, running() as proxy:
        assert (await register(proxy, worker)).status == 200
        await proxy.ready("a")
        first, second = asked(worker)
        assert first == second
        told = await verification(proxy)
        assert (told["passed"], told["trust"], told["reason"]) == (True, "inferred", None)
        assert (told["prompt_tokens"], told["cached_tokens"], told["incarnation"]) == (512, 496, "life-1")
        assert min(told["first_seconds"], told["second_seconds"]) > 0.0
        assert (await proxy.ask()).header("x-homing-worker") == "a"


async def test_a_static_worker_is_verified_too() -> None:
    async with Scripted(play=Caching()) as worker, running(worker) as proxy:
        assert len(asked(worker)) == 2
        assert (await verification(proxy, "w0"))["passed"] is True


async def test_without_verification_no_probe_is_sent() -> None:
    async with Scripted(play=Caching(works=False)) as worker, proxying(worker, verify=False) as proxy:
        assert await verification(proxy, "w0") is None
        assert worker.served == 0


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (None, "the second send of the same 512-token prompt delivered no cached tokens; its prefix cache is off"),
        (answers(b"{}", 500), "it answered a probe completion with 500"),
        (hangs, "it did not answer a probe completion (ReadTimeout)"),
        (resets, "it did not answer a probe completion (ReadError)"),
        (closes, "it did not answer a probe completion (RemoteProtocolError)"),
    ],
    ids=["no-hit", "500", "hang", "reset", "close"],
)
async def test_a_worker_that_fails_is_held_out_and_tried_again(fault, reason) -> None:
    play = Caching(works=False)
    async with Scripted(play=play) as worker, running() as proxy:
        if fault is not None:
            worker.play = fault
        await register(proxy, worker)
        await until(lambda: sum("held out" in line for line in proxy.log.lines) >= 3)
        assert proxy.states == {"a": "joining"}
        told = await verification(proxy)
        assert (told["passed"], told["reason"]) == (False, reason)
        refused = await proxy.ask()
        assert (refused.status, refused.header("x-homing-worker")) == (503, "none")
        held_out = [line for line in proxy.log.lines if "held out" in line]
        assert held_out[:3] == [
            f"worker a is held out: {reason}; next try in {pause} s" for pause in ("0.04", "0.08", "0.16")
        ]
        play.works, worker.play = True, play
        await proxy.ready("a")
        assert (await verification(proxy))["reason"] is None


async def test_the_pauses_stop_growing(monkeypatch) -> None:
    monkeypatch.setattr(probes, "LONGEST_PAUSE", 0.05)
    async with Scripted(play=Caching(works=False)) as worker, running() as proxy:
        await register(proxy, worker)
        await until(lambda: sum("held out" in line for line in proxy.log.lines) >= 4)
        pauses = [line.rpartition(" in ")[2] for line in proxy.log.lines if "held out" in line]
        assert pauses[:4] == ["0.04 s", "0.05 s", "0.05 s", "0.05 s"]


async def test_a_worker_whose_cache_is_off_is_held_out_without_a_probe() -> None:
    async with Telling(play=Caching()) as worker, running() as proxy:
        worker.caching = "False"
        await register(proxy, worker)
        await until(lambda: any("held out" in line for line in proxy.log.lines))
        told = await verification(proxy)
        assert "its prefix caching is off; start the engine with --enable-prefix-caching" in told["reason"]
        assert (worker.served, proxy.states) == (0, {"a": "joining"})
        worker.caching = "True"
        await proxy.ready("a")
        assert len(asked(worker)) == 2


async def test_a_worker_that_reports_no_hits_passes_as_blind() -> None:
    async with Scripted(play=Caching(tells=False)) as worker, running() as proxy:
        await register(proxy, worker)
        await proxy.ready("a")
        told = await verification(proxy)
        assert (told["trust"], told["cached_tokens"]) == ("blind", None)
        assert "--enable-prompt-tokens-details" in told["reason"]


async def test_a_short_window_keeps_the_probe_inside() -> None:
    async with Scripted({"id": MODEL, "max_model_len": 256}, play=Caching()) as worker, running() as proxy:
        worker.block_tokens = 784
        await register(proxy, worker)
        await proxy.ready("a")
        assert {len(prompt) for prompt in asked(worker)} == {4 * 128}


async def test_another_life_is_verified_anew_and_at_once(monkeypatch) -> None:
    monkeypatch.setattr(probes, "FIRST_PAUSE", 300.0)
    play = Caching(works=False)
    async with Scripted(play=play) as worker, running() as proxy:
        await register(proxy, worker)
        await until(lambda: any("held out" in line for line in proxy.log.lines))
        play.works = True
        await register(proxy, worker, "life-2")
        await proxy.ready("a")
        assert (await verification(proxy))["incarnation"] == "life-2"
        assert len(asked(worker)) == 4
        await register(proxy, worker, "life-3")
        await until(lambda: len(asked(worker)) == 6)
        await proxy.ready("a")
        assert (await verification(proxy))["incarnation"] == "life-3"


async def test_the_same_life_is_not_verified_again() -> None:
    async with Scripted(play=Caching()) as worker, running() as proxy:
        await register(proxy, worker)
        await proxy.ready("a")
        await worker.refuse()
        await until(lambda: proxy.states == {"a": "suspect"})
        await worker.open()
        await proxy.ready("a")
        await register(proxy, worker)
        await proxy.call("POST", "/fleet/workers/a/drain")
        assert proxy.states == {"a": "draining"}
        await proxy.call("POST", "/fleet/workers/a/uncordon")
        await proxy.ready("a")
        assert len(asked(worker)) == 2


async def test_a_restarted_proxy_does_not_probe_who_was_verified_before() -> None:
    async with Scripted(play=Caching()) as worker:
        async with running() as proxy:
            await register(proxy, worker)
            await proxy.ready("a")
            before = await verification(proxy)
            redis, key = proxy.homing.redis, store.worker_key("a")
            while not await redis.hexists(key, "verification"):
                await proxy.homing.store.try_sync()
        async with running(keep_store=True) as proxy:
            await proxy.ready("a")
            assert await verification(proxy) == before
            assert len(asked(worker)) == 2


async def test_a_cordon_outlives_the_proxy() -> None:
    async with Scripted(play=Caching()) as worker:
        async with running() as proxy:
            await register(proxy, worker)
            await proxy.ready("a")
            await proxy.call("POST", "/fleet/workers/a/cordon")
            redis, key = proxy.homing.redis, store.worker_key("a")
            while await redis.hget(key, "state") != b"cordoned":
                await proxy.homing.store.try_sync()
        async with running(keep_store=True) as proxy:
            await until(lambda: proxy.states == {"a": "cordoned"})
            await register(proxy, worker)
            assert proxy.states == {"a": "cordoned"}
            await proxy.call("POST", "/fleet/workers/a/uncordon")
            await proxy.ready("a")
            assert len(asked(worker)) == 2


async def test_an_id_whose_worker_lives_is_refused_to_another_address() -> None:
    async with Scripted(play=Caching()) as worker, Scripted(play=Caching()) as other, running() as proxy:
        await register(proxy, worker)
        await proxy.ready("a")
        refused = await register(proxy, other, "life-2")
        assert refused.status == 409
        assert "belongs to another worker that is alive" in str(refused.error["message"])
        assert (other.served, len(asked(worker)), proxy.states) == (0, 2, {"a": "ready"})
        await worker.refuse()
        assert (await register(proxy, other, "life-2")).status == 200
        await proxy.ready("a")
        assert len(asked(other)) == 2


async def test_a_wrong_token_opens_no_connection() -> None:
    async with Scripted(play=Caching()) as worker, running() as proxy:
        for headers in ([], [("authorization", "Bearer wrong")]):
            body = json.dumps({"id": "a", "url": worker.url, "incarnation": "1"}).encode()
            assert (await proxy.call("POST", "/workers", body, headers)).status == 401
        assert (worker.lines, proxy.states) == ([], {})
