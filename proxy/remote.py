"""What the command line asks of a running proxy: its fleet, and an operator's will with it."""

from __future__ import annotations

import json
import time
from typing import Any

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
    """

    def __init__(self, url: str, key: str | None) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
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
        if answer.is_success:
            return answer.json() if answer.content else None
        try:
            reason = answer.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            reason = f"{answer.status_code} from {self._url}; is that a Homing proxy?"
        raise StartError(str(reason))

    def workers(self) -> list[dict[str, Any]]:
        """Returns the fleet."""
        found: list[dict[str, Any]] = self.call("GET", "/workers")["workers"]
        return found

    def drained(self, worker_id: str, seconds: float) -> int:
        """Waits until a draining worker has nothing in flight. Returns what is left when the time is over."""
        deadline = time.monotonic() + seconds
        while True:
            left = int(self.call("GET", f"/workers/{worker_id}")["inflight"])
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(POLL_SECONDS)


def show_fleet(workers: list[dict[str, Any]], *, as_json: bool) -> None:
    """Prints the fleet as a table, or as JSON."""
    if as_json:
        print(json.dumps({"workers": workers}, indent=2))  # noqa: T201 - the command's output
        return
    table = Table(box=None, pad_edge=False)
    for title in ("worker", "state", "hardware", "models", "in flight", "view", "capacity", "trust", "prefill tok/s"):
        table.add_column(
            title, justify="right" if title in ("in flight", "view", "capacity", "prefill tok/s") else "left"
        )
    for worker in workers:
        table.add_row(*row_of(worker))
    Console().print(table)
    for worker in workers:
        verification = worker.get("verification") or {}
        if verification.get("reason"):
            Console(stderr=True).print(f"{worker['id']}: {verification['reason']}", highlight=False)


def row_of(worker: dict[str, Any]) -> list[str]:
    """Picks what a row of the table shows; what is not known is a dash."""
    engine, identity = worker.get("engine") or {}, worker.get("identity") or {}
    verification = worker.get("verification") or {}
    capacity = engine.get("capacity_tokens")
    return [
        str(worker["id"]),
        str(worker["state"]),
        str(identity.get("name") or identity.get("gpu_name") or "-"),
        ", ".join(engine.get("models") or []) or "-",
        str(worker.get("inflight", "-")),
        f"{(worker.get('view') or {}).get('tokens', 0):,}",
        "-" if capacity is None else f"{capacity:,}",
        str(verification.get("trust") or "-"),
        f"{verification['prefill_tokens_per_second']:,.0f}" if verification.get("prefill_tokens_per_second") else "-",
    ]
