"""The documentation says what the code does: its tables, links, flags, names and examples are held against it."""

import ast
import importlib.util
import json
import re
from pathlib import Path

import pytest
import typer

import proxy.cli
import proxy.edge.journey
import proxy.edge.verdicts
import workers.cli
from proxy.core.lifecycle import TABLE, Event, State
from proxy.core.types import Reason
from proxy.edge.admin import Registration
from proxy.edge.ports import Outcome
from proxy.fleet.membership import HEARTBEAT_SECONDS
from proxy.fleet.store import FLEET_KEY, LEASE_SECONDS, SEED_KEY, facts_from_json, worker_key
from proxy.index.shared import RATIOS_KEY, set_key
from proxy.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("deploy/**/*.md")])
REFERENCE = ROOT / "docs" / "reference"


def load_generator():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def prose(page: Path) -> str:
    """A page without its fenced code, where `[x](y)` and `#` mean something else."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def section(page: Path, heading: str) -> str:
    """The text under a heading, up to the next one of its level or above."""
    text = page.read_text(encoding="utf-8")
    level = heading.split(" ", maxsplit=1)[0]
    assert f"\n{heading}\n" in text, f"{page.name} has no {heading!r}"
    after = text.split(f"\n{heading}\n", 1)[1]
    return re.split(rf"^#{{1,{len(level)}}} ", after, maxsplit=1, flags=re.MULTILINE)[0]


def rows(text: str) -> list[list[str]]:
    """The cells of every table row but heads and rules."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    rules = {number for number, row in enumerate(cells) if set("".join(row)) <= set("-: ")}
    return [row for number, row in enumerate(cells) if number not in rules and number + 1 not in rules]


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_generated_tables_are_in_step_with_the_code():
    generator = load_generator()
    stale = [name for name in generator.PAGES if generator.fill((ROOT / name).read_text()) != (ROOT / name).read_text()]
    assert stale == [], "run `make docs`"


def test_every_marked_place_is_filled_by_the_generator():
    generator = load_generator()
    marked = {str(page.relative_to(ROOT)) for page in PAGES if "<!-- begin " in page.read_text()}
    assert marked == set(generator.PAGES)
    places = [
        name for page in generator.PAGES for name in re.findall("<!-- begin (.+?) -->", (ROOT / page).read_text())
    ]
    assert set(places) == set(generator.TABLES)


def test_check_names_a_stale_page_and_leaves_it_alone(tmp_path, monkeypatch, capsys):
    generator = load_generator()
    page = tmp_path / "README.md"
    page.write_text("a\n<!-- begin settings -->\nold\n<!-- end settings -->\nb\n")
    monkeypatch.setattr(generator, "ROOT", tmp_path)
    monkeypatch.setattr(generator, "PAGES", ("README.md",))
    assert generator.main(["--check"]) == 1
    assert capsys.readouterr().err == "README.md is out of date: run `make docs`\n"
    assert "old" in page.read_text()
    assert generator.main([]) == 0
    assert generator.main(["--check"]) == 0
    assert page.read_text().startswith("a\n<!-- begin settings -->\n| flag |")
    assert page.read_text().endswith("<!-- end settings -->\nb\n")


def test_the_readme_lists_every_setting():
    listed = rows(section(ROOT / "README.md", "## Configuration"))
    assert [code(row[1])[0] for row in listed] == [f"HOMING_{name.upper()}" for name in Settings.model_fields]
    defaults = {code(row[1])[0]: code(row[2]) for row in listed}
    assert defaults["HOMING_LISTEN"] == ["127.0.0.1:8080"]
    assert defaults["HOMING_JOIN_TOKEN"] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_resolve(page):
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def flags_of(application: typer.Typer, name: str) -> set[str]:
    command = typer.main.get_command(application).commands[name]
    # A switch that is on by default is documented by its `--no-` form.
    return {
        ([*option.secondary_opts, *option.opts] if option.default is True else option.opts)[0]
        for option in command.params
        if option.name != "help"
    }


