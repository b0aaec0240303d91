"""`make workers`: every figure that the worker's side is held to, measured and written to build/workers.json.

The life runs on simulated and scripted engines, and on real vLLM too where its engine is installed.
Exits 1 when, with STRICT=1, a bar is missed.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from typer.main import get_command

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # run as a script, Python looks beside the script only

from proxy.cli import app as homing  # noqa: E402
from tests.support.nvml.replay import FOLDER, replay  # noqa: E402
from tests.unit.test_preflight_rules import CASES  # noqa: E402
from workers.agent.identity import identify  # noqa: E402
from workers.agent.ledger import LEDGER  # noqa: E402
from workers.agent.preflight import RULES, Severity  # noqa: E402
from workers.bench.bars import Bar, exit_code, write_bars  # noqa: E402
from workers.cli import app as homing_worker  # noqa: E402

RESULT = ROOT / "build" / "workers.json"
SIMULATED = ("test_verify_join", "test_operate", "test_launch_run", "test_launch_supervisor", "test_agent_join")
LIFE = [f"tests/integration/{name}.py" for name in SIMULATED]
LIFE_ON_VLLM = ["tests/e2e/test_vllm_life.py"]
RECIPE_LAWS = ["tests/property/test_recipe_laws.py"]
HELP_RUNS, HELP_SECONDS = 5, 0.3
console = Console(highlight=False)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run of pytest. `passed` and `failed` count tests; an error is a failure."""

    code: int
    passed: int
    failed: int

    @property
    def failures(self) -> float | None:
        """Failed tests; None when none ran, or when pytest itself did not end as it should."""
        return self.failed if self.code in {0, 1} and self.passed + self.failed else None


def main() -> int:
    python = find_vllm()
    console.print("help of every command …")
    times = time_help()
    life = run_tests("the life on simulated engines", LIFE, ["-m", "not vllm"])
    bars = [Bar("life_steps_failed_simulated", life.failures, "<=", 0, "steps")]
    steps = {"life_steps_simulated": life.passed + life.failed, "vllm": python is not None}
    if python is None:
        console.print("real vLLM is not installed: make test-vllm installs it (2 GB); its steps are not measured")
    else:
        real = run_tests("the life on real vLLM (some minutes)", LIFE_ON_VLLM, ["-m", "vllm"], VLLM_PYTHON=python)
        bars.append(Bar("life_steps_failed_vllm", real.failures, "<=", 0, "steps"))
        steps["life_steps_vllm"] = real.passed + real.failed
    laws = run_tests("the laws of the recipe merge", RECIPE_LAWS, [])
    unproven, unknown = rules_unproven(), editions_without_fixture()
    slowest = max(times, key=lambda name: times[name])
    bars += [
        Bar("preflight_rules_without_both_cases", len(unproven), "<=", 0, "rules"),
        Bar("ledger_editions_without_fixture", len(unknown), "<=", 0, "editions"),
        Bar("recipe_laws_exit_code", laws.code if laws.passed + laws.failed else None, "<=", 0, "exit code"),
        Bar("slowest_help_seconds", times[slowest], "<=", HELP_SECONDS, "s, median of 5"),
    ]
    print_bars(bars, [*unproven, *unknown, f"slowest help: {slowest}"])
    facts = {"preflight_rules": len(RULES), "ledger_editions": len(LEDGER), "recipe_laws": laws.passed + laws.failed}
    write_bars(RESULT, bars, {**steps, **facts, "help_seconds": times, "load_average": os.getloadavg()[0]})
    console.print(f"written to {RESULT.relative_to(ROOT)}")
    return exit_code(bars)


def find_vllm() -> str | None:
    """Returns the python of the installed real engine; None where there is none."""
    if given := os.environ.get("VLLM_PYTHON"):
        return given
    done = subprocess.run(
        ["bash", ROOT / "tests" / "support" / "vllm" / "setup.sh", "--installed"],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    return done.stdout.splitlines()[-1] if done.returncode == 0 else None


def run_tests(what: str, files: Sequence[str], options: Sequence[str], **environment: str) -> Outcome:
    """Runs test files, says what failed, and returns the count."""
    console.print(f"{what} …")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", f"--junitxml={report}", *options, *files],
            cwd=ROOT,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )  # fmt: skip
        cases = list(ET.parse(report).iter("testcase")) if report.exists() else []
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    if done.returncode:
        console.print(done.stdout, markup=False)
    return Outcome(done.returncode, len(cases) - len(failed), len(failed))


def rules_unproven() -> list[str]:
    """Returns the preflight rules that lack a case in which they fire, or a near miss in which they stay silent."""
    proven = set()
    for name, severity, fires, misses in CASES:
        (rule,) = [rule for rule in RULES if rule.id == name]
        told = [finding for situation in fires if (finding := rule.apply(situation)) is not None]
        quiet = [situation for situation in misses if rule.apply(situation) is None]
        firm = [finding for finding in told if finding.severity is severity is not Severity.UNKNOWN]
        if fires and misses and len(firm) == len(fires) and len(quiet) == len(misses):
            proven.add(name)
    return [f"not proven by its cases: preflight rule {rule.id}" for rule in RULES if rule.id not in proven]


def editions_without_fixture() -> list[str]:
    """Returns the ledger's editions that no recorded NVML, played back, is recognised as."""
    recognised = set()
    kept = sys.modules.get("pynvml")
    for path in FOLDER.glob("*.json"):
        sys.modules["pynvml"] = replay(path.stem)
        recognised.add(identify().name)
    sys.modules.pop("pynvml")
    if kept is not None:
        sys.modules["pynvml"] = kept
    return [f"no fixture: {edition.name}" for edition in LEDGER if edition.name not in recognised]


def time_help() -> dict[str, float]:
    """Returns the median seconds of `--help` by command, as its console script in a process of its own takes them."""
    # Byte code is kept, as it is wherever a command runs for the second time.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    times = {}
    for script, app in (("homing", homing), ("homing-worker", homing_worker)):
        for words in commands_of(get_command(app)):
            command = [Path(sys.executable).with_name(script), *words, "--help"]
            taken = []
            for _ in range(1 + HELP_RUNS):
                began = time.perf_counter()
                subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
                taken.append(time.perf_counter() - began)
            times[" ".join((script, *words))] = round(statistics.median(taken[1:]), 3)
    return times


def commands_of(command: object) -> Iterator[tuple[str, ...]]:
    """Yields the words of a command and of all below it."""
    yield ()
    for name, below in getattr(command, "commands", {}).items():
        for words in commands_of(below):
            yield name, *words


def print_bars(bars: Sequence[Bar], notes: Sequence[str]) -> None:
    """Prints the bars, and what they do not say."""
    table = Table("what", "value", "limit", "")
    for bar in bars:
        value = "not measured" if bar.value is None else f"{bar.value:g}"
        table.add_row(bar.id, value, f"{bar.op} {bar.limit:g} {bar.unit}", "ok" if bar.ok else "missed")
    console.print(table)
    for note in notes:
        console.print(f"  {note}", markup=False)


if __name__ == "__main__":
    sys.exit(main())
