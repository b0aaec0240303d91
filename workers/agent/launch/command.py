"""Which program an engine is started with: `vllm serve`, vLLM's API module, or what the owner says instead."""

import importlib.util
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from workers.agent.recipe import CommandLine

_API_MODULE = "vllm.entrypoints.openai.api_server"
_HAS_METADATA = "import importlib.metadata as m; m.version('vllm')"


class NoProgram(Exception):
    """There is no engine program to start; the message is one line."""


def find_program(engine_command: str | None) -> list[str]:
    """Returns the program and its first arguments, without the model; raises `NoProgram`.

    A vLLM that was installed under another name has no metadata, and then its `vllm serve` does not start.
    """
    if engine_command is not None:
        return _split_command(engine_command)
    script = shutil.which("vllm")
    if script is None:
        if importlib.util.find_spec("vllm") is None:
            raise NoProgram("no vLLM is found: install it, put its `vllm` on PATH, or name it with --engine-command")
        return [sys.executable, "-m", _API_MODULE]
    python = _read_interpreter(Path(script))
    if python is None or _has_metadata(python):
        return [script, "serve"]
    return [python, "-m", _API_MODULE]


def compose_argv(program: list[str], line: CommandLine) -> list[str]:
    """Puts program, model and flags together; only `serve` takes the model without a flag."""
    model = [line.model] if program[-1] == "serve" else ["--model", line.model]
    return [*program, *model, *line.tokens]


def _split_command(engine_command: str) -> list[str]:
    try:
        words = shlex.split(engine_command)
    except ValueError as error:
        raise NoProgram(f"--engine-command {engine_command!r} cannot be read ({error})") from None
    if not words or shutil.which(words[0]) is None:
        raise NoProgram(f"--engine-command {engine_command!r} names no program that can be run")
    return words


def _read_interpreter(script: Path) -> str | None:
    """Returns the interpreter in a script's first line, `None` for anything that is no such script."""
    with script.open("rb") as file:
        first = file.readline(4096)
    words = first.removeprefix(b"#!").decode(errors="replace").split()
    return words[0] if first.startswith(b"#!") and len(words) == 1 and Path(words[0]).is_file() else None


def _has_metadata(python: str) -> bool:
    done = subprocess.run([python, "-c", _HAS_METADATA], capture_output=True, check=False)  # noqa: S603
    return done.returncode == 0
