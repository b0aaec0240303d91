"""Who may register, from where, and with what: the token first, then the address, then the card."""

import functools
import json

import pytest

from tests.support import fleet
from tests.support.fleet import LOOP
from tests.support.registering import BEARER, TOKEN, card, join, tell
from tests.support.scripted import Scripted, until

pytestmark = pytest.mark.anyio
proxying = functools.partial(fleet.proxying, join_token=TOKEN)


@pytest.fixture
def anyio_backend():
    return LOOP


async def test_without_a_token_of_its_own_the_proxy_takes_nobody() -> None:
    async with Scripted() as worker, fleet.proxying() as proxy:
        for path, method in (
            ("/workers", "POST"),
            ("/workers/h200-a/heartbeat", "POST"),
            ("/workers/h200-a/drain", "POST"),
            ("/workers/h200-a?incarnation=life-1", "DELETE"),
        ):
            for headers in ([], BEARER):
                answer = await tell(proxy, path, card(worker), headers, method)
                assert (answer.status, answer.error["code"]) == (403, "forbidden")
                assert "HOMING_JOIN_TOKEN" in answer.error["message"]
        assert worker.lines == []


WRONG = [
    [],
    [("authorization", "Bearer wrong")],
    [("authorization", f"Bearer {TOKEN}x")],
    [("authorization", f"Bearer {TOKEN[:-1]}")],
    [("authorization", f"Basic {TOKEN}")],
    [("authorization", TOKEN)],
    [("authorization", "Bearer ")],
    [("authorization", "Bearer \xe9\xff")],
    [("x-api-key", TOKEN)],
]


async def test_without_the_right_token_no_address_is_called_and_nothing_is_read() -> None:
    async with Scripted() as worker, proxying() as proxy:
        for headers in WRONG:
            for path, method in (
                ("/workers", "POST"),
                ("/workers/h200-a/heartbeat", "POST"),
                ("/workers/h200-a/drain", "POST"),
                ("/workers/h200-a?incarnation=x", "DELETE"),
            ):
                for body in (card(worker), b"{not json"):
                    answer = await tell(proxy, path, body, headers, method)
                    assert (answer.status, answer.error["code"]) == (401, "invalid_api_key"), headers
                    assert TOKEN not in answer.error["message"]
        assert worker.lines == []
        assert proxy.states == {}


OUTSIDE = [
    "http://169.254.169.254",
    "http://169.254.169.254:80/",
    "http://[::ffff:169.254.169.254]:80",
    "http://[fe80::1]:80",
    "http://0.0.0.0:8000",
    "http://8.8.8.8:8000",
    "http://[::]:8000",
    "http://[::ffff:127.0.0.1]:8000",
    "http://2852039166",  # 169.254.169.254 as one number
]


NO_URLS = [
    "",
    "127.0.0.1:8000",
    "file:///etc/passwd",
    "ftp://127.0.0.1:8000",
    "unix:///run/x.sock",
    "http://",
    "http://:8000",
    "http://127.0.0.1:0",
    "http://127.0.0.1:99999",
    "http://127.0.0.1:port",
    "http://user@127.0.0.1:8000",
    "http://user:word@127.0.0.1:8000",
    "http://@127.0.0.1:8000",
    "http://127.0.0.1:8000/v1",
    "http://127.0.0.1:8000?x=1",
    "http://127.0.0.1:8000?",
    "http://127.0.0.1:8000#x",
    "http://127.0.0.1 :8000",
    "http://127.0.0.1:8000\r\nx: y",
    "http://[::1",
    "http://" + "a" * 70 + ".invalid:80",
    "http://a..b:80",
    "http://no-such-host.invalid:80",
    "http://" + "a" * 3000,
]


async def test_addresses_outside_the_allowed_networks_are_refused() -> None:
    async with Scripted() as worker, proxying() as proxy:
        for url in OUTSIDE:
            answer = await tell(proxy, "/workers", card(worker, url=url))
            assert (answer.status, answer.error["code"], answer.error["param"]) == (403, "forbidden", "url"), url
            assert "--worker-network" in answer.error["message"]
        assert proxy.states == {}
        await join(proxy, worker)
    async with Scripted() as worker, proxying(worker_network="169.254.0.0/16,8.8.8.8/32") as proxy:
        assert (await tell(proxy, "/workers", card(worker, url="http://8.8.8.8:8000"))).status == 200


async def test_what_is_no_base_url_is_refused() -> None:
    async with Scripted() as worker, proxying() as proxy:
        for url in NO_URLS:
            answer = await tell(proxy, "/workers", card(worker, url=url))
            assert (answer.status, answer.error["param"]) == (400, "url"), url
        assert proxy.states == {}


BAD_CARDS = [
    {"id": ""},
    {"id": "a b"},
    {"id": "a/b"},
    {"id": "x" * 65},
    {"id": "a\n"},
    {"id": 7},
    {"id": None},
    {"url": None},
    {"incarnation": ""},
    {"incarnation": "x" * 129},
    {"incarnation": "a b"},
    {"incarnation": None},
    {"identity": None},
    {"identity": []},
    {"engine": "x"},
    {"engine": {"models": "m1"}},
    {"engine": {"models": ["m1"]}},
    {"engine": {"models": [{"name": "m1"}]}},
]


async def test_a_card_that_cannot_be_read_is_refused_with_the_field_named() -> None:
    async with Scripted() as worker, proxying() as proxy:
        for wrong in BAD_CARDS:
            answer = await tell(proxy, "/workers", card(worker) | wrong)
            (field,) = wrong
            assert answer.status == 400, wrong
            assert str(answer.error["param"]).startswith(field)
        for body in (b"", b"[]", b"{", b"\xff", b"null", b"[" * 100_000, b'{"id": "\\ud800"}'):
            answer = await tell(proxy, "/workers", body)
            assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")
        answer = await tell(proxy, "/workers", b" " * 1_100_000)
        assert answer.status in (400, 413)
        assert answer.error["type"] == "invalid_request_error"
        assert proxy.states == {}
        for path in ("/workers/h200-a/heartbeat", "/workers/h200-a/drain"):
            for body in (b"", b"{}", b'{"incarnation": 7}'):
                assert (await tell(proxy, path, body)).status == 400
        assert (await tell(proxy, "/workers/h200-a", b"", method="DELETE")).status == 400


async def test_odd_facts_of_a_worker_disturb_nobody() -> None:
    odd_engine = {"models": [{"id": "m1"}], "block_size": -3, "capacity_tokens": "many", "version": 5, "x": [None]}
    odd_identity = {"name": 7, "gpu_count": -1, "gpu_name": "<script>\u2028", "memory_bytes": 1e308, "more": {"a": [1]}}
    huge = {"name": "H200 SXM", "gpu_count": 10**400}
    async with Scripted() as worker, Scripted() as other, proxying() as proxy:
        assert (await tell(proxy, "/workers", card(worker, engine=odd_engine, identity=odd_identity))).status == 200
        assert (await tell(proxy, "/workers", card(other, "other", identity=huge))).status in (200, 400)
        await until(lambda: "ready" in proxy.states.values() and "joining" not in proxy.states.values())
        for _ in range(4):
            assert (await proxy.ask()).status == 200
        assert (await proxy.call("GET", "/workers")).status == 200
        body = json.dumps(card(worker)).replace('"gpu_count": 1', '"gpu_count": NaN').encode()
        assert (await tell(proxy, "/workers", body)).status in (200, 400)
        assert (await proxy.call("GET", "/workers")).status == 200
        assert (await proxy.ask()).status == 200
