"""How workers come, stay, rest and go: the registration wire, leases, engines that restart, workers that die."""

import asyncio
import functools
import json
import socket

import pytest
import redis

from proxy.fleet import membership, store
from tests.support import fleet
from tests.support.clients import chat, request
from tests.support.fleet import LOOP, Proxy, store_url
from tests.support.registering import TOKEN, card, join, tell
from tests.support.scripted import Exchange, Scripted, adapts, completion, hangs, response, until

pytestmark = pytest.mark.anyio
proxying = functools.partial(fleet.proxying, join_token=TOKEN)


@pytest.fixture
def anyio_backend():
    return LOOP


async def test_a_registered_worker_serves() -> None:
    async with Scripted() as worker, proxying() as proxy:
        answer = await tell(proxy, "/workers", card(worker))
        assert answer.status == 200
        assert json.loads(answer.body) == {
            "id": "h200-a",
            "lease_seconds": membership.LEASE_SECONDS,
            "heartbeat_seconds": membership.HEARTBEAT_SECONDS,
        }
        assert membership.LEASE_SECONDS >= 3 * membership.HEARTBEAT_SECONDS
        await proxy.ready("h200-a")
        served = await proxy.ask()
        assert (served.status, served.header("x-homing-worker")) == (200, "h200-a")
        told = json.loads((await proxy.call("GET", "/workers/h200-a")).body)
        assert (told["state"], told["source"], told["identity"]["name"]) == ("ready", "registered", "H200 SXM")
        beat = await tell(proxy, "/workers/h200-a/heartbeat", {"incarnation": "life-1"})
        assert json.loads(beat.body) == {"lease_seconds": membership.LEASE_SECONDS, "state": "ready"}
        assert await proxy.value("homing_workers", state="ready") == 1


async def test_an_id_belongs_to_whoever_lives() -> None:
    async with Scripted() as one, Scripted() as two, proxying() as proxy:
        await join(proxy, one)
        answer = await tell(proxy, "/workers", card(two))
        assert (answer.status, answer.error["code"], answer.error["param"]) == (409, "conflict", "id")
        assert {proxy.homing.registry.get("h200-a").url} == {one.url}
        await one.refuse()
        assert (await tell(proxy, "/workers", card(two, incarnation="life-2"))).status == 200
        await proxy.ready("h200-a")
        assert (await proxy.ask()).status == 200
        assert (one.served, two.served) == (0, 1)


async def test_a_worker_of_the_command_line_cannot_be_taken_over() -> None:
    async with Scripted() as one, Scripted() as two, proxying(one) as proxy:
        for worker in (one, two):
            answer = await tell(proxy, "/workers", card(worker, "w0"))
            assert (answer.status, answer.error["code"]) == (409, "conflict")
        for path, method in (
            ("/workers/w0/heartbeat", "POST"),
            ("/workers/w0/drain", "POST"),
            ("/workers/w0", "DELETE"),
        ):
            answer = await tell(proxy, f"{path}?incarnation=life-1", {"incarnation": "life-1"}, method=method)
            assert (answer.status, answer.error["code"]) == (404, "not_found")
        assert proxy.states == {"w0": "ready"}


async def test_a_heartbeat_of_a_stranger_says_register_again() -> None:
    async with Scripted() as worker, proxying() as proxy:
        for path in ("heartbeat", "drain"):
            answer = await tell(proxy, f"/workers/h200-a/{path}", {"incarnation": "life-1"})
            assert (answer.status, answer.error["code"]) == (404, "not_found")
        await join(proxy, worker)
        for path in ("heartbeat", "drain"):
            answer = await tell(proxy, f"/workers/h200-a/{path}", {"incarnation": "life-2"})
            assert (answer.status, answer.error["code"]) == (409, "conflict")
            assert "register again" in answer.error["message"]
        answer = await tell(proxy, "/workers/h200-a?incarnation=life-2", b"", method="DELETE")
        assert answer.status == 409
        assert proxy.states == {"h200-a": "ready"}


