"""A membership against a proxy on a real socket: kept through everything that passes, given up at a no."""

import asyncio
import contextlib
from dataclasses import replace

import pytest

from tests.support.agent_fakes import TOKEN, FakeProxy, Reply, refuse, until
from workers.agent.membership import Membership, MembershipRefused, Registration

pytestmark = pytest.mark.anyio

REGISTRATION = Registration(
    id="h200-a",
    url="http://10.0.0.7:8000",
    incarnation="3f6c0d5e9a1b",
    identity={"name": "H200 SXM", "source": "nvml"},
    engine={"version": "0.32.0", "models": [{"id": "tiny"}], "block_size": 32, "capacity_tokens": 262144},
)
BEAT = "POST /workers/h200-a/heartbeat"
REGISTER = "POST /workers"
DRAIN = "POST /workers/h200-a/drain"
REMOVE = "DELETE /workers/h200-a"


@contextlib.asynccontextmanager
async def member(proxy: FakeProxy, **changes: object):
    """Runs a membership for the length of the block, then stops it and expects a clean end."""
    stop = asyncio.Event()
    membership = Membership(proxy.url, TOKEN, REGISTRATION, **changes)
    running = asyncio.create_task(membership.run(stop))
    try:
        yield membership
        assert not running.done(), running
        stop.set()
        assert await asyncio.wait_for(running, 20) == 0
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.fixture
def lines(caplog):
    caplog.set_level("INFO", logger="workers.agent")
    return lambda: [record.getMessage() for record in caplog.records]


async def test_registers_beats_drains_and_removes_itself_in_that_order(lines) -> None:
    async with FakeProxy() as proxy:
        async with member(proxy):
            await until(lambda: proxy.count(BEAT) >= 3)
        first = proxy.calls[0]
        assert (str(first), first.token) == (REGISTER, f"Bearer {TOKEN}")
        assert first.body == {
            "id": "h200-a",
            "url": "http://10.0.0.7:8000",
            "incarnation": "3f6c0d5e9a1b",
            "identity": {"name": "H200 SXM", "source": "nvml"},
            "engine": {
                "version": "0.32.0",
                "models": [{"id": "tiny"}],
                "block_size": 32,
                "capacity_tokens": 262144,
            },
        }
        assert proxy.count(REGISTER) == 1
        assert all(c.body == {"incarnation": "3f6c0d5e9a1b"} for c in proxy.calls if str(c) in {BEAT, DRAIN})
        assert [str(call) for call in proxy.calls if str(call) != BEAT] == [REGISTER, DRAIN, REMOVE]
        assert proxy.held == {}
        assert lines() == [
            f"registered as h200-a at {proxy.url}; 1 model (tiny), block 32, 262,144 tokens of cache, GPU H200 SXM",
            "h200-a is ready",
            "draining h200-a",
            f"h200-a has left {proxy.url}",
        ]


@pytest.mark.parametrize("held", [{}, {"h200-a": "another life"}], ids=["404", "409"])
async def test_registers_again_when_the_proxy_does_not_know_this_life(held) -> None:
    async with FakeProxy() as proxy, member(proxy):
        await until(lambda: proxy.count(BEAT) >= 1)
        proxy.held = dict(held)
        await until(lambda: proxy.held == {"h200-a": "3f6c0d5e9a1b"})
        assert proxy.count(REGISTER) == 2


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (
            refuse(401, "The join token is wrong."),
            "set HOMING_JOIN_TOKEN to the value the proxy was started with",
        ),
        (refuse(403, "No join token is set."), "start it with HOMING_JOIN_TOKEN set"),
        (refuse(409, "h200-a lives\nelsewhere."), "pass another --id, or stop that worker first"),
        (refuse(400, "url lies in no allowed network"), "400: url lies in no allowed network"),
        (Reply(404, {"detail": "Not Found"}), "does not answer as a Homing proxy"),
        (Reply(307, headers={"location": "http://127.0.0.1:9/"}), "does not answer as a Homing proxy"),
        (Reply(200, "hello"), "which is no lease"),
    ],
    ids=lambda value: str(value.status) if isinstance(value, Reply) else "",
)
async def test_never_asks_again_after_a_no(reply, said) -> None:
    async with FakeProxy() as proxy:
        proxy.forced = lambda call: reply
        membership = Membership(proxy.url, TOKEN, REGISTRATION)
        with pytest.raises(MembershipRefused) as refused:
            await asyncio.wait_for(membership.run(asyncio.Event()), 20)
        assert said in str(refused.value)
        assert "\n" not in str(refused.value)
        assert [str(call) for call in proxy.calls] == [REGISTER]


async def test_ends_when_a_heartbeat_finds_the_token_wrong() -> None:
    async with FakeProxy() as proxy:
        running = asyncio.create_task(Membership(proxy.url, TOKEN, REGISTRATION).run(asyncio.Event()))
        await until(lambda: proxy.count(BEAT) >= 1)
        proxy.token = "changed"
        with pytest.raises(MembershipRefused, match="HOMING_JOIN_TOKEN"):
            await asyncio.wait_for(running, 20)


