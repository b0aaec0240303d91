"""Flags as values: one list parsed as vLLM's argparse would, lists merged flag by flag, and the line they make.

A flag keeps the place where it first stood and the name of the list that had the last word on it.
Two kinds add up instead of replacing: a flag that vLLM collects (`--middleware`), and a dotted key
(`--compilation-config.mode 3`), which changes one key of an object and names both lists as its source.
"""

import contextlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from workers.agent.recipe.catalogue import NAMES, BadFlag, Kind, Name, resolve

_SHORT = frozenset(name for name in NAMES if not name.startswith("--"))
_NEGATIVE_NUMBER = re.compile(r"-\d+$|-\d*\.\d+$")


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag under its long name; `values` is empty for booleans, `on` false for their `--no-` form.

    `partial` marks an object given by dotted keys: it changes those keys of an earlier object and leaves the others.
    """

    name: str
    kind: Kind
    values: tuple[str, ...]
    source: str
    on: bool = True
    partial: bool = False

    @property
    def tokens(self) -> list[str]:
        """The flag as arguments of a process."""
        if not self.on:
            return [f"--no-{self.name.removeprefix('--')}"]
        if self.kind is Kind.APPEND:
            return [token for value in self.values for token in _attach(self.name, (value,))]
        return _attach(self.name, self.values)


@dataclass(frozen=True, slots=True)
class CommandLine:
    """What `vllm serve` is started with; `notes` are lines on lists that could not be chosen."""

    model: str
    flags: tuple[Flag, ...]
    notes: tuple[str, ...] = ()

    @property
    def tokens(self) -> list[str]:
        """The flags alone, as arguments."""
        return [token for flag in self.flags for token in flag.tokens]

    @property
    def argv(self) -> list[str]:
        """The whole command, its program first."""
        return ["vllm", "serve", self.model, *self.tokens]

    def find(self, name: str) -> Flag | None:
        """Returns the flag of this long name."""
        return next((flag for flag in self.flags if flag.name == name), None)

    def value(self, name: str) -> str | None:
        """Returns a flag's first value; `None` when the flag is not there or has none."""
        flag = self.find(name)
        return flag.values[0] if flag is not None and flag.values else None

    def is_on(self, name: str) -> bool | None:
        """Tells what a boolean flag says; `None` when it is not there and vLLM's default decides."""
        flag = self.find(name)
        return None if flag is None else flag.on

    def read_object(self, name: str) -> dict[str, Any]:
        """Returns a JSON flag's object; empty when the flag is not there or holds none."""
        return _read_object(self.value(name)) or {}

    def amend(self, set_flags: Mapping[str, str | None], remove_flags: Sequence[str], source: str) -> "CommandLine":
        """Returns the line without some flags and with others merged in last, a boolean's value being `None`.

        Raises `BadFlag`.
        """
        gone = {resolve(name).flag for name in remove_flags}
        kept = [flag for flag in self.flags if flag.name not in gone]
        added = [token for name, value in set_flags.items() for token in ([name] if value is None else [name, value])]
        return replace(self, flags=merge([kept, parse(added, source)]))


def parse(tokens: Sequence[str], source: str) -> tuple[Flag, ...]:
    """Reads one list of arguments into flags, each name once; raises `BadFlag` for what vLLM would reject."""
    found: list[Sequence[Flag]] = []
    rest = list(tokens)
    while rest:
        token = rest.pop(0)
        if not _is_flag(token):
            raise BadFlag(f"{token!r} belongs to no flag")
        found.append([_take(token, rest, source)])
    return merge(found)


def merge(lists: Iterable[Sequence[Flag]]) -> tuple[Flag, ...]:
    """Merges lists flag by flag: the later one wins, the place is that of the first, and no name is lost."""
    merged: dict[str, Flag] = {}
    for flags in lists:
        for flag in flags:
            merged[flag.name] = _combine(merged[flag.name], flag) if flag.name in merged else flag
    return tuple(merged.values())


