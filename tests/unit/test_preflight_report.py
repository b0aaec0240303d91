"""`homing-worker check`: its text, its JSON and its exit codes."""

import json

import pytest

from tests.support.situations import GPTQ, HYBRID
from workers.agent.preflight import RULES, Finding, Severity, choose_exit_code
from workers.cli import app

PARSERS = ["--reasoning-parser", "qwen3", "--enable-auto-tool-choice", "--tool-call-parser", "qwen3_coder"]


@pytest.fixture
def model(tmp_path):
    def make(**fields) -> str:
        (tmp_path / "config.json").write_text(json.dumps(HYBRID | fields))
        return str(tmp_path)

    return make


@pytest.fixture
def vllm(tmp_path, monkeypatch):
    """A `vllm` on the path whose environment names its version."""
    (tmp_path / "env" / "lib" / "python3.12" / "site-packages" / "vllm-0.32.0.dist-info").mkdir(parents=True)
    (tmp_path / "env" / "bin").mkdir()
    program = tmp_path / "env" / "bin" / "vllm"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))


def check(capsys, *arguments: str) -> tuple[int, str, str]:
    code = app(["check", *arguments], prog_name="homing-worker", standalone_mode=False)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.usefixtures("vllm")
def test_a_line_that_can_work_is_clean(capsys, model):
    code, out, _ = check(capsys, "--model", model(), "--as", "H200 SXM", "--", *PARSERS)
    assert code == 0
    assert "weights 50.1 GiB" in out
    assert "tokens in blocks of 784" in out
    assert out.endswith(f"{len(RULES)} rules: 0 error, 0 warning\n")


def test_an_error_exits_with_1_and_names_rule_and_ways_out(capsys, model):
    half = model(dtype="float16", quantization_config=GPTQ)
    code, out, _ = check(capsys, "--model", half, "--as", "H200 NVL", "--", *PARSERS, "--kv-cache-dtype", "fp8")
    assert code == 1
    assert "error hopper-float16-fp8-cache: on Hopper (compute capability 9.0)" in out
    assert "  - keep the FP8 cache and compute in bfloat16: --dtype bfloat16\n" in out
    assert "  - keep the model as it is, with an unquantized cache: --kv-cache-dtype auto\n" in out


@pytest.mark.usefixtures("vllm")
def test_a_warning_exits_with_4(capsys, model):
    code, out, _ = check(capsys, "--model", model(), "--as", "H200 SXM", "--", *PARSERS[2:])
    assert (code, "warning reasoning-parser-missing" in out) == (4, True)


@pytest.mark.usefixtures("vllm")
def test_a_model_that_is_not_here_exits_with_4_and_says_what_is_missing_once(capsys):
    code, out, _ = check(capsys, "--model", "own/absent", "--as", "H200 SXM")
    assert code == 4
    assert out.count("not checked, for want of the model's config.json") == 1
    assert "unknown hopper-float16-fp8-cache, " in out


def test_json_holds_the_command_the_findings_and_the_estimate(capsys, model):
    code, out, _ = check(
        capsys, "--model", model(), "--as", "H200 NVL", "--json", "--", *PARSERS, "--dtype=half", "--kv-cache-dtype=fp8"
    )
    body = json.loads(out)
    assert code == 1
    assert body["command"][:2] == ["vllm", "serve"]
    assert body["findings"][0]["rule"] == "hopper-float16-fp8-cache"
    assert body["findings"][0]["severity"] == "error"
    assert body["findings"][0]["ways_out"][0] == {
        "description": "keep the FP8 cache and compute in bfloat16",
        "set_flags": {"--dtype": "bfloat16"},
        "remove_flags": [],
    }
    assert body["estimate"]["block_tokens"] == 1568


def test_json_has_no_estimate_for_a_model_that_is_not_here(capsys):
    assert json.loads(check(capsys, "--model", "own/absent", "--as", "B200", "--json")[1])["estimate"] is None


def test_a_machine_without_a_gpu_is_examined_as_far_as_it_goes(capsys, model):
    code, out, _ = check(capsys, "--model", model(), "--", *PARSERS, "--no-enable-prefix-caching")
    assert code == 1
    assert "error prefix-caching-off" in out


@pytest.mark.parametrize(
    "arguments", [["--as", "H900"], ["--profile", "none"], ["--recipe", "/nowhere.toml"], ["--", "--prot", "1"]]
)
def test_wrong_usage_exits_with_2_in_one_line(capsys, arguments):
    code, out, err = check(capsys, "--model", "m", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("homing-worker check: ")


@pytest.mark.parametrize(
    ("severities", "code"),
    [
        ([], 0),
        ([Severity.NOTE], 0),
        ([Severity.NOTE, Severity.UNKNOWN], 4),
        ([Severity.WARNING], 4),
        ([Severity.NOTE, Severity.WARNING, Severity.ERROR], 1),
    ],
)
def test_the_exit_code_is_that_of_the_worst(severities, code):
    assert choose_exit_code(tuple(Finding("rule", severity, "") for severity in severities)) == code
