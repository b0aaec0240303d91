"""Real vLLM workers on this machine's CPU, one core each, on loopback ports.

What the settings rest on (vLLM 0.32.0): its console script does not start when the package is the CPU rebuild, so
the API module is run; the CPU attention takes block sizes in multiples of 32; start-up is some 30 s of imports
in three processes one after the other, twice that on a busy machine.
"""

import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.support.vllm.process import Child

HERE = Path(__file__).resolve().parent
MODEL = "tiny"
BLOCK_TOKENS = 32
CONTEXT_TOKENS = 65536
# 256 bytes of keys and values per token of the tiny model: room for a million tokens, so a run evicts nothing.
KV_BYTES = 256 * 1024 * 1024
READY_SECONDS = 300.0
ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_TARGET_DEVICE": "cpu",  # cannot be told from the rebuild's package name
}
HITS = re.compile(r"^vllm:prefix_cache_hits_total\{[^}]*\} (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Engine:
    """A vLLM worker that answers at `url`."""

    url: str
    child: Child

    def read_hit_tokens(self) -> int:
        """Returns the prompt tokens that the engine says it took from its prefix cache since its start."""
        text = httpx.get(f"{self.url}/metrics", timeout=30).raise_for_status().text
        return sum(int(float(value)) for value in HITS.findall(text))


def find_python() -> str:
    """Returns the python of a venv that holds vLLM: VLLM_PYTHON, else setup.sh's (installed if need be)."""
    given = os.environ.get("VLLM_PYTHON")
    if given:
        return given
    done = subprocess.run([HERE / "setup.sh"], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.splitlines()[-1]


def make_model(python: str, folder: Path) -> Path:
    """Returns a fresh folder under `folder` with the tiny model."""
    model = folder / "model"
    subprocess.run([python, HERE / "tiny_model.py", model], check=True)
    return model


def free_port() -> int:
    """Returns a loopback port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def run_engines(python: str, model: Path, folder: Path, count: int = 2) -> Iterator[Sequence[Engine]]:
    """Starts `count` workers at once, yields them when all are ready, and stops them on the way out."""
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        engines = []
        for number in range(count):
            engine = start_engine(python, model, cores[number % len(cores)], folder / f"vllm-{number}.log")
            stack.enter_context(engine.child)
            engines.append(engine)
        deadline = time.monotonic() + READY_SECONDS
        for engine in engines:
            engine.child.wait_until(lambda url=engine.url: answers(f"{url}/health"), deadline)
        yield engines


def start_engine(python: str, model: Path, core: int, log: Path) -> Engine:
    """Starts one worker bound to `core`; it is ready when `/health` answers 200."""
    port = free_port()
    command = [python, "-m", "vllm.entrypoints.openai.api_server"]
    command += [
        "--model",
        str(model),
        "--served-model-name",
        MODEL,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    command += ["--dtype", "bfloat16", "--enforce-eager", "--max-model-len", str(CONTEXT_TOKENS)]
    command += ["--max-num-seqs", "8", "--max-num-batched-tokens", "2048"]
    command += ["--block-size", str(BLOCK_TOKENS), "--kv-cache-memory-bytes", str(KV_BYTES)]
    command += ["--enable-prefix-caching", "--enable-prompt-tokens-details", "--enable-request-id-headers"]
    child = Child(log.stem, command, log, {**ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND": str(core)})
    return Engine(url=f"http://127.0.0.1:{port}", child=child)


def answers(url: str) -> bool:
    """Tells whether a GET of `url` is answered with 200."""
    try:
        return httpx.get(url, timeout=5).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False