def _take(token: str, rest: list[str], source: str) -> Flag:
    """Turns a token, and what it takes from the front of `rest`, into a flag."""
    spelling, equals, attached = _split(token)
    head, dot, path = spelling.partition(".")
    name = resolve(head)
    if dot:
        value = attached if equals else _next_value(spelling, rest)
        text = json.dumps(_nest(path, value), ensure_ascii=False)
        return Flag(name.flag, name.kind, (text,), source, partial=True)
    if not name.kind.takes_values:
        if equals:
            raise BadFlag(f"{spelling} takes no value, {attached!r} was given")
        return Flag(name.flag, name.kind, (), source, on=name.on)
    values = (attached,) if equals else _next_values(name, spelling, rest)
    return Flag(name.flag, name.kind, values, source)


def _split(token: str) -> tuple[str, str, str]:
    """Parts a flag from a value attached to it: `--flag=value`, and the short forms `-O3`, `-qawq`."""
    if token.startswith("-O"):
        attached = token.removeprefix("-O").removeprefix("=")
        return "--optimization-level", "=" if attached else "", attached
    spelling, equals, attached = token.partition("=")
    if not token.startswith("--") and spelling.split(".")[0] not in _SHORT and token[:2] in _SHORT:
        return token[:2], "=", token[2:]
    return spelling, equals, attached


def _next_values(name: Name, spelling: str, rest: list[str]) -> tuple[str, ...]:
    if name.kind in {Kind.ONE, Kind.APPEND}:
        return (_next_value(spelling, rest),)
    values: list[str] = []
    while rest and not _is_flag(rest[0]) and not (values and name.kind is Kind.MAYBE):
        values.append(rest.pop(0))
    if not values and name.kind is Kind.MANY:
        raise BadFlag(f"{spelling} needs at least one value")
    return tuple(values)


def _next_value(spelling: str, rest: list[str]) -> str:
    if not rest or _is_flag(rest[0]):
        raise BadFlag(f"{spelling} needs a value")
    return rest.pop(0)


def _is_flag(word: str) -> bool:
    """Tells flags from values as argparse does: a dash in front, no space inside, not a negative number."""
    return word.startswith("-") and word != "-" and " " not in word and not _NEGATIVE_NUMBER.match(word)


def _attach(name: str, values: tuple[str, ...]) -> list[str]:
    """Writes a value that looks like a flag so that argparse cannot take it for one."""
    if len(values) == 1 and values[0].startswith("-"):
        return [f"{name}={values[0]}"]
    return [name, *values]


def _combine(old: Flag, new: Flag) -> Flag:
    """Puts a later flag over an earlier one of the same name."""
    both = " + ".join(dict.fromkeys([*old.source.split(" + "), *new.source.split(" + ")]))
    if new.kind is Kind.APPEND:
        added = tuple(value for value in new.values if value not in old.values)
        return replace(old, values=old.values + added, source=both) if added else old
    if new.partial and old.values:
        below = _read_object(old.values[0])
        if below is not None:
            text = json.dumps(overlay(below, json.loads(new.values[0])), ensure_ascii=False)
            return replace(old, values=(text,), source=both)
    return new


def _nest(path: str, text: str) -> dict[str, Any]:
    """Builds the object that a dotted key and its value stand for; a trailing `+` makes a list of the value."""
    value: Any = text
    if path.endswith("+"):
        path, value = path.removesuffix("+"), text.split(",")
    else:
        with contextlib.suppress(ValueError):
            value = json.loads(text)
    nested: dict[str, Any] = reduce(lambda inner, key: {key: inner}, reversed(path.split(".")), value)
    return nested


def overlay(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `below` with the keys of `above` in their place, objects inside objects alike."""
    merged = dict(below)
    for key, value in above.items():
        inner = merged.get(key)
        merged[key] = overlay(inner, value) if isinstance(inner, Mapping) and isinstance(value, Mapping) else value
    return merged


def _read_object(text: str | None) -> dict[str, Any] | None:
    try:
        value = json.loads(text) if text is not None else None
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