async def test_a_worker_that_drains_finishes_what_it_has_and_gets_nothing_new() -> None:
    go = asyncio.Event()

    async def waits(exchange: Exchange) -> None:
        await go.wait()
        exchange.send(response(200, completion()))

    async with Scripted(play=waits) as one, Scripted() as two, proxying() as proxy:
        await join(proxy, one)
        running = await proxy.connect()
        running.send(request(chat()))
        await until(lambda: one.served == 1)
        await join(proxy, two, "h200-b")
        life = {"incarnation": "life-1"}
        drained = json.loads((await tell(proxy, "/workers/h200-a/drain", life)).body)
        assert (drained["state"], drained["inflight"]) == ("draining", 1)
        for place in range(6):
            answer = await proxy.ask(chat(f"conversation {place}"))
            assert (answer.status, answer.header("x-homing-worker")) == (200, "h200-b")
        assert json.loads((await tell(proxy, "/workers/h200-a/heartbeat", life)).body)["state"] == "draining"
        go.set()
        assert (await running.answer()).body == completion()
        running.close()
        drained = json.loads((await tell(proxy, "/workers/h200-a/drain", life)).body)
        assert (drained["state"], drained["inflight"]) == ("draining", 0)
        probes = len(one.probes)
        await until(lambda: len(one.probes) > probes)
        assert proxy.states["h200-a"] == "draining"  # a probe that gets through does not bring it back
        left = await tell(proxy, "/workers/h200-a?incarnation=life-1", b"", method="DELETE")
        assert (left.status, left.body) == (204, b"")
        assert proxy.states == {"h200-b": "ready"}
        assert (await tell(proxy, "/workers/h200-a?incarnation=life-1", b"", method="DELETE")).status == 404
        assert (await tell(proxy, "/workers/h200-a/heartbeat", life)).status == 404
        assert one.served == 1


async def test_a_worker_may_leave_under_running_requests() -> None:
    async with Scripted(play=hangs) as worker, proxying() as proxy:
        await join(proxy, worker)
        client = await proxy.connect()
        client.send(request(chat()))
        await until(lambda: worker.served == 1)
        assert (await tell(proxy, "/workers/h200-a?incarnation=life-1", b"", method="DELETE")).status == 204
        assert (await proxy.ask()).status == 503
        client.close()
        await until(lambda: not worker.busy)
        await until(lambda: sorted(map(str, proxy.results)) == ["client_gone", "refused"])


async def test_a_lease_that_is_not_prolonged_ends(monkeypatch) -> None:
    monkeypatch.setattr(membership, "LEASE_SECONDS", 0.6)
    monkeypatch.setattr(store, "LEASE_SECONDS", 0.6)
    monkeypatch.setattr(store, "SYNC_SECONDS", 0.05)
    async with Scripted() as worker, proxying() as proxy:
        await join(proxy, worker)
        for _ in range(8):  # longer than the lease, in all
            await asyncio.sleep(0.1)
            assert (await tell(proxy, "/workers/h200-a/heartbeat", {"incarnation": "life-1"})).status == 200
        assert proxy.states == {"h200-a": "ready"}
        with redis.Redis.from_url(store_url()) as stored:
            await until(lambda: proxy.states == {} and not stored.exists(store.worker_key("h200-a")))
        answer = await proxy.ask()
        assert (answer.status, answer.error["code"], answer.header("retry-after")) == (503, "no_worker", "1")
        assert (await tell(proxy, "/workers/h200-a/heartbeat", {"incarnation": "life-1"})).status == 404
        await join(proxy, worker)
        assert (await proxy.ask()).status == 200


async def test_updates_that_cannot_be_read_leave_the_entry_as_it_was() -> None:
    async with Scripted() as worker, proxying() as proxy:
        await join(proxy, worker)
        before = json.loads((await proxy.call("GET", "/workers/h200-a")).body)
        for wrong in ({"url": ""}, {"url": "nowhere"}, {"url": "http://169.254.169.254"}, {"engine": {"models": 5}}):
            assert (await tell(proxy, "/workers", card(worker, incarnation="life-9") | wrong)).status in (400, 403)
        after = json.loads((await proxy.call("GET", "/workers/h200-a")).body)
        assert (after["url"], after["incarnation"], after["state"]) == (before["url"], "life-1", "ready")
        assert (await proxy.ask()).status == 200


async def view(proxy: Proxy, worker_id: str) -> int:
    """The tokens that a worker is believed to hold."""
    told = json.loads((await proxy.call("GET", f"/workers/{worker_id}")).body)
    return int(told["view"]["tokens"])


async def test_another_incarnation_starts_with_an_empty_view() -> None:
    async with Scripted() as worker, proxying() as proxy:
        await join(proxy, worker)
        long = "background of the matter " * 60
        await proxy.ask(chat(long))
        assert await view(proxy, "h200-a") > 0
        assert (await tell(proxy, "/workers", card(worker))).status == 200  # again, and harmless
        assert await view(proxy, "h200-a") > 0
        assert proxy.states == {"h200-a": "ready"}
        await join(proxy, worker, incarnation="life-2")
        assert await view(proxy, "h200-a") == 0
        answer = await proxy.ask(chat(long, "Hello", "go on"))
        assert answer.header("x-homing-expected-tokens") == "0"


