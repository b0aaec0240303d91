"""`homing-worker recipe show`: the final command line, and the list that each flag came from."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from workers.agent.ledger import UnknownEdition
from workers.agent.recipe.book import BadRecipe
from workers.agent.recipe.catalogue import BadFlag
from workers.agent.recipe.compose import build
from workers.agent.recipe.flags import CommandLine
from workers.agent.recipe.host import HostFacts, choose_host


def run(model: str, profile: str | None, hardware: str | None, file: Path | None, extra: Sequence[str]) -> int:
    """Prints the command line and returns the exit code: 2 when it cannot be built."""
    try:
        host = choose_host(hardware)
        line = build(model, profile, host, file, extra)
    except (BadFlag, BadRecipe, UnknownEdition) as error:
        sys.stderr.write(f"homing-worker recipe show: {error}\n")
        return 2
    sys.stdout.write(render(line, host))
    return 0


def render(line: CommandLine, host: HostFacts) -> str:
    """Returns the machine, the command with each flag's list as a comment, and what was left out.

    The command can be pasted into a shell: a comment after a continued line would end it, so the lists stand in a
    table below.
    """
    shown = [shlex.join(flag.tokens) for flag in line.flags]
    command = " \\\n".join([shlex.join(["vllm", "serve", line.model]), *(f"  {flag}" for flag in shown)])
    width = max((len(flag.source) for flag in line.flags), default=0)
    table = [f"# {flag.source:<{width}}  {text}" for flag, text in zip(line.flags, shown, strict=True)]
    notes = [f"# {note}" for note in line.notes]
    return "\n".join([f"# {host.describe()}", command, "", "# which list each flag came from", *table, *notes]) + "\n"
