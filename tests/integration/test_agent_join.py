"""`homing-worker join` as a process, between a proxy and an engine on real sockets."""

import asyncio
import contextlib
import os
import signal
import sys

import pytest

from tests.support.agent_fakes import TOKEN, FakeEngine, FakeProxy, until

pytestmark = pytest.mark.anyio

LIFE = f"{1796039019250:x}"


class Joined:
    """A running command and what it printed so far."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.out: list[str] = []
        self.err: list[str] = []
        self._readers = [
            asyncio.create_task(self._read(process.stdout, self.out)),
            asyncio.create_task(self._read(process.stderr, self.err)),
        ]

    async def _read(self, stream: asyncio.StreamReader, lines: list[str]) -> None:
        async for line in stream:
            lines.append(line.decode().rstrip("\n"))

    async def end(self) -> int:
        code = await asyncio.wait_for(self.process.wait(), 30)
        await asyncio.gather(*self._readers)
        return code


@contextlib.asynccontextmanager
async def join(*arguments: str, token: str | None = TOKEN):
    environment = {k: v for k, v in os.environ.items() if k != "HOMING_JOIN_TOKEN"}
    if token is not None:
        environment["HOMING_JOIN_TOKEN"] = token
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "workers", "join", *arguments,
        env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    joined = Joined(process)
    try:
        yield joined
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await joined.end()


def between(proxy: FakeProxy, engine: FakeEngine) -> list[str]:
    return ["--proxy", proxy.url, "--engine", engine.url, "--id", "h200-a"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_joins_and_at_a_signal_drains_removes_and_exits_0(number) -> None:
    async with FakeProxy() as proxy, FakeEngine() as engine, join(*between(proxy, engine)) as joined:
        proxy.inflight = [1, 0]
        await until(lambda: proxy.count("POST /workers/h200-a/heartbeat") >= 2)
        body = proxy.calls[0].body
        assert {key: body[key] for key in ("id", "url", "incarnation")} == {
            "id": "h200-a",
            "url": engine.url,
            "incarnation": LIFE,
        }
        assert body["engine"]["capacity_tokens"] == 262144
        assert body["identity"].keys() == {
            "name",
            "edition_note",
            "mig_profile",
            "tensor_parallel_size",
            "gpu_name",
            "gpu_count",
            "memory_bytes",
            "compute_capability",
            "driver_version",
            "cuda_version",
            "topology",
            "host_os",
            "source",
        }
        joined.process.send_signal(number)
        assert await joined.end() == 0
        assert [call.method for call in proxy.calls[-3:]] == ["POST", "POST", "DELETE"]
        assert proxy.held == {}
        assert joined.err == []
        assert joined.out[0].startswith(
            f"homing-worker join: registered as h200-a at {proxy.url}; "
            "1 model (tiny), block 32, 262,144 tokens of cache, GPU "
        )
        assert joined.out[-1] == f"homing-worker join: h200-a has left {proxy.url}"


async def test_a_second_signal_ends_it_at_once() -> None:
    async with FakeProxy() as proxy, FakeEngine() as engine, join(*between(proxy, engine)) as joined:
        proxy.inflight = [5]
        await until(lambda: proxy.held)
        joined.process.send_signal(signal.SIGINT)
        await until(lambda: proxy.count("POST /workers/h200-a/drain") >= 1)
        joined.process.send_signal(signal.SIGINT)
        assert await joined.end() == 130
        assert proxy.held == {"h200-a": LIFE}


async def test_a_wrong_token_is_one_line_and_no_second_try() -> None:
    async with FakeProxy() as proxy, FakeEngine() as engine:
        async with join(*between(proxy, engine), token="wrong") as joined:
            assert await joined.end() == 1
        assert len(proxy.calls) == 1
    assert joined.out == []
    assert len(joined.err) == 1
    assert joined.err[0].endswith("set HOMING_JOIN_TOKEN to the value the proxy was started with")


async def test_follows_the_engine_from_life_to_life() -> None:
    async with FakeProxy() as proxy, FakeEngine() as engine, join(*between(proxy, engine)) as joined:
        await until(lambda: proxy.held == {"h200-a": LIFE})
        await engine.close()
        await until(lambda: proxy.held == {})
        engine.started += 60
        engine.prefix_caching = False
        await engine.open()
        await until(lambda: proxy.held == {"h200-a": f"{1796039079250:x}"})
        joined.process.send_signal(signal.SIGTERM)
        assert await joined.end() == 0
        assert any("warning: prefix caching is off" in line for line in joined.out)


async def test_no_engine_is_one_line_and_exit_code_3() -> None:
    engine = FakeEngine()
    await engine.open()
    await engine.close()
    async with FakeProxy() as proxy:
        async with join(*between(proxy, engine), "--wait-seconds", "0") as joined:
            assert await joined.end() == 3
        assert proxy.calls == []
    assert [line.split(" after")[0] for line in joined.err] == [
        f"homing-worker join: no engine is ready at {engine.url}"
    ]


async def test_a_signal_ends_the_wait_for_the_engine() -> None:
    engine = FakeEngine()
    await engine.open()
    await engine.close()
    async with FakeProxy() as proxy, join(*between(proxy, engine)) as joined:
        await until(lambda: joined.out)
        joined.process.send_signal(signal.SIGTERM)
        assert await joined.end() == 0
        assert proxy.calls == []


async def test_takes_the_token_from_a_file(tmp_path) -> None:
    (tmp_path / "token").write_text(TOKEN + "\n")
    async with FakeProxy() as proxy, FakeEngine() as engine:
        arguments = [*between(proxy, engine), "--join-token-file", str(tmp_path / "token")]
        async with join(*arguments, token=None) as joined:
            await until(lambda: proxy.held)
            joined.process.send_signal(signal.SIGTERM)
            assert await joined.end() == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--proxy", "http://proxy:8080"], "homing-worker: Missing option '--engine'."),
        (["--nope"], "homing-worker: No such option: --nope"),
        (
            ["--proxy", "http://proxy:8080", "--engine", "http://127.0.0.1:8000"],
            "homing-worker join: the engine's address http://127.0.0.1:8000",
        ),
        (
            ["--proxy", "http://a", "--engine", "http://b", "--join-token-file", "/nowhere/token"],
            "homing-worker: Invalid value for --join-token-file: cannot read /nowhere/token",
        ),
    ],
    ids=["missing", "unknown", "loopback", "token file"],
)
async def test_a_wrong_command_line_is_one_line_and_exit_code_2(arguments, said) -> None:
    async with join(*arguments) as joined:
        assert await joined.end() == 2
    assert len(joined.err) == 1
    assert joined.err[0].startswith(said)
    assert joined.out == []