async def test_a_static_worker_is_named_by_its_engines_start_and_emptied_by_a_restart() -> None:
    async with Scripted() as worker, fleet.proxying(worker) as proxy:
        told = json.loads((await proxy.call("GET", "/workers/w0")).body)
        assert (told["source"], told["state"], told["incarnation"]) == ("static", "ready", "1700000000.000")
        assert (told["engine"]["version"], told["engine"]["block_size"]) == ("0.32.0", 16)
        assert told["engine"]["capacity_tokens"] == 16 * 4096
        long = "background of the matter " * 60
        await proxy.ask(chat(long))
        again = await proxy.ask(chat(long, "Hello", "go on"))
        assert int(again.header("x-homing-expected-tokens") or "0") > 0
        worker.started += 50
        await until(lambda: proxy.homing.registry.get("w0").incarnation == "1700000050.000")
        await proxy.ready("w0")
        assert await view(proxy, "w0") == 0
        after = await proxy.ask(chat(long, "Hello", "go on", "Hello", "more"))
        assert (after.status, after.header("x-homing-expected-tokens")) == (200, "0")


async def test_a_static_worker_that_dies_is_left_and_comes_back() -> None:
    async with Scripted() as one, Scripted() as two, fleet.proxying(one, two) as proxy:
        await one.refuse()
        await proxy.ready("w1")
        assert proxy.states == {"w0": "suspect", "w1": "ready"}
        for place in range(6):
            answer = await proxy.ask(chat(f"conversation {place}"))
            assert (answer.status, answer.header("x-homing-worker")) == (200, "w1")
            assert answer.header("x-homing-attempts") == "1"
        await one.open()
        await proxy.ready("w0", "w1")
        for place in range(20):
            await proxy.ask(chat(f"new conversation {place}"))
        assert one.served > 0


async def test_a_static_worker_that_is_not_there_yet_joins_when_it_is() -> None:
    async with Scripted() as worker:
        await worker.refuse()
        async with fleet.proxying(worker) as proxy:
            await until(lambda: proxy.states == {"w0": "joining"})
            await worker.open()
            await proxy.ready("w0")
            assert (await proxy.ask()).status == 200


async def test_one_silent_probe_is_lateness_and_several_are_not(monkeypatch) -> None:
    async def silent(exchange: Exchange) -> None:
        await exchange.hang()

    async with Scripted() as one, Scripted() as two, fleet.proxying(one, two) as proxy:
        proxy.homing.client.timeout = 0.1
        one.probe = silent
        before = len(one.probes)
        await until(lambda: len(one.probes) > before)
        assert proxy.states["w0"] == "ready"
        await until(lambda: proxy.states["w0"] == "suspect")
        assert len(one.probes) >= before + 3
        assert proxy.states["w1"] == "ready"
        one.probe = None
        await proxy.ready("w0", "w1")


async def test_probes_that_answer_nonsense_disturb_nobody() -> None:
    nonsense = [
        b"HTTP/1.1 500 Oops\r\ncontent-length: 0\r\n\r\n",
        response(200, b"<html>"),
        response(200, b"[]"),
        response(200, b'{"data": 5}'),
        response(200, b'{"data": [{"id": 7}, null, "x"]}'),
        response(200, b"\xff\xfe", [("content-type", "application/json; charset=nonsense")]),
        b"garbage\r\n\r\n",
        response(200, b"vllm:num_requests_running NaN\nvllm:num_requests_waiting {broken\n"),
    ]
    async with Scripted() as one, Scripted() as two, fleet.proxying(one, two) as proxy:
        for data in nonsense:

            async def says(exchange: Exchange, data: bytes = data) -> None:
                exchange.send(data)
                exchange.close()

            one.probe = says
            before = len(one.probes)
            await until(lambda before=before: len(one.probes) > before + 1)
            assert proxy.states["w1"] == "ready"
            assert (await proxy.ask()).status == 200
        one.probe = None
        await proxy.ready("w0", "w1")


async def test_probes_ask_no_proxy_of_the_environment(monkeypatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{listener.getsockname()[1]}")
        async with Scripted(play=adapts) as worker, fleet.proxying(worker) as proxy:
            assert (await proxy.ask()).status == 200
        with pytest.raises(BlockingIOError):
            listener.accept()
