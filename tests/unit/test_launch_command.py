"""Which program starts an engine, and with which words."""

import sys

import pytest

from workers.agent.launch.command import NoProgram, compose_argv, find_program
from workers.agent.recipe import HostFacts, build

MODULE = ["-m", "vllm.entrypoints.openai.api_server"]


def put_vllm(folder, first_line: str) -> str:
    script = folder / "vllm"
    script.write_text(f"{first_line}\n")
    script.chmod(0o755)
    return str(script)


def put_python(folder, code: int) -> str:
    python = folder / "python"
    python.write_text(f"#!/bin/sh\nexit {code}\n")
    python.chmod(0o755)
    return str(python)


@pytest.mark.parametrize(("code", "serves"), [(0, True), (1, False)], ids=["metadata", "no metadata"])
def test_vllm_without_metadata_is_started_by_its_module(tmp_path, monkeypatch, code, serves) -> None:
    python = put_python(tmp_path, code)
    script = put_vllm(tmp_path, f"#!{python}")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_program(None) == ([script, "serve"] if serves else [python, *MODULE])


def test_a_vllm_that_is_no_python_script_is_taken_as_it_is(tmp_path, monkeypatch) -> None:
    script = put_vllm(tmp_path, "#!/usr/bin/env something")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_program(None) == [script, "serve"]


def test_no_vllm_is_said_with_what_to_do(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoProgram, match="--engine-command"):
        find_program(None)


@pytest.mark.parametrize("command", ["", "'open", "no-such-program --x"])
def test_an_engine_command_that_cannot_run_is_refused(command) -> None:
    with pytest.raises(NoProgram, match="--engine-command"):
        find_program(command)


def test_only_serve_takes_the_model_without_a_flag() -> None:
    line = build("org/x", None, HostFacts("Linux"), extra=["--dtype", "half"])
    assert compose_argv(["vllm", "serve"], line)[:3] == ["vllm", "serve", "org/x"]
    module = find_program(f"{sys.executable} {' '.join(MODULE)}")
    assert compose_argv(module, line)[:5] == [sys.executable, *MODULE, "--model", "org/x"]
    assert compose_argv(module, line)[-2:] == ["--dtype", "half"]
