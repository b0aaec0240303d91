"""The command `homing-worker`: joins an engine, stands in for one, or shows Homing at work.

Only reads the command line and the environment; each command imports what it runs, so `--help` is quick.
A wrong value is one line on stderr and exit code 2.
"""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

_TOKEN_VARIABLE = "HOMING_JOIN_TOKEN"  # noqa: S105 - the variable's name, not its value

# The class of every usage error, not exported by typer: BadParameter, UsageError, ClickException.
_Refused: type[Exception] = typer.BadParameter.__mro__[2]

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # drawing help with Rich takes longer than all the rest of it
    help="Joins a vLLM engine to a Homing proxy, stands in for one, or shows Homing at work.",
)

recipe_app = typer.Typer(
    add_completion=False, rich_markup_mode=None, help="Shows how a worker gets its vLLM arguments."
)
app.add_typer(recipe_app, name="recipe")

_Model = Annotated[str, typer.Option(help="The model: a folder, or NAMESPACE/NAME on Hugging Face.")]
_Profile = Annotated[str | None, typer.Option(help="Workload profile of the recipe: interactive, shared or context.")]
_Hardware = Annotated[
    str | None, typer.Option("--as", help='Take the ledger\'s machine, such as "2x H200 NVL"; default: this one.')
]
_RecipeFile = Annotated[Path | None, typer.Option("--recipe", help="Recipe file; default: the shipped one.")]
_Flags = Annotated[
    list[str] | None, typer.Argument(metavar="[-- FLAG...]", help="vLLM's own flags; they win over the recipe's.")
]


def main() -> None:
    """Runs `homing-worker` and ends the process with its exit code."""
    try:
        code = app(prog_name="homing-worker", standalone_mode=False)
    except _Refused as refused:
        message = " ".join(getattr(refused, "format_message", refused.__str__)().split())
        sys.exit(_fail("homing-worker", f"{message} (see --help)"))
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)


@app.command()
def join(
    proxy: Annotated[str, typer.Option(help="Base URL of the proxy to join.")],
    engine: Annotated[str, typer.Option(help="Base URL of the running engine, as seen from here.")],
    advertise: Annotated[
        str | None, typer.Option(help="Base URL of the engine as the proxy reaches it; default: --engine.")
    ] = None,
    worker_id: Annotated[
        str | None, typer.Option("--id", help="The worker's stable name; default: host name and engine port.")
    ] = None,
    join_token_file: Annotated[
        Path | None, typer.Option(help=f"File that holds the join token; default: ${_TOKEN_VARIABLE}.")
    ] = None,
    wait_seconds: Annotated[float, typer.Option(min=0, help="How long to wait for the engine to be ready.")] = 600.0,
) -> int:
    """Registers a running engine, keeps it registered, and drains it at SIGTERM or Ctrl-C."""
    from workers.agent.join import BadOption, run, settle_options

    try:
        options = settle_options(
            proxy=proxy,
            engine=engine,
            advertise=advertise,
            worker_id=worker_id,
            token=_read_token(join_token_file),
            wait_seconds=wait_seconds,
        )
    except BadOption as error:
        return _fail("homing-worker join", str(error))
    return run(options)


@app.command("run")
def launch(  # noqa: PLR0913 - a command's parameters are its options
    model: _Model,
    flags: _Flags = None,
    profile: _Profile = None,
    recipe: _RecipeFile = None,
    proxy: Annotated[str | None, typer.Option(help="Base URL of the proxy to join; default: join none.")] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port that the engine serves on.")] = 8000,
    advertise: Annotated[
        str | None, typer.Option(help="Base URL of the engine as the proxy reaches it; default: the loopback.")
    ] = None,
    worker_id: Annotated[
        str | None, typer.Option("--id", help="The worker's stable name; default: host name and engine port.")
    ] = None,
    join_token_file: Annotated[
        Path | None, typer.Option(help=f"File that holds the join token; default: ${_TOKEN_VARIABLE}.")
    ] = None,
    engine_command: Annotated[
        str | None, typer.Option(help="Program to start instead of `vllm serve`, as one shell word list.")
    ] = None,
    attach: Annotated[
        str | None, typer.Option(help="Base URL of an engine that runs already: start none, only join.")
    ] = None,
    apply_fix: Annotated[
        bool, typer.Option("--apply-fix", help="After a failure that is known, start once more with its way out.")
    ] = False,
    preflight: Annotated[
        bool, typer.Option("--preflight/--no-preflight", help="Examine the command line before starting.")
    ] = True,
    start_seconds: Annotated[float, typer.Option(min=0, help="How long the engine may take to be ready.")] = 1800.0,
    log: Annotated[Path | None, typer.Option(help="File for the engine's log; default: in the state folder.")] = None,
) -> int:
    """Starts a vLLM engine for this machine, keeps it running and in the fleet, and ends it at SIGTERM."""
    from workers.agent.join import BadOption
    from workers.agent.launch.run import RunOptions, run, settle_joining

    if attach is not None:
        if proxy is None:
            return _fail("homing-worker run", "--attach joins a running engine to a proxy: pass --proxy too")
        return join(proxy, attach, advertise, worker_id, join_token_file, start_seconds)
    try:
        joining = settle_joining(
            proxy=proxy, port=port, token=_read_token(join_token_file), advertise=advertise, worker_id=worker_id
        )
    except BadOption as error:
        return _fail("homing-worker run", str(error))
    options = RunOptions(
        model=model,
        profile=profile,
        recipe=recipe,
        engine_command=engine_command,
        port=port,
        extra=tuple(flags or ()),
        apply_fix=apply_fix,
        preflight=preflight,
        start_seconds=start_seconds,
        log=log,
    )
    return run(options, joining)


