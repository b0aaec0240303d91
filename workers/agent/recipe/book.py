"""Recipe files: one model's base arguments, its workload profiles, and the three lists by hardware, as TOML.

The shipped ones are in `shipped/`; `any.toml` serves a model that has none of its own.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from workers.agent.recipe.host import HostFacts

SHIPPED = Path(__file__).parent / "shipped"

_TABLES = ("profile", "os", "vram", "capability")

_CLEARED = 0.93
"""A tier counts as cleared from here: NVML's total in GiB lies up to 7 % under the marketed size, ECC included."""


class BadRecipe(Exception):
    """A recipe cannot be read or does not hold what was asked of it; the message is one line."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """One recipe file; each table maps a key (a profile, a system, a size, a capability) to arguments."""

    name: str
    match: tuple[str, ...]
    base: tuple[str, ...]
    profile: Mapping[str, tuple[str, ...]]
    os: Mapping[str, tuple[str, ...]]
    vram: Mapping[str, tuple[str, ...]]
    capability: Mapping[str, tuple[str, ...]]

    def fits(self, model: str) -> bool:
        """Tells whether the model's name, or the last part of it, matches one of the recipe's patterns."""
        full = model.rstrip("/").casefold()
        return any(
            fnmatchcase(name, pattern.casefold()) for pattern in self.match for name in (full, full.rsplit("/", 1)[-1])
        )

    def select(self, profile: str | None, host: HostFacts) -> tuple[list[tuple[str, tuple[str, ...]]], list[str]]:
        """Returns the lists that apply, named and in order, and one note for each that could not be chosen.

        The order: base, profile, operating system, VRAM tier, compute capability.
        """
        lists = [("base", self.base)]
        notes = []
        if profile is not None:
            lists.append((f"profile {profile}", self._find_profile(profile)))
        lists += [
            (f"os {key}", arguments)
            for key, arguments in self.os.items()
            if key.casefold() == (host.os or "").casefold()
        ]
        if self.vram and host.memory_bytes is None:
            notes.append("the list by VRAM tier is left out: the GPU's memory is unknown")
        elif host.memory_bytes is not None:
            lists += self._find_tier(host.memory_bytes)
        if self.capability and host.compute_capability is None:
            notes.append("the list by compute capability is left out: the driver's word on it is unknown")
        elif host.compute_capability is not None and host.compute_capability in self.capability:
            lists.append((f"capability {host.compute_capability}", self.capability[host.compute_capability]))
        return lists, notes

    def _find_profile(self, profile: str) -> tuple[str, ...]:
        if profile in self.profile:
            return self.profile[profile]
        known = ", ".join(self.profile) or "none"
        raise BadRecipe(f"recipe {self.name} has no profile {profile!r}; it has: {known}")

    def _find_tier(self, memory_bytes: int) -> list[tuple[str, tuple[str, ...]]]:
        """Returns the list of the largest tier that this much memory clears, if it clears any."""
        cleared = [size for size in self.vram if memory_bytes / 1024**3 >= _CLEARED * float(size)]
        largest = max(cleared, key=float, default=None)
        return [] if largest is None else [(f"vram {largest}", self.vram[largest])]


def find_recipe(model: str, file: Path | None = None) -> Recipe:
    """Returns the recipe in `file`, else the shipped one that fits, else the one for any model; raises `BadRecipe`."""
    if file is not None:
        return read_recipe(file)
    shipped = [read_recipe(path) for path in sorted(SHIPPED.glob("*.toml"))]
    return next((recipe for recipe in shipped if recipe.fits(model)), read_recipe(SHIPPED / "any.toml"))


def read_recipe(path: Path) -> Recipe:
    """Reads one recipe file; raises `BadRecipe`."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadRecipe(f"cannot read recipe {path}: {error}") from None
    unknown = data.keys() - {"match", "base", *_TABLES}
    if unknown:
        raise BadRecipe(f"recipe {path}: {min(unknown)!r} is none of match, base, {', '.join(_TABLES)}")
    tables = {key: _read_table(path, key, data.get(key, {})) for key in _TABLES}
    for size in tables["vram"]:
        if not size.replace(".", "", 1).isdecimal():
            raise BadRecipe(f'recipe {path}: vram {size!r} is not a size in GB such as "80"')
    match, base = (_read_list(path, key, data.get(key, [])) for key in ("match", "base"))
    return Recipe(path.stem, match, base, **tables)


def _read_table(path: Path, key: str, table: Any) -> dict[str, tuple[str, ...]]:
    if not isinstance(table, dict):
        raise BadRecipe(f"recipe {path}: {key} is not a table")
    return {name: _read_list(path, f"{key}.{name}", arguments) for name, arguments in table.items()}


def _read_list(path: Path, key: str, arguments: Any) -> tuple[str, ...]:
    if not isinstance(arguments, list) or not all(isinstance(argument, str) for argument in arguments):
        raise BadRecipe(f"recipe {path}: {key} is not a list of strings")
    return tuple(arguments)
