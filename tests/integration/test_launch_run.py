"""`homing-worker run` as a process: a scripted engine on one side, a proxy on real sockets on the other."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.support.agent_fakes import TOKEN, FakeEngine, FakeProxy, refuse, until
from tests.support.scripted_engine import ENGINE, every_process, free_port, is_alive, read_starts
from workers.cli import main

pytestmark = pytest.mark.anyio

HOPPER = [
    "INFO 11-30 12:00:09 [gpu_model_runner.py:5040] Starting to load model /models/x...",
    "INFO 11-30 12:00:11 [flash_attn.py:1118] Using FlashAttention version 3",
    "(EngineCore_DP0 pid=9) ERROR RuntimeError: For FP16/BF16 input, output must have the same dtype as inputs. For FP8 input, output must have dtype BF16",
    "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
]
DIES_ON_HOPPER = {"log": HOPPER, "exit": 1}


class Launched:
    """A running command, what it printed so far, and what its engine wrote down at each start."""

    def __init__(self, process: asyncio.subprocess.Process, script: Path, port: int) -> None:
        self.process = process
        self.port = port
        self.log = script.with_name("engine.log")
        self.out: list[str] = []
        self.err: list[str] = []
        self._script = script
        self._readers = [
            asyncio.create_task(self._read(process.stdout, self.out)),
            asyncio.create_task(self._read(process.stderr, self.err)),
        ]

    async def _read(self, stream: asyncio.StreamReader, lines: list[str]) -> None:
        async for line in stream:
            lines.append(line.decode().rstrip("\n").removeprefix("homing-worker run: "))

    @property
    def starts(self) -> list[dict]:
        return read_starts(self._script)

    def phases(self) -> list[str]:
        return [line.partition(" (after")[0] for line in self.out if " (after " in line]

    async def end(self) -> int:
        code = await asyncio.wait_for(self.process.wait(), 30)
        await asyncio.gather(*self._readers)
        return code


@contextlib.asynccontextmanager
async def launch(folder: Path, lives: list[dict], *arguments: str, port: int | None = None):
    script = folder / "script.json"
    script.write_text(json.dumps({"lives": lives}))
    port = port or free_port()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "workers", "run", "--model", "tiny", "--port", str(port), "--no-preflight",
        "--engine-command", f"{sys.executable} {ENGINE} {script}", "--log", str(folder / "engine.log"), *arguments,
        env={**os.environ, "HOMING_JOIN_TOKEN": TOKEN}, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    launched = Launched(process, script, port)
    try:
        yield launched
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await launched.end()
        await until(lambda: not any(map(is_alive, every_process(launched.starts))))


def joining(proxy: FakeProxy) -> list[str]:
    return ["--proxy", proxy.url, "--id", "h200-a"]


async def test_starts_joins_with_its_recipe_drains_and_ends_the_engine(tmp_path) -> None:
    log = [
        *HOPPER[:2],
        "Starting torch.compile",
        "Capturing CUDA graphs (decode, FULL): 1%\rx",
        "Graph capturing finished",
    ]
    async with FakeProxy() as proxy, launch(tmp_path, [{"log": log, "child": True}], *joining(proxy)) as run:
        proxy.inflight = [2, 1, 0]
        await until(lambda: proxy.count("POST /workers/h200-a/heartbeat") >= 2)
        assert run.phases() == [
            "launching", "loading weights", "compiling", "capturing graphs", "warming", "ready",
        ]  # fmt: skip
        body = proxy.calls[0].body
        assert body["url"] == f"http://127.0.0.1:{run.port}"
        recipe = body["identity"]["recipe"]
        assert body["identity"]["tensor_parallel_size"] == 1
        assert recipe["model"] == "tiny"
        assert recipe["applied_fix"] is None
        assert {"argv": ["--port", str(run.port)], "source": "homing-worker run"} in recipe["flags"]
        assert {flag["source"] for flag in recipe["flags"]} >= {"base"}
        [start] = run.starts
        assert start["argv"] == ["--model", "tiny", *(word for flag in recipe["flags"] for word in flag["argv"])]
        run.process.send_signal(signal.SIGTERM)
        await until(lambda: proxy.count("POST /workers/h200-a/drain") >= 2)
        assert is_alive(start["pid"])
        assert await run.end() == 0
        assert [call.method for call in proxy.calls[-2:]] == ["POST", "DELETE"]
        assert proxy.count("POST /workers/h200-a/drain") == 3
        assert not any(map(is_alive, every_process(run.starts)))
        assert run.err == []
        assert run.log.read_text().startswith(log[0])


async def test_the_hopper_failure_is_explained_and_ends_the_command(tmp_path) -> None:
    async with FakeProxy() as proxy, launch(tmp_path, [DIES_ON_HOPPER], *joining(proxy)) as run:
        assert await run.end() == 1
        assert proxy.calls == []
    assert run.err[0] == (
        "the engine ended with exit code 1: a float16 model cannot run with an FP8 KV cache on Hopper "
        "(rule hopper-fp8-float16)"
    )
    assert [line.split(" (")[0].strip() for line in run.err[3:5]] == [
        "way out 1: with --dtype bfloat16",
        "way out 2: with --kv-cache-dtype auto",
    ]
    assert run.err[-1] == "  --apply-fix starts once more with --dtype bfloat16"
    assert len(run.starts) == 1


async def test_apply_fix_starts_once_more_and_records_it(tmp_path) -> None:
    lives = [DIES_ON_HOPPER, {}]
    flags = ["--", "--kv-cache-dtype", "fp8"]
    async with FakeProxy() as proxy, launch(tmp_path, lives, *joining(proxy), "--apply-fix", *flags) as run:
        await until(lambda: proxy.held)
        recipe = proxy.calls[0].body["identity"]["recipe"]
        assert recipe["applied_fix"] == {
            "rule": "hopper-fp8-float16",
            "description": "compute in bfloat16 and keep the FP8 cache",
            "set_flags": {"--dtype": "bfloat16"},
            "remove_flags": [],
        }
        assert {"argv": ["--dtype", "bfloat16"], "source": "fix hopper-fp8-float16"} in recipe["flags"]
        assert ["--dtype" in start["argv"] for start in run.starts] == [False, True]
        assert all("fp8" in start["argv"] for start in run.starts)
        assert "starting once more with --dtype bfloat16" in run.out


async def test_an_error_in_preflight_keeps_the_engine_from_starting(tmp_path) -> None:
    arguments = ["--preflight", "--", "--no-enable-prefix-caching"]
    async with FakeProxy() as proxy, launch(tmp_path, [{}], *joining(proxy), *arguments) as run:
        assert await run.end() == 1
        assert proxy.calls == []
    assert run.starts == []
    assert run.err[0].startswith("preflight: prefix caching is switched off")
    assert run.err[0].endswith("(rule prefix-caching-off)")
    assert run.err[-1] == "  nothing was started; --no-preflight starts it all the same"


async def test_a_killed_engine_is_started_again_as_a_new_life(tmp_path) -> None:
    async with FakeProxy() as proxy, launch(tmp_path, [{"child": True}], *joining(proxy)) as run:
        await until(lambda: proxy.held)
        first = dict(proxy.held)
        os.kill(run.starts[0]["pid"], signal.SIGKILL)
        await until(lambda: any(call.method == "DELETE" for call in proxy.calls))
        await until(lambda: proxy.held and proxy.held != first)
        assert len(run.starts) == 2
        assert not is_alive(run.starts[0]["child"])
        assert any(line.startswith("the engine was ended by SIGKILL") for line in run.out)
        assert "starting the engine again in 1 s" in run.out


async def test_no_process_outlives_an_agent_that_is_killed(tmp_path) -> None:
    async with launch(tmp_path, [{"child": True, "ignore_sigterm": False}]) as run:
        await until(lambda: "ready" in run.phases())
        assert all(map(is_alive, every_process(run.starts)))
        assert len(every_process(run.starts)) == 2
        run.process.kill()
        await run.end()
        await until(lambda: not any(map(is_alive, every_process(run.starts))))


async def test_a_signal_while_it_starts_ends_the_engine(tmp_path) -> None:
    async with FakeProxy() as proxy, launch(tmp_path, [{"serve": False}], *joining(proxy)) as run:
        await until(lambda: run.starts)
        run.process.send_signal(signal.SIGTERM)
        assert await run.end() == 0
        assert proxy.calls == []
        assert not is_alive(run.starts[0]["pid"])


async def test_a_second_signal_ends_everything_at_once(tmp_path) -> None:
    life = {"ignore_sigterm": True, "child": True}
    async with FakeProxy() as proxy, launch(tmp_path, [life], *joining(proxy)) as run:
        proxy.inflight = [5]
        await until(lambda: proxy.held)
        run.process.send_signal(signal.SIGTERM)
        await until(lambda: proxy.count("POST /workers/h200-a/drain") >= 1)
        run.process.send_signal(signal.SIGTERM)
        assert await run.end() == 128 + signal.SIGTERM
        await until(lambda: not any(map(is_alive, every_process(run.starts))), seconds=5)


async def test_a_proxy_that_says_no_ends_the_engine_too(tmp_path) -> None:
    async with FakeProxy() as proxy:
        proxy.forced = lambda call: refuse(401, "The join token is wrong.")
        async with launch(tmp_path, [{}], *joining(proxy)) as run:
            assert await run.end() == 1
            assert not is_alive(run.starts[0]["pid"])
    assert len(run.err) == 1
    assert run.err[0].endswith("set HOMING_JOIN_TOKEN to the value the proxy was started with")


async def test_attach_joins_an_engine_that_runs_already(tmp_path) -> None:
    async with (
        FakeProxy() as proxy,
        FakeEngine() as engine,
        launch(tmp_path, [{}], *joining(proxy), "--attach", engine.url) as run,
    ):
        await until(lambda: proxy.held)
        assert proxy.calls[0].body["url"] == engine.url
        run.process.send_signal(signal.SIGTERM)
        assert await run.end() == 0
    assert run.starts == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--", "--enable-prefix-caxhing"], "--enable-prefix-caxhing is not a flag"),
        (["--profile", "nope"], "has no profile 'nope'"),
        (["--engine-command", "no-such-program"], "--engine-command 'no-such-program' names no program"),
        (["--", "--port", "1"], "pass it as homing-worker's own --port 1"),
        (["--attach", "http://127.0.0.1:1"], "--attach joins a running engine to a proxy: pass --proxy too"),
        (["--proxy", "http://10.0.0.1:8080"], "pass --advertise with the address"),
        (["--proxy", "http://127.0.0.1:8080"], "no join token"),
    ],
    ids=["flag", "profile", "program", "port", "attach", "advertise", "token"],
)
def test_a_value_that_cannot_work_is_one_line_and_exit_code_2(arguments, said, monkeypatch, capsys) -> None:
    monkeypatch.delenv("HOMING_JOIN_TOKEN", raising=False)
    monkeypatch.setattr(
        sys, "argv", ["homing-worker", "run", "--model", "tiny", "--engine-command", "true", *arguments]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said_all = capsys.readouterr()
    assert said_all.out == ""
    assert said_all.err.count("\n") == 1
    assert said_all.err.startswith("homing-worker run: ")
    assert said in said_all.err
