"""Recipe files: which lists apply to a machine and in which order, the shipped ones, and `recipe show`."""

import shlex

import pytest

from workers.agent.identity import Identity
from workers.agent.ledger import LEDGER
from workers.agent.recipe import BadFlag, BadRecipe, HostFacts, build, find_recipe, imagine_host, read_host
from workers.agent.recipe.book import SHIPPED, read_recipe
from workers.cli import app

GIB = 1024**3
MODEL = "Qwen/Qwen3.8-27B"

RECIPE = """
match = ["own-*"]
base = ["--dtype", "half", "--port", "1", "--seed", "1", "--block-size", "16", "--kv-cache-dtype", "fp8"]
[profile]
fast = ["--port", "2", "--seed", "2", "--block-size", "32", "--kv-cache-dtype", "auto"]
[os]
Linux = ["--seed", "3", "--block-size", "48", "--kv-cache-dtype", "fp8"]
[vram]
24 = ["--max-num-seqs", "4"]
80 = ["--block-size", "64", "--kv-cache-dtype", "fp8_e5m2"]
[capability]
"9.0" = ["--kv-cache-dtype", "bfloat16"]
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(RECIPE)
    return path


def host(gib: float | None = 79.6, capability: str | None = "9.0", os: str | None = "Linux") -> HostFacts:
    return HostFacts(os, 1, None if gib is None else int(gib * GIB), capability, "a card")


def sources(line) -> dict[str, tuple[str, str]]:
    return {flag.name: (flag.values[0], flag.source) for flag in line.flags}


def test_each_later_list_wins_over_the_earlier_and_yours_over_all(recipe):
    line = build("own-model", "fast", host(), recipe, ["--max-model-len", "1k", "--dtype", "auto"])
    assert sources(line) == {
        "--dtype": ("auto", "command line"),
        "--port": ("2", "profile fast"),
        "--seed": ("3", "os Linux"),
        "--block-size": ("64", "vram 80"),
        "--kv-cache-dtype": ("bfloat16", "capability 9.0"),
        "--max-model-len": ("1k", "command line"),
    }
    assert line.argv[:5] == ["vllm", "serve", "own-model", "--dtype", "auto"]


@pytest.mark.parametrize(
    ("gib", "tier"),
    [(None, None), (15.0, None), (22.2, None), (22.5, "24"), (23.99, "24"), (74.0, "24"), (79.6, "80"), (140.4, "80")],
)
def test_the_largest_tier_that_is_cleared_applies_alone(recipe, gib, tier):
    line = build("m", None, host(gib), recipe)
    tiers = {flag.source for flag in line.flags if flag.source.startswith("vram")}
    seqs = line.value("--max-num-seqs")
    assert (tiers <= {f"vram {tier}"}, seqs) == (True, "4" if tier == "24" else None)
    assert (line.value("--block-size") == "64") == (tier == "80")


def test_a_list_that_cannot_be_chosen_is_left_out_with_a_note(recipe):
    line = build("m", None, host(None, None, None), recipe)
    assert {flag.source for flag in line.flags} == {"base"}
    assert [note.split(" is left out")[0] for note in line.notes] == [
        "the list by VRAM tier",
        "the list by compute capability",
    ]
    assert build("m", None, host(), recipe).notes == ()


def test_another_capability_of_the_same_generation_takes_nothing(recipe):
    assert sources(build("m", None, host(capability="9.1"), recipe))["--kv-cache-dtype"] == ("fp8_e5m2", "vram 80")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("match = [", "cannot read recipe"),
        ("bse = []", "'bse' is none of match, base, profile, os, vram, capability"),
        ("base = 3", "base is not a list of strings"),
        ("base = [1]", "base is not a list of strings"),
        ("vram = []", "vram is not a table"),
        ("[vram]\nbig = []", "vram 'big' is not a size in GB"),
    ],
)
def test_a_broken_recipe_is_refused_in_one_line(tmp_path, text, said):
    path = tmp_path / "broken.toml"
    path.write_text(text)
    with pytest.raises(BadRecipe) as refused:
        read_recipe(path)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_wrong_flag_is_named_with_its_list(recipe):
    recipe.write_text(RECIPE.replace("--seed", "--sed", 1))
    with pytest.raises(BadFlag, match=r"recipe own, list base: --sed is not a flag .* did you mean --seed\?"):
        build("m", None, host(), recipe)
    with pytest.raises(BadFlag, match=r"^--sed is not a flag"):
        build("m", None, host(), None, ["--sed", "1"])


def test_a_profile_that_the_recipe_lacks_is_refused_with_those_it_has(recipe):
    with pytest.raises(BadRecipe, match="recipe own has no profile 'slow'; it has: fast"):
        build("m", "slow", host(), recipe)


@pytest.mark.parametrize("model", [MODEL, "qwen3.8-27b", "/models/Qwen3.8-27B-GPTQ/", "someone/Qwen3.8-27B-FP8"])
def test_the_shipped_recipe_is_found_by_the_models_name(model):
    assert find_recipe(model).name == "qwen3.8-27b"


@pytest.mark.parametrize("model", ["Qwen/Qwen3.8-8B", "meta/Llama-3.1-8B"])
def test_another_model_takes_the_recipe_for_any(model):
    assert find_recipe(model).name == "any"


# The table of workload profiles: name, length, utilization, sequences, batched tokens, tokens guessed.
@pytest.mark.parametrize(
    ("profile", "length", "share", "seqs", "batch", "drafts"),
    [
        ("interactive", "32768", "0.90", "16", "8192", None),
        ("shared", "16384", "0.94", "64", "32768", 3),
        ("context", "262144", "0.95", "2", "8192", None),
    ],
)
def test_the_shipped_profiles(profile, length, share, seqs, batch, drafts):
    line = build(MODEL, profile, imagine_host("H200 SXM"))
    assert line.value("--tensor-parallel-size") == "1"
    assert line.value("--max-model-len") == length
    assert line.value("--gpu-memory-utilization") == share
    assert line.value("--max-num-seqs") == seqs
    assert line.value("--max-num-batched-tokens") == batch
    assert line.read_object("--speculative-config").get("num_speculative_tokens") == drafts
    assert line.value("--reasoning-parser") == "qwen3"
    assert (line.is_on("--enable-auto-tool-choice"), line.value("--tool-call-parser")) == (True, "qwen3_coder")
    assert line.is_on("--enable-prefix-caching")
    assert line.is_on("--enable-prompt-tokens-details")


@pytest.mark.parametrize("edition", LEDGER, ids=lambda edition: edition.name)
def test_only_hopper_takes_the_unquantized_cache(edition):
    line = build(MODEL, "interactive", imagine_host(edition.name))
    flag = line.find("--kv-cache-dtype")
    if edition.compute_capability == "9.0":
        assert (flag.values, flag.source) == (("auto",), "capability 9.0")
    else:
        assert (flag.values, flag.source[:4]) == (("fp8",), "vram")


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.toml")), ids=lambda path: path.stem)
def test_every_list_that_ships_holds_flags_that_vllm_knows(path):
    recipe = read_recipe(path)
    for profile in recipe.profile:
        for edition in LEDGER:
            assert build(MODEL, profile, imagine_host(edition.name), path).model == MODEL


def test_a_machine_is_imagined_from_the_ledger():
    assert imagine_host("2x h200 nvl") == HostFacts("Linux", 2, 143_771 * 1024**2, "9.0", "H200 NVL")
    assert imagine_host("H200 NVL").gpu_count == 1


def test_a_machine_without_a_gpu_has_unknowns_and_no_zeros():
    assert read_host(Identity(host_os="Linux 6.8")) == HostFacts("Linux", None, None, None, None)
    assert read_host(Identity(host_os="Linux 6.8")).describe() == (
        "Linux, ? × unknown GPU, unknown memory, compute capability unknown"
    )


def invoke(capsys, *arguments: str) -> tuple[int, str, str]:
    code = app(["recipe", "show", *arguments], prog_name="homing-worker", standalone_mode=False)
    out, err = capsys.readouterr()
    return code, out, err


def test_show_prints_the_command_and_the_list_of_each_flag(capsys):
    code, out, _ = invoke(capsys, "--model", MODEL, "--profile", "shared", "--as", "H200 NVL", "--", "--port", "9000")
    assert code == 0
    command, _, table = out.partition("\n\n")
    words = shlex.split(command.replace("\\\n", ""), comments=True)
    assert words == build(MODEL, "shared", imagine_host("H200 NVL"), None, ["--port", "9000"]).argv
    lines = table.splitlines()
    assert "# capability 9.0  --kv-cache-dtype auto" in lines
    assert "# base            --enable-prefix-caching" in lines
    assert "# command line    --port 9000" in lines


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--as", "H900"], "hardware 'H900' is not in the ledger"),
        (["--profile", "fastest", "--as", "B200"], "has no profile 'fastest'; it has: interactive, shared, context"),
        (["--as", "B200", "--", "--prot", "1"], "--prot is not a flag of vllm serve 0.32.0; did you mean --port?"),
        (["--as", "B200", "--recipe", "/nowhere.toml"], "cannot read recipe /nowhere.toml"),
    ],
)
def test_show_refuses_in_one_line_with_exit_code_2(capsys, arguments, said):
    code, out, err = invoke(capsys, "--model", MODEL, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("homing-worker recipe show: ")
    assert said in err
