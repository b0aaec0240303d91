"""Start-up phases told from log lines as vLLM writes them."""

import re

import pytest

from workers.agent.launch.phases import PHASES, Phase, PhaseClock
from workers.agent.launch.progress import LiveProgress

GPU_START = [
    ("INFO 11-30 12:00:01 [core.py:134] Initializing a V1 LLM engine (v0.32.0) with config: model='x'", None),
    ("INFO 11-30 12:00:09 [gpu_model_runner.py:5040] Starting to load model /models/x...", "loading weights"),
    ("Loading safetensors checkpoint shards:  50% Completed | 5/10 [00:20<00:20,  4.1s/it]", None),
    ("INFO [gpu_model_runner.py:5150] Model loading took 50.2 GiB memory and 41.100000 seconds", None),
    ("INFO [backends.py:1105] Using cache directory: /cache/x for vLLM's torch.compile", "compiling"),
    ("INFO [backends.py:1167] Dynamo bytecode transform time: 12.10 s", None),
    ("INFO [gpu_worker.py:760] Available KV cache memory: 61.2 GiB", None),
    ("Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):   4%|▍ | 3/67", "capturing graphs"),
    ("Capturing CUDA graphs (decode, FULL): 100%", None),
    ("INFO [gpu_model_runner.py:6582] Graph capturing finished in 11 secs, took 1.02 GiB", "warming"),
    ("INFO [core.py:397] init engine (profile, create kv cache, warmup model) took 60.01 s", None),
    ("INFO [backends.py:1167] Dynamo bytecode transform time: 1.00 s", None),
]
CPU_START = [
    ("INFO [cpu_model_runner.py:68] Starting to load model /models/x...", "loading weights"),
    ("INFO [cpu_model_runner.py:87] Warming up model for the compilation...", "compiling"),
    ("INFO [cpu_model_runner.py:91] Warming up done.", None),
    ("INFO [entry.py:140] Starting vLLM server on http://127.0.0.1:8000", "warming"),
]


@pytest.mark.parametrize("start", [GPU_START, CPU_START], ids=["gpu", "cpu"])
def test_phases_come_in_order_and_never_back(start) -> None:
    clock = PhaseClock(0.0)
    assert clock.current.name == "launching"
    for line, expected in start:
        phase = clock.hear(line, 1.0)
        assert (None if phase is None else phase.name) == expected, line
    assert clock.current.name == "warming"


def test_each_phase_has_its_own_clock() -> None:
    first = Phase("first", None, 10.0)
    second = Phase("second", re.compile("second"), 5.0)
    endless = Phase("endless", re.compile("endless"), None)
    clock = PhaseClock(100.0, [first, second, endless])
    assert (clock.overdue(110.0), clock.overdue(110.1)) == (False, True)
    clock.hear("second", 109.0)
    assert (clock.overdue(114.0), clock.overdue(114.1)) == (False, True)
    clock.hear("endless", 114.0)
    assert not clock.overdue(1e9)


def test_the_table_names_the_phases_a_person_sees() -> None:
    assert [phase.name for phase in PHASES] == [
        "launching",
        "loading weights",
        "compiling",
        "capturing graphs",
        "warming",
    ]


def test_the_live_display_leaves_each_finished_phase_with_its_time(capsys) -> None:
    progress = LiveProgress()
    progress.enter("launching", 0.0)
    progress.hear("INFO [core.py] a line with [brackets] in it")
    progress.enter("loading weights", 31.0)
    progress.enter("ready", 93.0)
    progress.close()
    shown = [line.strip() for line in capsys.readouterr().out.splitlines() if "✓" in line]
    assert shown == ["✓ launching 31 s", "✓ loading weights 62 s", "✓ ready after 93 s"]