@recipe_app.command("show")
def show_recipe(
    model: _Model,
    flags: _Flags = None,
    profile: _Profile = None,
    hardware: _Hardware = None,
    recipe: _RecipeFile = None,
) -> int:
    """Prints the final command line of vLLM, and the list that each flag came from."""
    from workers.agent.recipe.show import run

    return run(model, profile, hardware, recipe, flags or ())


@app.command()
def check(
    model: _Model,
    flags: _Flags = None,
    profile: _Profile = None,
    hardware: _Hardware = None,
    recipe: _RecipeFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Examines a command line before it starts; exits with 0 clean or notes, 1 errors, 4 warnings or unknowns."""
    from workers.agent.preflight.report import run

    return run(model, profile, hardware, recipe, flags or (), as_json)


@app.command()
def sim(  # noqa: PLR0913 - a command's parameters are its options
    identity: Annotated[str, typer.Option(help="The GPU to stand in for, as the simulator's table names it.")],
    model: Annotated[str, typer.Option(help="The model's served name.")],
    listen: Annotated[str, typer.Option(help="HOST:PORT to serve on; port 0 takes a free one.")] = ("127.0.0.1:8000"),
    proxy: Annotated[str | None, typer.Option(help="Base URL of a proxy to join; default: join none.")] = None,
    worker_id: Annotated[str | None, typer.Option("--id", help="The worker's stable name.")] = None,
    advertise: Annotated[str | None, typer.Option(help="Base URL at which the proxy reaches this worker.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of all that is random.")] = 0,
    time_scale: Annotated[float, typer.Option(help="How much faster than the real GPU time runs.")] = 1.0,
    max_model_len: Annotated[int | None, typer.Option(help="Longest context, in tokens.")] = None,
    block_size: Annotated[int | None, typer.Option(help="Cache block, in tokens.")] = None,
    capacity_tokens: Annotated[int | None, typer.Option(help="Cache size, in tokens.")] = None,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens computed in one step.")] = 8192,
    max_num_seqs: Annotated[int, typer.Option(help="Requests computed in one step.")] = 256,
    prompt_tokens_details: Annotated[bool, typer.Option(help="Report cached tokens in the usage of an answer.")] = True,
    force_include_usage: Annotated[
        bool, typer.Option("--force-include-usage", help="Send usage in each stream, asked for or not.")
    ] = False,
) -> int:
    """Serves an honest stand-in for vLLM: its API and prefix cache, at a GPU's measured speed."""
    from workers.sim.options import SimOptions
    from workers.sim.serve import run

    return run(
        SimOptions(
            listen=listen,
            identity=identity,
            model=model,
            proxy=proxy,
            join_token=_read_token(None),
            seed=seed,
            time_scale=time_scale,
            worker_id=worker_id,
            advertise=advertise,
            max_model_len=max_model_len,
            block_size=block_size,
            capacity_tokens=capacity_tokens,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            prompt_tokens_details=prompt_tokens_details,
            force_include_usage=force_include_usage,
        )
    )


@app.command()
def demo(
    seconds: Annotated[
        float | None,
        typer.Option(min=0, help="Run the load this long and exit; default: serve until Ctrl-C."),
    ] = None,
    conversations: Annotated[int, typer.Option(min=1, help="Agent conversations in the load.")] = 40,
    time_scale: Annotated[
        float | None, typer.Option(help="How much faster than real GPUs the simulated ones run.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the load and of the simulated GPUs.")] = 0,
    listen: Annotated[str, typer.Option(help="HOST:PORT of the proxy; port 0 takes a free one.")] = ("127.0.0.1:8080"),
) -> int:
    """Runs an agent load through Homing and through round robin, and prints both side by side."""
    from workers.bench.demo import DemoOptions, run

    return run(
        DemoOptions(seconds=seconds, conversations=conversations, time_scale=time_scale, seed=seed, listen=listen)
    )


@app.command()
def identify(
    as_json: Annotated[bool, typer.Option("--json", help="Print the identity as a registration carries it.")] = False,
) -> int:
    """Prints which GPUs an engine started from here would run on, and what the hardware ledger calls them."""
    from workers.agent.identity import run

    return run(as_json=as_json)


@app.command()
def version() -> None:
    """Prints the version."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as read_version

    try:
        stated = read_version("homing")
    except PackageNotFoundError:
        stated = "unknown (homing is not installed here)"
    typer.echo(f"homing-worker {stated}")


def _read_token(path: Path | None) -> str | None:
    """Returns the join token from `path`, else from the environment; `None` when there is none."""
    if path is None:
        return os.environ.get(_TOKEN_VARIABLE, "").strip() or None
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"cannot read {path} ({error})", param_hint="--join-token-file") from None


def _fail(who: str, message: str) -> int:
    sys.stderr.write(f"{who}: {message}\n")
    return 2
