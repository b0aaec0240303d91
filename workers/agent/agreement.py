"""One value for many parts: what GPUs of a machine, or ranks of an engine, have in common."""

from collections.abc import Iterable
from typing import TypeVar

_Fact = TypeVar("_Fact")


def agree(facts: Iterable[_Fact]) -> _Fact | None:
    """Returns the one value that all share, `None` when they differ or there are none."""
    distinct = set(facts)
    return distinct.pop() if len(distinct) == 1 else None
