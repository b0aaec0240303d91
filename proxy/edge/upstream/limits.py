"""The time limits of a call, in seconds. There is none for the whole: a long answer is a healthy one."""

from __future__ import annotations

from dataclasses import dataclass

# An idle connection is dropped before the engine's own 5 s limit, so that reuse rarely meets a closing one.
KEEP_ALIVE_SECONDS = 4.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits for one call.

    Attributes:
        connect: for making a connection.
        first_byte: from the request's last byte to the answer's first; prefill of a long prompt lies in it.
        idle: between two pieces of an answer.
    """

    connect: float = 5.0
    first_byte: float = 600.0
    idle: float = 300.0


def describe(problem: BaseException) -> str:
    """Names an exception even when it has no text."""
    text = str(problem)
    return f"{type(problem).__name__}: {text}" if text else type(problem).__name__
