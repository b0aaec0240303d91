"""How one list of vLLM's flags is read, and what is said of a flag that vLLM would reject."""

import pytest

from workers.agent.recipe import BadFlag, CommandLine
from workers.agent.recipe.catalogue import NAMES, VERSION, resolve
from workers.agent.recipe.flags import merge, parse


def read(*tokens: str) -> list[str]:
    """What a list comes out as."""
    return [token for flag in parse(tokens, "test") for token in flag.tokens]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (["--dtype", "bfloat16"], ["--dtype", "bfloat16"]),
        (["--dtype=bfloat16"], ["--dtype", "bfloat16"]),
        (["--kv_cache_dtype", "fp8"], ["--kv-cache-dtype", "fp8"]),
        (["-tp", "2"], ["--tensor-parallel-size", "2"]),
        (["-tp=2"], ["--tensor-parallel-size", "2"]),
        (["-O3"], ["--optimization-level", "3"]),
        (["-O=3"], ["--optimization-level", "3"]),
        (["-O", "3"], ["--optimization-level", "3"]),
        (["-qawq"], ["--quantization", "awq"]),
        (["--gpu-mem", "0.9"], ["--gpu-memory-utilization", "0.9"]),
        (["--device-memory-utilization", "0.9"], ["--gpu-memory-utilization", "0.9"]),
        (["--max-model-len", "-1"], ["--max-model-len=-1"]),
        (["--served-model-name", "a", "b", "--port", "1"], ["--served-model-name", "a", "b", "--port", "1"]),
        (["--hf-token"], ["--hf-token"]),
        (["--hf-token", "t"], ["--hf-token", "t"]),
        (["--no-enable-prefix-caching"], ["--no-enable-prefix-caching"]),
        (["--enable-prefix-caching", "--no-enable-prefix-caching"], ["--no-enable-prefix-caching"]),
        (["--no-enforce-eager", "--enforce-eager"], ["--enforce-eager"]),
        (["--dtype", "half", "--port", "1", "--dtype=auto"], ["--dtype", "auto", "--port", "1"]),
        (["--middleware", "a", "--middleware=b", "--middleware", "a"], ["--middleware", "a", "--middleware", "b"]),
        (
            ["--kv-events-config", '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}'],
            ["--kv-events-config", '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}'],
        ),
        (["--compilation-config.mode", "3"], ["--compilation-config", '{"mode": 3}']),
        (
            ["-cc.mode=3", "-cc.pass_config.fuse", "true"],
            ["--compilation-config", '{"mode": 3, "pass_config": {"fuse": true}}'],
        ),
        (["--additional-config.names+", "a,b"], ["--additional-config", '{"names": ["a", "b"]}']),
        (["--chat-template", "-a b-"], ["--chat-template=-a b-"]),
    ],
)
def test_flags_are_read_as_vllm_reads_them(given, meant):
    assert read(*given) == meant


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ["--kv-cache-dtpe", "fp8"],
            "--kv-cache-dtpe is not a flag of vllm serve 0.32.0; did you mean --kv-cache-dtype?",
        ),
        (["--enable-prefix-cachin-g"], "did you mean --enable-prefix-caching?"),
        (["--zzzzzzzz"], "--zzzzzzzz is not a flag of vllm serve 0.32.0; see `vllm serve --help=all`"),
        (["--no-dtype"], "--no-dtype is not a flag"),
        (["--no-headless"], "--no-headless is not a flag"),
        (["--enable-prefix-caching=true"], "--enable-prefix-caching takes no value, 'true' was given"),
        (["--enable-prefix-caching", "true"], "'true' belongs to no flag"),
        (["--dtype"], "--dtype needs a value"),
        (["--dtype", "--port", "1"], "--dtype needs a value"),
        (["--served-model-name", "--port", "1"], "--served-model-name needs at least one value"),
        (["--served-model-name=a", "b"], "'b' belongs to no flag"),
        (["--max-num-b", "1"], None),
        (["--max-num", "1"], "--max-num could be --max-num-active-seqs or"),
        (["some/model"], "'some/model' belongs to no flag"),
        (["--model", "x"], "the model is named by homing-worker's own --model"),
    ],
)
def test_what_vllm_would_reject_is_named(given, said):
    if said is None:
        assert read(*given) == ["--max-num-batched-tokens", "1"]
        return
    with pytest.raises(BadFlag) as refused:
        parse(given, "test")
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_object_replaces_dotted_keys_of_an_earlier_list():
    below = parse(["--compilation-config.mode", "3"], "base")
    (flag,) = merge([below, parse(["--compilation-config", '{"level": 1}'], "yours")])
    assert (flag.values, flag.source) == (('{"level": 1}',), "yours")


def test_a_line_is_amended_by_a_way_out():
    line = CommandLine("m", parse(["--dtype", "half", "--spec-tokens", "3", "--no-enable-prefix-caching"], "base"))
    amended = line.amend({"--dtype": "bfloat16", "--enable-prefix-caching": None}, ("--spec-tokens",), "fix")
    assert amended.argv == ["vllm", "serve", "m", "--dtype", "bfloat16", "--enable-prefix-caching"]
    assert [flag.source for flag in amended.flags] == ["fix", "fix"]
    assert line.value("--dtype") == "half"


def test_a_line_answers_for_its_flags():
    line = CommandLine("m", parse(["--dtype", "half", "--enforce-eager", "--hf-overrides", '{"a": 1}'], "base"))
    assert (line.value("--dtype"), line.value("--port")) == ("half", None)
    assert (line.is_on("--enforce-eager"), line.is_on("--async-scheduling")) == (True, None)
    assert (line.read_object("--hf-overrides"), line.read_object("--dtype")) == ({"a": 1}, {})


def test_the_list_of_flags_is_one_version_of_vllm_whole():
    assert VERSION == "0.32.0"
    assert len({name.flag for name in NAMES.values()}) == 315
    assert resolve("--no-enable-prefix-caching").on is False
    assert {resolve(name) for name in NAMES} == set(NAMES.values())
