"""Writes the flags of `vllm serve` as TOML on stdout; runs under the python of a venv that holds vLLM.

`PYTHON serve_flags.py > workers/agent/recipe/vllm-flags.toml` brings the recipes' list up to that vLLM.
"""

import sys

import vllm
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

KINDS = {
    ("BooleanOptionalAction", 0): "toggle",
    ("_StoreTrueAction", 0): "switch",
    ("_AppendAction", None): "append",
}
BY_NARGS = {None: "one", "?": "maybe", "+": "many"}


def write() -> None:
    kinds = {kind: [] for kind in ("one", "maybe", "many", "append", "switch", "toggle")}
    aliases = {}
    for action in make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))._actions:
        if not action.option_strings or action.dest in {"help", "model"}:
            continue
        kind = KINDS.get((type(action).__name__, action.nargs)) or BY_NARGS[action.nargs]
        names = [name for name in action.option_strings if kind != "toggle" or not name.startswith("--no-")]
        main = next(name for name in names if name.startswith("--"))
        kinds[kind].append(main)
        aliases |= {name: main for name in names if name != main}
    out = ["# The flags of `vllm serve`, read from its own parser by tests/support/vllm/serve_flags.py."]
    out += [f'version = "{vllm.__version__}"', "", "[flags]"]
    for kind, names in kinds.items():
        out += [f"{kind} = [", *(f'  "{name}",' for name in sorted(names)), "]"]
    out += ["", "[aliases]", *(f'"{alias}" = "{main}"' for alias, main in sorted(aliases.items()))]
    sys.stdout.write("\n".join(out) + "\n")


write()
