"""The supervisor over a scripted engine: limits, restarts and frozen engines, with the proxy's part played by a list."""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import sys

import pytest

from tests.support.agent_fakes import until
from tests.support.scripted_engine import ENGINE, every_process, free_port, is_alive, read_starts
from workers.agent.engine import open_engine
from workers.agent.launch.life import StartFailed
from workers.agent.launch.phases import Phase
from workers.agent.launch.supervisor import LaunchPlan, Supervisor
from workers.agent.recipe import HostFacts, build

pytestmark = pytest.mark.anyio

QUICK = (
    Phase("launching", None, 10.0),
    Phase("loading weights", re.compile("Starting to load model"), 0.2),
    Phase("compiling", re.compile(r"Starting torch\.compile"), None),
)


class Place:
    """Stands for the membership: what the supervisor asked of it, in order."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def leave(self) -> None:
        self.asked.append("leave")

    async def come_back(self) -> None:
        self.asked.append("come back")


class Rig:
    def __init__(self, folder, lives, **settings) -> None:
        script = folder / "script.json"
        script.write_text(json.dumps({"lives": lives}))
        self._script = script
        self.port = free_port()
        self.plan = LaunchPlan(
            program=[sys.executable, str(ENGINE), str(script)],
            line=build("tiny", None, HostFacts("Linux"), extra=["--port", str(self.port)]),
            profile=None,
            port=self.port,
            log=folder / "engine.log",
            **{"first_pause_seconds": 0.05, "freeze_poll_seconds": 0.05, "stop_seconds": 0.5, **settings},
        )
        self.place = Place()
        self.stop = asyncio.Event()

    @property
    def starts(self) -> list[dict]:
        return read_starts(self._script)

    @contextlib.asynccontextmanager
    async def supervised(self):
        async with open_engine(f"http://127.0.0.1:{self.port}") as engine:
            supervisor = Supervisor(self.plan, engine)
            try:
                yield supervisor
            finally:
                await supervisor.stop()

    @contextlib.asynccontextmanager
    async def kept(self):
        async with self.supervised() as supervisor:
            await supervisor.start()
            keeping = asyncio.create_task(supervisor.keep(self.place, self.stop))
            try:
                yield supervisor
            finally:
                keeping.cancel()
                await asyncio.gather(keeping, return_exceptions=True)


async def test_a_phase_over_its_limit_ends_the_start(tmp_path) -> None:
    rig = Rig(tmp_path, [{"log": ["Starting to load model x..."], "serve": False}], phases=QUICK)
    async with rig.supervised() as supervisor:
        with pytest.raises(StartFailed, match=r"spent more than 0\.2 s in the phase 'loading weights'"):
            await supervisor.start()
        assert not is_alive(rig.starts[0]["pid"])


async def test_a_later_phase_is_not_held_to_an_earlier_limit(tmp_path) -> None:
    log = ["Starting to load model x...", "Starting torch.compile", [0.5, "done"]]
    rig = Rig(tmp_path, [{"log": log}], phases=QUICK)
    async with rig.supervised() as supervisor:
        assert (await supervisor.start()).cache.block_size == 32


async def test_the_whole_start_has_a_limit_too(tmp_path) -> None:
    rig = Rig(tmp_path, [{"log": ["still here"], "serve": False}], start_seconds=0.3)
    async with rig.supervised() as supervisor:
        with pytest.raises(StartFailed, match=r"was not ready after 0\.3 s, in the phase 'launching'"):
            await supervisor.start()


async def test_a_log_that_shows_the_cause_explains_a_hang(tmp_path) -> None:
    log = ["ValueError: No available memory for the cache blocks. Try increasing"]
    rig = Rig(tmp_path, [{"log": log, "serve": False}], start_seconds=0.5)
    async with rig.supervised() as supervisor:
        with pytest.raises(StartFailed, match="rule no-memory-for-cache"):
            await supervisor.start()


HOPPER = "RuntimeError: For FP16/BF16 input, output must have the same dtype as inputs. For FP8 input, output must have dtype BF16"


async def test_apply_fix_starts_once_more_and_not_twice(tmp_path) -> None:
    rig = Rig(tmp_path, [{"log": [HOPPER], "exit": 1}], apply_fix=True)
    async with rig.supervised() as supervisor:
        with pytest.raises(StartFailed, match="rule hopper-fp8-float16") as failed:
            await supervisor.start()
    assert ["--dtype" in start["argv"] for start in rig.starts] == [False, True]
    assert "--apply-fix" not in str(failed.value).splitlines()[-1]


async def test_a_way_out_for_a_person_is_never_taken(tmp_path) -> None:
    life = {"log": ["ValueError: Please pass the argument `trust_remote_code=True` to allow custom code"], "exit": 1}
    rig = Rig(tmp_path, [life], apply_fix=True)
    async with rig.supervised() as supervisor:
        with pytest.raises(StartFailed, match="rule trust-remote-code"):
            await supervisor.start()
    assert len(rig.starts) == 1


async def test_an_unknown_failure_shows_the_end_of_the_log(tmp_path) -> None:
    life = {"log": [*(f"line {n}" for n in range(60)), "RuntimeError: nobody has seen this before"], "exit": 7}
    rig = Rig(tmp_path, [life], apply_fix=True)
    async with rig.supervised() as supervisor:
        with pytest.raises(StartFailed) as failed:
            await supervisor.start()
    head, *tail, last = str(failed.value).splitlines()
    assert head.startswith("the engine ended with exit code 7, for no reason that is known by rule")
    assert tail == [*(f"  | line {n}" for n in range(36, 60)), "  | RuntimeError: nobody has seen this before"]
    assert last == f"  whole log: {rig.plan.log}"


async def test_a_port_that_is_taken_is_said_before_anything_starts(tmp_path) -> None:
    rig = Rig(tmp_path, [{}])
    with socket.socket() as other:
        other.bind(("127.0.0.1", rig.port))
        other.listen()
        async with rig.supervised() as supervisor:
            with pytest.raises(StartFailed, match=f"port {rig.port} is taken"):
                await supervisor.start()
    assert rig.starts == []


async def test_a_port_that_the_engine_finds_taken_is_known_by_rule(tmp_path) -> None:
    rig = Rig(tmp_path, [{"log": ["OSError: [Errno 98] Address already in use"], "exit": 1}], apply_fix=True)
    async with rig.supervised() as supervisor:
        with pytest.raises(StartFailed, match="rule port-in-use"):
            await supervisor.start()
    assert len(rig.starts) == 1


async def test_the_fix_that_is_in_the_line_already_is_passed_over(tmp_path) -> None:
    life = {"log": ["ValueError: No available memory for the cache blocks."], "exit": 1}
    rig = Rig(tmp_path, [life], apply_fix=True)
    line = rig.plan.line.amend({"--gpu-memory-utilization": "0.95"}, (), "test")
    rig.plan = LaunchPlan(rig.plan.program, line, None, rig.port, rig.plan.log, apply_fix=True)
    async with rig.supervised() as supervisor:
        with pytest.raises(StartFailed, match="rule no-memory-for-cache"):
            await supervisor.start()
    assert len(rig.starts) == 1


async def test_an_engine_that_keeps_failing_after_a_crash_is_tried_again_and_again(tmp_path, caplog) -> None:
    caplog.set_level("INFO", logger="workers.agent")
    dies = {"log": ["torch.OutOfMemoryError: CUDA out of memory."], "exit": 1}
    rig = Rig(tmp_path, [{}, dies, dies, {}])
    async with rig.kept():
        os.kill(rig.starts[0]["pid"], signal.SIGKILL)
        await until(lambda: len(rig.starts) == 4 and caplog.messages[-1].startswith("ready"))
        pauses = [float(text.split()[-2]) for text in caplog.messages if text.startswith("starting the engine again")]
        assert pauses == [0.05, 0.1, 0.2]
        assert rig.place.asked == ["leave"]
        assert sum("rule weights-out-of-memory" in text for text in caplog.messages) == 2


async def test_an_engine_that_ends_while_the_worker_leaves_stays_down(tmp_path) -> None:
    rig = Rig(tmp_path, [{}])
    async with rig.supervised() as supervisor:
        await supervisor.start()
        rig.stop.set()
        os.kill(rig.starts[0]["pid"], signal.SIGKILL)
        await supervisor.keep(rig.place, rig.stop)
    assert rig.place.asked == []
    assert len(rig.starts) == 1


async def test_a_stopped_process_takes_the_worker_out_until_it_goes_on(tmp_path, caplog) -> None:
    rig = Rig(tmp_path, [{"child": True}])
    async with rig.kept():
        child = rig.starts[0]["child"]
        os.kill(child, signal.SIGSTOP)
        await until(lambda: rig.place.asked == ["leave"])
        assert f"the engine is frozen: its process {child} is stopped" in caplog.text
        os.kill(child, signal.SIGCONT)
        await until(lambda: rig.place.asked == ["leave", "come back"])
        assert len(rig.starts) == 1


async def test_an_engine_that_is_stopped_can_still_end_by_itself(tmp_path) -> None:
    rig = Rig(tmp_path, [{"child": True}], stop_seconds=60.0)
    async with rig.supervised() as supervisor:
        await supervisor.start()
        os.kill(rig.starts[0]["pid"], signal.SIGSTOP)
        async with asyncio.timeout(20):
            await supervisor.stop()
    assert not any(map(is_alive, every_process(rig.starts)))


async def test_an_engine_that_computes_nothing_for_its_requests_is_started_again(tmp_path, caplog) -> None:
    rig = Rig(tmp_path, [{"running": 2.0}, {}], stall_seconds=0.3)
    async with rig.kept():
        await until(lambda: len(rig.starts) == 2)
        assert rig.place.asked[0] == "leave"
        assert "the engine is frozen: it holds requests and has computed nothing for" in caplog.text


async def test_an_engine_that_ignores_sigterm_is_killed_with_all_it_started(tmp_path) -> None:
    rig = Rig(tmp_path, [{"ignore_sigterm": True, "child": True}])
    async with rig.supervised() as supervisor:
        await supervisor.start()
        await supervisor.stop()
    assert not any(map(is_alive, every_process(rig.starts)))


async def test_each_start_begins_a_log_and_keeps_the_one_before(tmp_path) -> None:
    rig = Rig(tmp_path, [{"log": ["first"]}, {"log": ["second"]}])
    async with rig.kept():
        os.kill(rig.starts[0]["pid"], signal.SIGKILL)
        await until(lambda: len(rig.starts) == 2 and "second" in rig.plan.log.read_text())
    assert (tmp_path / "engine.log.1").read_text().startswith("first\n")
