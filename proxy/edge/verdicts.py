"""How a request ended, in the words that clients, headers and metrics get."""

from __future__ import annotations

from typing import NoReturn

from ..core.stream import StreamScanner
from ..core.types import Refusal, RefusalReason
from ..errors import ClientFault, HomingError, NoWorker, Refused, UnknownModel
from .asgi import Headers


def stream_result(status: int, scanner: StreamScanner) -> tuple[str, str | None]:
    """Names how a stream ended, and the engine's own error if it sent one."""
    if scanner.error is not None:
        return "worker_error", scanner.error
    if status >= 400:
        return ("client_error" if status < 500 else "worker_error"), None
    if scanner.aborted:
        return "worker_aborted", None
    return ("ok", None) if scanner.done else ("incomplete", "the stream ended without its end marker")


def refuse(refusal: Refusal, model: str, known: frozenset[str], fault: HomingError | None) -> NoReturn:
    """Raises what a refusal means to the client: the fault of the last attempt, if there was one, says more."""
    if fault is not None:
        raise fault
    if refusal.reason is RefusalReason.UNKNOWN_MODEL:
        names = ", ".join(sorted(known))
        raise UnknownModel(f"The model `{model}` does not exist. This fleet serves: {names}.", param="model")
    if known:
        raise NoWorker(f"No worker that serves `{model}` is ready at the moment; try again shortly.")
    raise NoWorker("No worker has joined this fleet yet; start one with `homing-worker join`, or try again shortly.")


def receipt(request_id: str, *, worker: str | None, reason: str | None, expected: int | None, attempts: int) -> Headers:
    """Renders the headers that say what was decided. What was not decided is named so, not zero."""
    return [
        (b"x-request-id", request_id.encode("latin-1")),
        (b"x-homing-worker", (worker or "none").encode()),
        (b"x-homing-reason", (reason or "refused").encode()),
        (b"x-homing-expected-tokens", b"unknown" if expected is None else str(expected).encode()),
        (b"x-homing-attempts", str(attempts).encode()),
    ]


def result_of(problem: HomingError) -> str:
    """Names an error in the closed list of results."""
    if isinstance(problem, ClientFault):
        return "client_error"
    if isinstance(problem, Refused):
        return "refused"
    return "worker_error" if problem.blames_worker or problem.retry_safe else "internal"
