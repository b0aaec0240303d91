"""The flags that `vllm serve` knows, and what each takes.

The names are data, in `vllm-flags.toml`, read from vLLM's own parser; `VERSION` says which vLLM's.
Names resolve as vLLM resolves them: underscores are dashes, short forms stand for long ones, and an unambiguous
beginning of a name is that name.
"""

import tomllib
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path


class Kind(StrEnum):
    """What a flag takes: the classes of argparse actions that vLLM's parser uses."""

    ONE = "one"
    MAYBE = "maybe"
    MANY = "many"
    APPEND = "append"
    SWITCH = "switch"
    TOGGLE = "toggle"

    @property
    def takes_values(self) -> bool:
        """Whether anything may follow the flag."""
        return self not in {Kind.SWITCH, Kind.TOGGLE}


class BadFlag(Exception):
    """vLLM would reject this flag, or its value's absence; the message is one line that names it."""


@dataclass(frozen=True, slots=True)
class Name:
    """A flag under its long name; `on` is false for the `--no-` form of a toggle."""

    flag: str
    kind: Kind
    on: bool = True


def _read_names() -> tuple[str, dict[str, Name]]:
    """Returns the version that the list was read from, and every spelling with the flag it stands for."""
    data = tomllib.loads((Path(__file__).parent / "vllm-flags.toml").read_text(encoding="utf-8"))
    names = {flag: Name(flag, Kind(kind)) for kind, flags in data["flags"].items() for flag in flags}
    negations = {
        f"--no-{name.flag.removeprefix('--')}": Name(name.flag, name.kind, on=False)
        for name in names.values()
        if name.kind is Kind.TOGGLE
    }
    return data["version"], names | negations | {alias: names[flag] for alias, flag in data["aliases"].items()}


VERSION, NAMES = _read_names()


def resolve(spelling: str) -> Name:
    """Returns the flag that a spelling stands for; raises `BadFlag` with the nearest name when there is none."""
    if spelling in {"--model", "--help", "-h"}:
        raise BadFlag(f"{spelling} has no place among the flags; the model is named by homing-worker's own --model")
    wanted = spelling.replace("_", "-") if spelling.startswith("--") else spelling
    if wanted in NAMES:
        return NAMES[wanted]
    if wanted.startswith("--"):
        meant = {name: NAMES[name] for name in NAMES if name.startswith(wanted)}
        if len(meant) == 1:
            return next(iter(meant.values()))
        if len(meant) > 1 and len(wanted) > len("--"):
            raise BadFlag(f"{spelling} could be {' or '.join(sorted(meant)[:4])}; write it out")
    near = get_close_matches(wanted, NAMES, n=1, cutoff=0.6)
    advice = f"did you mean {near[0]}?" if near else "see `vllm serve --help=all`"
    raise BadFlag(f"{spelling} is not a flag of vllm serve {VERSION}; {advice}")
