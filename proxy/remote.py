"""What the command line asks of a running proxy: its fleet, and an operator's will with it."""

from __future__ import annotations

import json
import sys
import time
from typing import Any
from urllib.parse import quote

import httpx
from rich.console import Console
from rich.table import Table

from .errors import StartError

ANSWER_SECONDS = 10.0
POLL_SECONDS = 0.5


class Remote:
    """A running proxy.

    Args:
        url: its base URL, without /v1.
        key: the admin key, or None on the proxy's own machine.

    Raises:
        StartError: exit code 2 when the URL is none.
    """

    def __init__(self, url: str, key: str | None) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        if not self._url.startswith(("http://", "https://")):
            raise StartError(f"--url {url!r} is no base URL: write it like http://10.0.0.1:8080 (also HOMING_URL)", 2)
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._client = httpx.Client(base_url=self._url, headers=headers, timeout=ANSWER_SECONDS, trust_env=False)

    def call(self, method: str, path: str) -> Any:
        """Sends one call and returns its JSON, or None for an empty answer.

        Raises:
            StartError: exit code 3 when nobody answers, 1 when the proxy refuses.
        """
        try:
            answer = self._client.request(method, path)
        except httpx.HTTPError as problem:
            raise StartError(f"no proxy answers at {self._url} ({type(problem).__name__}); give --url", 3) from None
        try:
            told: Any = answer.json() if answer.content else None
            if answer.is_success:
                return told
            reason = str(told["error"]["message"])
        except (ValueError, KeyError, TypeError):
            reason = f"{self._url} answered {answer.status_code} and not as a Homing proxy does; check --url"
        raise StartError(reason)

    def operate(self, worker_id: str, name: str) -> Any:
        """Cordons, uncordons, drains or removes a worker. Raises what `call` raises."""
        return self.call("POST", f"/fleet/workers/{segment(worker_id)}/{name}")

    def worker(self, worker_id: str) -> dict[str, Any]:
        """Returns all that is known of one worker. Raises what `call` raises."""
        found: dict[str, Any] = self.call("GET", f"/workers/{segment(worker_id)}")
        return found

    def workers(self) -> list[dict[str, Any]]:
        """Returns the fleet."""
        told = self.call("GET", "/workers")
        found = told.get("workers") if isinstance(told, dict) else None
        if not isinstance(found, list):
            raise StartError(f"{self._url}/workers did not answer with a fleet; check --url")
        return found

    def drained(self, worker_id: str, seconds: float) -> int:
        """Waits until a draining worker has nothing in flight. Returns what is left when the time is over."""
        deadline = time.monotonic() + seconds
        while True:
            left = int(self.worker(worker_id)["inflight"])
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(POLL_SECONDS)


def segment(worker_id: str) -> str:
    """Writes a worker's id as one segment of a path, so that no id means another route.

    Raises:
        StartError: no worker can have this id.
    """
    if "/" in worker_id or worker_id in ("", ".", ".."):
        raise StartError(f"there is no worker {worker_id!r}; `homing workers list` shows the fleet")
    return quote(worker_id, safe="")


def show_fleet(workers: list[dict[str, Any]], *, as_json: bool) -> None:
    """Prints the fleet as a table, or as JSON."""
    if as_json:
        print(json.dumps({"workers": workers}, indent=2))  # noqa: T201 - the command's output
        return
    table = Table(box=None, pad_edge=False)
    for title in ("worker", "state", "hardware", "models", "recipe", "in flight", "view / capacity", "trust", "life"):
        table.add_column(title, justify="right" if title in ("in flight", "view / capacity") else "left")
    for worker in workers:
        table.add_row(*row_of(worker))
    # In a pipe there is no width to keep to: whoever reads it there wants whole lines.
    Console(width=None if sys.stdout.isatty() else 250).print(table)
    for worker in workers:
        verification = worker.get("verification") or {}
        if verification.get("reason"):
            Console(stderr=True).print(f"{worker['id']}: {verification['reason']}", highlight=False)


def row_of(worker: dict[str, Any]) -> list[str]:
    """Picks what a row of the table shows; what is not known is a dash."""
    engine, identity = worker.get("engine") or {}, worker.get("identity") or {}
    verification, recipe = worker.get("verification") or {}, identity.get("recipe") or {}
    capacity, held = engine.get("capacity_tokens"), (worker.get("view") or {}).get("tokens")
    return [
        str(worker["id"]),
        str(worker["state"]),
        str(identity.get("name") or identity.get("gpu_name") or "-"),
        ", ".join(engine.get("models") or []) or "-",
        str(recipe.get("profile") or recipe.get("model") or "-"),
        str(worker.get("inflight", "-")),
        f"{thousands(held)} / {thousands(capacity)}",
        trust_of(verification),
        str(worker.get("incarnation") or "-"),
    ]


def trust_of(verification: dict[str, Any]) -> str:
    """Renders trust, with the measured prefill speed where there is one."""
    speed = verification.get("prefill_tokens_per_second")
    trust = str(verification.get("trust") or "-")
    return trust if speed is None else f"{trust}, {thousands(speed)} tok/s"


def thousands(number: float | None) -> str:
    """Renders a count; what is not known is a dash."""
    return "-" if number is None else f"{number:,.0f}"