@pytest.mark.parametrize("token", ["", "två", "a\nb"])
async def test_refuses_a_token_that_no_header_can_carry(token) -> None:
    async with FakeProxy() as proxy:
        with pytest.raises(MembershipRefused, match="printable ASCII"):
            await Membership(proxy.url, token, REGISTRATION).run(asyncio.Event())
        assert proxy.calls == []


async def test_waits_for_a_proxy_that_is_away_and_says_so_once(lines) -> None:
    proxy = FakeProxy()
    await proxy.open()
    await proxy.close()
    async with member(proxy):
        await until(lambda: len(lines()) == 1)
        assert lines()[0].startswith(f"the proxy at {proxy.url} cannot be reached")
        await proxy.open()
        await until(lambda: proxy.count(BEAT) >= 1)
        before = proxy.count(BEAT)
        proxy.forced = lambda call: refuse(503, "starting")
        await until(lambda: proxy.count(BEAT) >= before + 3)
        proxy.forced = lambda call: None
        await until(lambda: "answers again" in lines()[-1])
        assert [line.removeprefix(f"the proxy at {proxy.url} ") for line in lines() if "proxy at" in line] == [
            lines()[0].removeprefix(f"the proxy at {proxy.url} "),
            "answers again",
            "cannot answer now (503: starting); trying again until it answers",
            "answers again",
        ]
        assert proxy.count(REGISTER) == 1
    await proxy.close()


@pytest.mark.parametrize("status", [500, 503, 429, 422, 0], ids=["500", "503", "429", "422", "silence"])
async def test_beats_on_after_a_beat_that_failed(status) -> None:
    async with FakeProxy(heartbeat_seconds=0.2, lease_seconds=1.5) as proxy, member(proxy):
        await until(lambda: proxy.count(BEAT) >= 1)
        proxy.forced = lambda call: refuse(status) if status else Reply(0)
        failed = proxy.count(BEAT)
        await until(lambda: proxy.count(BEAT) >= failed + 3)
        proxy.forced = lambda call: None
        await until(lambda: proxy.count(BEAT) >= failed + 5)
        assert proxy.count(REGISTER) == 1


async def test_waits_for_the_requests_in_flight_and_beats_meanwhile() -> None:
    async with FakeProxy(heartbeat_seconds=0.3) as proxy:
        proxy.inflight = [3, 3, 2, 1, 0]
        async with member(proxy):
            await until(lambda: proxy.count(BEAT) >= 1)
        tail = [str(call) for call in proxy.calls]
        tail = tail[tail.index(DRAIN) :]
        assert [line for line in tail if line != BEAT] == [DRAIN] * 5 + [REMOVE]
        assert BEAT in tail


async def test_leaves_after_the_drain_deadline_all_the_same(lines) -> None:
    async with FakeProxy() as proxy:
        proxy.inflight = [7]
        async with member(proxy, drain_seconds=0.5):
            await until(lambda: proxy.count(BEAT) >= 1)
        assert proxy.held == {}
        assert "h200-a still has 7 in flight after 0.5 s; leaving all the same" in lines()


async def test_neither_registers_again_nor_removes_what_vanished_during_the_drain() -> None:
    async with FakeProxy() as proxy:
        async with member(proxy):
            await until(lambda: proxy.count(BEAT) >= 1)
            proxy.forced = lambda call: refuse(404) if str(call) == DRAIN else None
        assert (proxy.count(REGISTER), proxy.count(DRAIN), proxy.count(REMOVE)) == (1, 1, 0)


async def test_ends_although_the_proxy_is_gone(lines) -> None:
    proxy = FakeProxy()
    await proxy.open()
    async with member(proxy):
        await until(lambda: proxy.count(BEAT) >= 1)
        await proxy.close()
    assert lines()[-1].endswith("the lease of h200-a runs out on its own")


async def test_registers_the_new_life_and_none_in_between() -> None:
    async with FakeProxy() as proxy, member(proxy) as membership:
        await until(lambda: proxy.count(BEAT) >= 1)
        await membership.leave()
        await until(lambda: proxy.held == {})
        assert str(proxy.calls[-1]) == REMOVE
        quiet = len(proxy.calls)
        await asyncio.sleep(proxy.heartbeat_seconds * 4)
        assert len(proxy.calls) == quiet
        await membership.renew(replace(REGISTRATION, incarnation="next"))
        await until(lambda: proxy.held == {"h200-a": "next"})
        beats = proxy.count(BEAT)
        await until(lambda: proxy.count(BEAT) > beats)
        assert proxy.calls[-1].body == {"incarnation": "next"}
        await membership.renew(replace(REGISTRATION, incarnation="third"))
        await until(lambda: proxy.held == {"h200-a": "third"})


async def test_shows_itself_for_people() -> None:
    membership = Membership("http://proxy:8080/", TOKEN, REGISTRATION)
    assert repr(membership) == "<Membership of h200-a life 3f6c0d5e9a1b at http://proxy:8080, not joined>"
