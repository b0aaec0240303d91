"""The control plane: who may see what, health, the exporter; one shape for every error, one list of open routes."""

import asyncio
import functools
import json

import pytest
from fastapi.routing import APIRoute

from tests.support import fleet
from tests.support.clients import ask, chat, request
from tests.support.fleet import LOOP
from tests.support.scripted import Scripted, answers, completion, until

pytestmark = pytest.mark.anyio
KEY = "key-of-the-operator"
BEARER = [("authorization", f"Bearer {KEY}")]


@pytest.fixture
def anyio_backend():
    return LOOP


@pytest.fixture(params=fleet.WAYS)
def proxying(request):
    return functools.partial(fleet.proxying, way=request.param)


async def test_health_tells_life_from_readiness(proxying) -> None:
    async with Scripted() as worker:
        await worker.refuse()
        async with proxying(worker) as proxy:
            alive = await proxy.call("GET", "/livez")
            assert (alive.status, json.loads(alive.body)) == (200, {"status": "ok"})
            for path in ("/readyz", "/health"):
                answer = await proxy.call("GET", path)
                told = json.loads(answer.body)
                assert (answer.status, answer.header("retry-after"), told["ready"]) == (503, "1", False)
                assert "no worker is ready" in told["reasons"][0]
            await worker.open()
            await proxy.ready("w0")
            for path in ("/readyz", "/health"):
                answer = await proxy.call("GET", path)
                assert answer.status == 200
                assert json.loads(answer.body) == {"ready": True, "reasons": [], "workers_ready": 1, "store": "ok"}


async def test_the_fleet_is_shown_to_the_operator_alone(proxying) -> None:
    async with Scripted() as worker, proxying(worker, admin_key=KEY, join_token="another") as proxy:
        for headers in ([], [("authorization", "Bearer another")], [("authorization", f"Bearer {KEY}x")]):
            for path in ("/workers", "/workers/w0"):
                answer = await proxy.call("GET", path, headers=headers)
                assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
        told = json.loads((await proxy.call("GET", "/workers", headers=BEARER)).body)
        assert [worker["id"] for worker in told["workers"]] == ["w0"]
        one = json.loads((await proxy.call("GET", "/workers/w0", headers=BEARER)).body)
        assert (one["url"], one["state"], one["inflight"]) == (worker.url, "ready", 0)
        missing = await proxy.call("GET", "/workers/nobody", headers=BEARER)
        assert (missing.status, missing.error["code"]) == (404, "not_found")
        # The operator's key opens no registration, and serves as nobody's key to the engine.
        assert (await proxy.call("POST", "/workers", b"{}", BEARER)).status == 401
        await proxy.ask(headers=BEARER)
        assert KEY.encode() not in worker.heard[0].raw


# What anybody may call. A new route belongs here or behind a key.
OPEN = {"/livez", "/readyz", "/health", "/metrics", "/version", "/v1/models", "/v1/models/{model:path}"}


async def test_every_other_route_asks_for_a_key(proxying) -> None:
    async with proxying(admin_key=KEY, join_token="another") as proxy:
        admin = proxy.homing.application._app._rest
        routes = [route for route in admin.routes if isinstance(route, APIRoute)]
        assert len(routes) == len(admin.routes)
        for route in routes:
            path = route.path.replace("{worker_id}", "w0").replace("{model:path}", "m1")
            for method in route.methods:
                answer = await proxy.call(method, path)
                if route.path in OPEN:
                    assert answer.status in (200, 404, 503), path
                else:
                    assert (answer.status, answer.error["type"]) == (401, "authentication_error"), path
        for path in ("/docs", "/redoc", "/openapi.json", "/debug", "/env", "/logs"):
            assert (await proxy.call("GET", path)).status == 404


async def test_a_wrong_method_or_path_has_the_shape_of_every_error(proxying) -> None:
    async with proxying() as proxy:
        for method, path in (("POST", "/livez"), ("PUT", "/metrics"), ("DELETE", "/v1/models"), ("PUT", "/workers")):
            answer = await proxy.call(method, path)
            assert (answer.status, answer.error["code"]) == (405, "method_not_allowed")
            assert answer.header("allow")
        for path in ("/nope", "/v2/models", "/workers/a/b/c", "//", "/%2e%2e/etc/passwd"):
            answer = await proxy.call("GET", path)
            assert (answer.status, answer.error["code"]) == (404, "not_found"), path


async def test_what_is_no_http_ends_without_harm(proxying) -> None:
    async with Scripted() as worker, proxying(worker) as proxy:
        for data in (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"GET\r\n\r\n", b"POST / HTTP/9.9\r\n\r\n"):
            client = await proxy.connect()
            client.send(data)
            await until(lambda client=client: client.closed is not None)
            assert client.received == b"" or client.response.status == 400
        over_long = await ask(proxy.port, request(b"", "/v1/models", [("x-long", "y" * 30_000)], "GET"))
        assert over_long.status in (200, 400, 431)
        assert (await proxy.ask()).status == 200


async def test_the_exporter_counts_what_happened_and_labels_are_bounded(proxying) -> None:
    async with Scripted() as worker, proxying(worker) as proxy:
        worker.play = answers(completion(prompt=100, cached=64))
        await proxy.ask(chat("one"))
        worker.play = answers(completion(prompt=50, cached=None))
        await proxy.ask(chat("two"))
        worker.play = answers(b'{"error": {}}', 400)
        await proxy.ask(chat("three"))
        assert await proxy.value("homing_requests_total", model="m1", result="ok") == 2
        assert await proxy.value("homing_requests_total", model="m1", result="client_error") == 1
        assert await proxy.value("homing_delivered_hit_tokens_total", model="m1") == 64
        assert await proxy.value("homing_delivered_coverage_total", coverage="known") == 1
        assert await proxy.value("homing_delivered_coverage_total", coverage="unknown") == 1
        assert await proxy.value("homing_prompt_tokens_total", coverage="known") == 100
        assert await proxy.value("homing_attempts_total") == 3
        lines = len((await proxy.call("GET", "/metrics")).body.splitlines())
        asked = (
            proxy.ask(chat(model=f'junk-{place}"\n\\'), headers=[("x-request-id", f"id-{place}"), ("user", str(place))])
            for place in range(200)
        )
        assert {answer.status for answer in await asyncio.gather(*asked)} == {404}
        await asyncio.gather(*(proxy.call("GET", f"/path-{place}") for place in range(50)))
        page = (await proxy.call("GET", "/metrics")).body
        assert len(page.splitlines()) - lines < 20
        assert b"junk" not in page
        assert await proxy.value("homing_requests_total", model="other", result="client_error") == 200
        assert await proxy.value("homing_requests_total", model="other", result="ok") is None
