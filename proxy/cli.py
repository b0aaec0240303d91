"""The command `homing`: parse, build settings, call one function. Heavy imports are inside, so `--help` is instant."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import __version__
from .errors import StartError

if TYPE_CHECKING:
    from .remote import Remote
    from .settings import Settings

# The class of every usage error, not exported by typer: BadParameter, UsageError, ClickException.
UsageProblem: type[Exception] = typer.BadParameter.__mro__[2]

DEFAULT_URL = "http://127.0.0.1:8080"

# Plain help: drawing it with Rich takes longer than all the rest of it.
app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

fleet = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="See and steer the workers of a running proxy.")
app.add_typer(fleet, name="workers")


class Output(StrEnum):
    """How a list is printed."""

    TABLE = "table"
    JSON = "json"


Url = Annotated[str, typer.Option(help="The proxy.", envvar="HOMING_URL")]
Worker = Annotated[str, typer.Argument(metavar="WORKER", help="The worker's id.")]


@app.callback()
def root() -> None:
    """KV-cache-affinity routing proxy: every conversation goes home, to the vLLM worker that holds its prefix."""


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(f"homing {__version__}")


@app.command(epilog="Every flag is also an environment variable: --store-url is HOMING_STORE_URL. A flag wins.")
def serve(  # noqa: PLR0913 - one parameter per flag
    listen: Annotated[str | None, typer.Option(help="HOST:PORT to serve on (default: 127.0.0.1:8080).")] = None,
    worker: Annotated[
        list[str] | None,
        typer.Option(help="Base URL of an engine, or NAME=URL; repeatable."),
    ] = None,
    worker_network: Annotated[
        list[str] | None,
        typer.Option(help="Network of registered workers besides private ones; repeatable."),
    ] = None,
    verify: Annotated[
        bool | None,
        typer.Option("--verify/--no-verify", help="Probe a joining worker twice (default: on)."),
    ] = None,
    store_url: Annotated[
        str | None,
        typer.Option(help="embedded, redis://…, rediss://… or unix://PATH (default: embedded)."),
    ] = None,
    state_dir: Annotated[Path | None, typer.Option(help="Folder of the embedded store's file.")] = None,
    max_body_bytes: Annotated[int | None, typer.Option(help="Longest request body (default: 33554432).")] = None,
    connect_timeout: Annotated[float | None, typer.Option(help="Seconds to connect to a worker (default: 5).")] = None,
    first_byte_timeout: Annotated[
        float | None, typer.Option(help="Seconds for a worker's first byte (default: 600).")
    ] = None,
    idle_timeout: Annotated[
        float | None,
        typer.Option(help="Seconds between two pieces of an answer (default: 300)."),
    ] = None,
    log_format: Annotated[str | None, typer.Option(help="auto, text or json (default: auto).")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error (default: info).")] = None,
) -> None:
    """Run the proxy.

    Workers register themselves with HOMING_JOIN_TOKEN; engines named with --worker need nothing.
    """
    flags = dict(locals())
    flags["worker"] = tuple(worker) if worker else None
    flags["worker_network"] = tuple(worker_network) if worker_network else None
    from .settings import read_settings

    run(lambda: start(read_settings(flags, os.environ)))


@fleet.command("list")
def list_workers(
    url: Url = DEFAULT_URL,
    output: Annotated[Output, typer.Option(help="How to print it.")] = Output.TABLE,
) -> None:
    """List the workers: identity, state, load, what they are believed to hold, trust."""
    from .remote import show_fleet

    run(lambda: show_fleet(remote(url).workers(), as_json=output is Output.JSON))


@fleet.command("show")
def show_worker(worker: Worker, url: Url = DEFAULT_URL) -> None:
    """Print all that is known of one worker, as JSON."""
    import json

    run(lambda: typer.echo(json.dumps(remote(url).worker(worker), indent=2)))


@fleet.command()
def cordon(worker: Worker, url: Url = DEFAULT_URL) -> None:
    """Place nothing more on a worker; what runs there goes on."""
    run(lambda: tell(remote(url).operate(worker, "cordon")))


@fleet.command()
def uncordon(worker: Worker, url: Url = DEFAULT_URL) -> None:
    """Place on a worker again."""
    run(lambda: tell(remote(url).operate(worker, "uncordon")))


@fleet.command()
def drain(
    worker: Worker,
    url: Url = DEFAULT_URL,
    wait: Annotated[float, typer.Option(help="Seconds to wait until nothing runs there.")] = 0.0,
) -> None:
    """Cordon a worker and, with --wait, wait until nothing runs there."""

    def command() -> None:
        proxy = remote(url)
        tell(proxy.operate(worker, "drain"))
        left = proxy.drained(worker, wait) if wait else 0
        if left:
            raise StartError(f"{worker} still has {left} in flight after {wait:g} s")

    run(command)


@fleet.command()
def remove(worker: Worker, url: Url = DEFAULT_URL) -> None:
    """Forget a worker and all it held. One that goes on registering comes back."""
    run(lambda: remote(url).operate(worker, "remove"))


def remote(url: str) -> Remote:
    """Returns the proxy at an address, with the admin key of the environment."""
    from .remote import Remote

    return Remote(url, os.environ.get("HOMING_ADMIN_KEY"))


def tell(report: dict[str, object]) -> None:
    """Prints what became of a worker."""
    typer.echo(f"{report['id']}: {report['state']}, {report['inflight']} in flight")


def start(settings: Settings) -> None:
    """Binds the address, starts the store, serves, and stops the store."""
    from .app import Homing
    from .edge.listen import bind, serve
    from .fleet import embedded
    from .telemetry.logs import set_up

    set_up(settings.log_format, settings.log_level)
    with bind(*settings.address) as listener:
        is_embedded = settings.store_url == "embedded"
        store = embedded.start(settings.state_home) if is_embedded else embedded.Embedded(settings.store_url, None)
        try:
            homing = Homing(settings, store.url)
            settle_memory()
            typer.echo(banner(settings), err=True)
            serve(homing.application, homing.protocol, listener)
        finally:
            store.stop()


def settle_memory() -> None:
    """Takes what is there for good out of the garbage collector's sight, and lets it look at the rest less often.

    Requests free their memory by reference counts; the collector's rounds over a large view cost milliseconds each.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def banner(settings: Settings) -> str:
    """Says what is true at the start."""
    host, port = settings.address
    where = f"[{host}]" if ":" in host else host
    joins = "open with HOMING_JOIN_TOKEN" if settings.join_token else "closed (HOMING_JOIN_TOKEN is not set)"
    store = f"embedded in {settings.state_home}" if settings.store_url == "embedded" else "external"
    lines = [
        f"homing {__version__} on http://{where}:{port}/v1",
        f"  workers       {len(settings.worker)} named, registration {joins}",
        f"  store         {store}",
        f"  admin         {'key' if settings.admin_key else 'this machine only (HOMING_ADMIN_KEY is not set)'}",
    ]
    return "\n".join(lines)


def run(command: Callable[[], None]) -> None:
    """Runs a command; what cannot start says so in one line and ends with its exit code."""
    try:
        command()
    except StartError as problem:
        typer.echo(f"homing: {problem}", err=True)
        sys.exit(problem.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


def main() -> None:
    """The entry point. A command line that cannot be read is one line too."""
    try:
        app(prog_name="homing", standalone_mode=False)
    except UsageProblem as problem:
        message = " ".join(getattr(problem, "format_message", problem.__str__)().split())
        typer.echo(f"homing: {message} (see --help)", err=True)
        sys.exit(2)
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)
