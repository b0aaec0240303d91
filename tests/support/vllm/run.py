"""`make demo-vllm`: real agent sessions through Homing onto two real vLLM workers, and what came of them as a table.

Writes build/demo-vllm.json. Exits 1 when something did not start or was refused, or, with STRICT=1, when a bar is
missed.
"""

import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import httpx
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))  # run as a script, Python looks beside the script only

from tests.support.vllm.checks import agrees, judge, median_ttft, share_at_home, sum_cached  # noqa: E402
from tests.support.vllm.drive import Delivery, drive  # noqa: E402
from tests.support.vllm.fleet import Fleet, run_fleet  # noqa: E402
from tests.support.vllm.process import StartError  # noqa: E402
from tests.support.vllm.sessions import Session, find_trace, make_sessions, read_sessions  # noqa: E402
from tests.support.vllm.worker import find_python, make_model, run_engines  # noqa: E402
from workers.bench.bars import Bar, exit_code, write_bars  # noqa: E402

RESULT = ROOT / "build" / "demo-vllm.json"
console = Console(highlight=False)


def main() -> int:
    """Runs it all; leaves no process behind, whether it ends well, fails or is interrupted."""
    signal.signal(signal.SIGTERM, leave)
    try:
        return run()
    except KeyboardInterrupt:
        return 130
    except (StartError, httpx.HTTPError) as problem:
        console.print(f"demo-vllm: {problem}", style="red", markup=False)
    except subprocess.CalledProcessError as problem:
        console.print(f"demo-vllm: {problem.cmd[0]} failed; its message is above", style="red", markup=False)
    return 1


def leave(number: int, _frame: object) -> NoReturn:
    """Turns SIGTERM into an exit that runs every clean-up."""
    raise SystemExit(128 + number)


def run() -> int:
    """Starts workers, proxy and agents, sends the sessions, prints, writes, and returns the exit code."""
    sessions, source = choose_sessions()
    console.print(source, soft_wrap=True)
    with tempfile.TemporaryDirectory(prefix="homing-vllm-") as name:
        folder = Path(name)
        python = find_python()
        model = make_model(python, folder)
        console.print("starting two vLLM workers on this CPU (half a minute, more on a busy machine)")
        with run_engines(python, model, folder) as engines, run_fleet(engines, folder) as fleet:
            console.print(f"both workers are ready behind {fleet.url}")
            deliveries, bars = measure(fleet, sessions)
    print_result(deliveries, bars)
    write_bars(RESULT, bars, {"sessions": source, "requests": len(deliveries), **ttft_facts(deliveries)})
    console.print(f"written to {RESULT.relative_to(ROOT)}")
    return exit_code(bars)


def choose_sessions() -> tuple[list[Session], str]:
    """Returns the sessions to send and a sentence on where they come from."""
    trace = find_trace(ROOT)
    if trace is None:
        sessions = make_sessions()
        return sessions, f"the recorded traces are not here: sending {len(sessions)} made-up sessions instead"
    sessions = read_sessions(trace)
    return sessions, f"sending {len(sessions)} recorded agent sessions ({trace.name})"


def measure(fleet: Fleet, sessions: Sequence[Session]) -> tuple[list[Delivery], list[Bar]]:
    """Sends the sessions; returns what was noted and how it compares with the engines' own counters."""
    before = fleet.hit_tokens()
    total = sum(len(session.turns) for session in sessions)
    with console.status("sending") as status:
        deliveries = drive(fleet.url, sessions, lambda count: status.update(f"{count} of {total} requests"))
    after = fleet.hit_tokens()
    return deliveries, judge(deliveries, {worker: after[worker] - before[worker] for worker in after})


def ttft_facts(deliveries: Sequence[Delivery]) -> dict[str, float | None]:
    """Returns the client's median TTFT of first and second requests, in seconds."""
    return {
        "first_request_ttft_p50": median_ttft(deliveries, 0),
        "second_request_ttft_p50": median_ttft(deliveries, 1),
    }


def print_result(deliveries: Sequence[Delivery], bars: Sequence[Bar]) -> None:
    """Prints the bars, what else was seen, and the requests whose hit was not as expected."""
    table = Table("what", "value", "limit", "", title=f"{len(deliveries)} requests on real vLLM")
    for bar in bars:
        table.add_row(
            bar.id, show(bar.value, "{:.4g}"), f"{bar.op} {bar.limit:g} {bar.unit}", "ok" if bar.ok else "missed"
        )
    for worker, cached in sorted(sum_cached(deliveries).items()):
        prompts = [delivery.prompt for delivery in deliveries if delivery.worker == worker]
        table.add_row(f"{worker}: delivered hit rate", f"{cached / sum(prompts):.1%}", f"{len(prompts)} requests", "")
    table.add_row("third and later requests at home, under load", show(share_at_home(deliveries), "{:.1%}"), "", "")
    for name, seconds in ttft_facts(deliveries).items():
        table.add_row(name, show(seconds, "{:.3f} s"), "", "")
    console.print(table)
    for delivery in deliveries:
        if not agrees(delivery):
            console.print(f"  not as expected: {delivery}", markup=False, soft_wrap=True)


def show(value: float | None, form: str) -> str:
    """Formats a value, or says that it is unknown."""
    return "unknown" if value is None else form.format(value)


if __name__ == "__main__":
    sys.exit(main())