@pytest.mark.parametrize("name", ["sim", "join", "demo"])
def test_scripts_lists_the_flags_of_the_worker_commands(name):
    listed = [
        code(row[0])[0].split(" ")[0] for row in rows(section(REFERENCE / "scripts.md", f"## `homing-worker {name}`"))
    ]
    assert sorted(listed) == sorted(flags_of(workers.cli.app, name))


def test_scripts_lists_flags_that_serve_has():
    text = section(REFERENCE / "scripts.md", "## `homing serve`")
    listed = {code(row[0])[0].split(" ")[0] for row in rows(text) if row[0].startswith("`--")}
    assert listed == {"--listen", "--worker", "--store-url"}
    assert listed <= flags_of(proxy.cli.app, "serve")


def test_scripts_lists_every_reason():
    listed = [code(row[0])[0] for row in rows(section(REFERENCE / "scripts.md", "## Response headers"))]
    assert set(listed) >= {reason.value for reason in Reason}


def strings(node: ast.AST | None) -> set[str]:
    return {part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)}


def results_given() -> set[str]:
    """Every string that a journey can set as its result: assigned to `.result`, or returned by who names one."""
    given = {Outcome("id", "chat").result}
    sources = "".join(Path(module.__file__).read_text() for module in (proxy.edge.journey, proxy.edge.verdicts))
    for node in ast.walk(ast.parse(sources.replace("from __future__ import annotations\n", ""))):
        if isinstance(node, ast.Assign) and any(
            isinstance(t, ast.Attribute) and t.attr == "result" for t in node.targets
        ):
            given |= strings(node.value)
        elif isinstance(node, ast.FunctionDef) and node.name in ("stream_result", "result_of"):
            returned = [part.value for part in ast.walk(node) if isinstance(part, ast.Return)]
            given |= {text for value in returned for text in strings(value) if re.fullmatch("[a-z_]+", text)}
    return given


def test_metrics_lists_every_result_that_the_code_can_give():
    listed = [code(row[0])[0] for row in rows(section(REFERENCE / "metrics.md", "## Results"))]
    assert sorted(listed) == sorted(results_given())


def test_metrics_lists_every_stage_that_is_timed():
    values = {code(row[0])[0]: code(row[1]) for row in rows(section(REFERENCE / "metrics.md", "## Label values"))}
    journey = Path(proxy.edge.journey.__file__).read_text()
    assert sorted(values["stage"]) == sorted(set(re.findall(r'(?:_lap\(|stages\[)"(\w+)"', journey)))
    assert set(values["state"]) == {*State} - {State.GONE}


def test_the_table_of_states_is_the_one_that_runs():
    head, *listed = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section(ROOT / "docs" / "architecture.md", "### Lives and states").splitlines()
        if line.startswith("| ") and "---" not in line
    ]
    told = {
        (State(state), Event(row[0].split(":")[0])): State(cell)
        for row in listed
        for state, cell in zip(head[1:], row[1:], strict=True)
        if cell != "–"
    }
    assert told == {step: after for step, after in TABLE.items() if step[0] is not State.GONE}


def test_the_example_registration_is_a_valid_one():
    page = (REFERENCE / "registration.md").read_text()
    example = json.loads(re.search(r"```json\n(.+?)```", page, re.DOTALL)[1])
    registration = Registration.model_validate(example)
    assert facts_from_json(registration.engine).block_tokens == 32
    answer = json.loads(re.search(r"Answer 200: `(.+?)`", page)[1])
    assert answer == {"id": example["id"], "heartbeat_seconds": HEARTBEAT_SECONDS, "lease_seconds": LEASE_SECONDS}


def test_store_lists_the_keys_that_are_used():
    listed = [code(row[0])[0] for row in rows(section(REFERENCE / "store.md", "## Keys"))]
    assert sorted(listed) == sorted([FLEET_KEY, SEED_KEY, RATIOS_KEY, worker_key("ID"), set_key("ID", "INCARNATION")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_make_targets_that_are_named_exist(page):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = set(re.findall(r"`make ([a-z-]+)", page.read_text())) | set(
        re.findall(r"^make ([a-z-]+)", page.read_text(), flags=re.MULTILINE)
    )
    assert named <= targets
