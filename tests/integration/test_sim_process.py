"""`homing-worker sim` as a process: its line, its exit codes, its signals, its place in a fleet."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from dataclasses import replace

import httpx
import pytest

from tests.support.agent_fakes import TOKEN, FakeProxy, refuse, until
from workers.sim.options import SimOptions
from workers.sim.serve import run

pytestmark = pytest.mark.anyio

OPTIONS = SimOptions(listen="127.0.0.1:0", identity="H200", model="tiny")

LONG_ANSWER = {
    "messages": [{"role": "user", "content": "go on"}],
    "max_tokens": 5000,
    "ignore_eos": True,
    "stream": True,
}


class Sim:
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

    @property
    def url(self) -> str:
        return next(word for word in self.out[0].split() if word.startswith("http://"))

    async def end(self) -> int:
        code = await asyncio.wait_for(self.process.wait(), 30)
        await asyncio.gather(*self._readers)
        return code


@contextlib.asynccontextmanager
async def sim(*arguments: str, identity: str = "H200"):
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "workers", "sim", "--listen", "127.0.0.1:0", "--identity", identity, "--model", "tiny",
        *arguments,
        env={**os.environ, "HOMING_JOIN_TOKEN": TOKEN}, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    running = Sim(process)
    try:
        yield running
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await running.end()


async def test_one_line_says_what_is_served_and_a_signal_ends_it() -> None:
    async with sim("--time-scale", "20") as running:
        await until(lambda: running.out)
        assert running.out == [
            f"homing-worker sim: H200 SXM serving tiny at {running.url} (block 784 tokens, 1,209,244 tokens of cache, 20x time)"
        ]
        running.process.send_signal(signal.SIGINT)
        assert await running.end() == 0
        assert running.err == []


async def test_without_a_proxy_a_signal_aborts_what_is_in_flight() -> None:
    async with sim() as running:
        await until(lambda: running.out)
        async with (
            httpx.AsyncClient(base_url=running.url, timeout=20) as client,
            client.stream("POST", "/v1/chat/completions", json=LONG_ANSWER) as response,
        ):
            lines = response.aiter_lines()
            await anext(lines)
            running.process.terminate()
            rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason":"abort"' in rest[-2]
        assert await running.end() == 0
        assert running.err == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"identity": "H300"}, "identity 'H300' is not known to the simulator; use one of: H100 SXM, "),
        ({"time_scale": 0.0}, "--time-scale 0 must be a number above 0"),
        ({"max_model_len": 9999999}, "--max-model-len 9999999 does not fit into the cache of 1208928 tokens"),
        ({"capacity_tokens": 100}, "--capacity-tokens 100 is less than one block of 784 tokens"),
        ({"block_size": 0}, "--block-size 0 must be at least 1"),
        ({"model": ""}, "--model is empty"),
        ({"listen": "8101"}, "--listen '8101' is not HOST:PORT"),
        ({"listen": "0.0.0.0:0", "proxy": "http://127.0.0.1:9"}, "say with --advertise URL"),
    ],
)
def test_options_that_cannot_be_served(changes: dict, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(replace(OPTIONS, **changes)) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert said.err.startswith("homing-worker sim: ")
    assert words in said.err


def test_an_address_in_use_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert run(replace(OPTIONS, listen=address)) == 1
    assert capsys.readouterr().err == (
        f"homing-worker sim: cannot listen on {address}: Address already in use; choose another --listen\n"
    )


async def test_a_member_registers_what_it_is_and_drains_while_it_serves() -> None:
    async with FakeProxy() as proxy, sim("--proxy", proxy.url, identity="RTX 5090") as running:
        await until(lambda: any("heartbeat" in call.path for call in proxy.calls))
        port = running.url.rpartition(":")[2]
        name = f"geforce-rtx-5090-{port}"
        assert list(proxy.held) == [name]
        offered = next(call.body for call in proxy.calls if call.path == "/workers")
        assert offered["url"] == running.url
        assert offered["identity"]["name"] == "GeForce RTX 5090"
        assert offered["identity"]["source"] == "declared"
        assert offered["engine"]["block_size"] == 784
        assert offered["engine"]["models"][0]["id"] == "tiny"
        async with httpx.AsyncClient(base_url=running.url, timeout=20) as client:
            page = (await client.get("/metrics")).text
            created = next(line for line in page.splitlines() if line.startswith("vllm:prompt_tokens_created{"))
            assert offered["incarnation"] == f"{int(float(created.split()[-1]) * 1000):x}"
            proxy.inflight = [1]
            running.process.terminate()
            await until(lambda: proxy.count(f"POST /workers/{name}/drain") > 1)
            short = {"messages": [{"role": "user", "content": "still there?"}], "max_tokens": 2}
            assert (await client.post("/v1/chat/completions", json=short)).status_code == 200
        proxy.inflight = [0]
        assert await running.end() == 0
        assert proxy.held == {}
        assert running.err == []


async def test_a_second_signal_ends_a_drain() -> None:
    async with FakeProxy() as proxy, sim("--proxy", proxy.url, "--id", "h200-a") as running:
        proxy.inflight = [1]
        await until(lambda: proxy.held)
        await until(lambda: any("registered" in line for line in running.out))
        async with (
            httpx.AsyncClient(base_url=running.url, timeout=20) as client,
            client.stream("POST", "/v1/chat/completions", json=LONG_ANSWER) as response,
        ):
            await response.aiter_lines().__anext__()
            running.process.send_signal(signal.SIGINT)
            await until(lambda: proxy.count("POST /workers/h200-a/drain"))
            running.process.send_signal(signal.SIGINT)
            assert await running.end() == 130
        assert running.err == []


async def test_a_proxy_that_says_no_ends_it_with_its_reason() -> None:
    async with FakeProxy() as proxy:
        proxy.forced = lambda call: refuse(409, "h200-a is held by http://10.0.0.9:8000.")
        async with sim("--proxy", proxy.url, "--id", "h200-a") as running:
            assert await running.end() == 1
            assert len(running.err) == 1
            assert "h200-a is held by http://10.0.0.9:8000." in running.err[0]
