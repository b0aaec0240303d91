"""From a model, a profile and a machine to one command line."""

from collections.abc import Sequence
from pathlib import Path

from workers.agent.recipe.book import find_recipe
from workers.agent.recipe.catalogue import BadFlag
from workers.agent.recipe.flags import CommandLine, merge, parse
from workers.agent.recipe.host import HostFacts

YOURS = "command line"
"""The name of the list that the person adds; it comes last and wins over all."""


def build(
    model: str,
    profile: str | None,
    host: HostFacts,
    file: Path | None = None,
    extra: Sequence[str] = (),
) -> CommandLine:
    """Builds the command line of `vllm serve` for one model on one machine.

    `file` is a recipe to use instead of the shipped ones, `extra` the person's own flags.
    Raises `BadRecipe`, and `BadFlag` that names the list in which a flag stands that vLLM would reject.
    """
    recipe = find_recipe(model, file)
    lists, notes = recipe.select(profile, host)
    parsed = []
    for source, arguments in [*lists, (YOURS, tuple(extra))]:
        try:
            parsed.append(parse(arguments, source))
        except BadFlag as error:
            where = "" if source == YOURS else f"recipe {recipe.name}, list {source}: "
            raise BadFlag(f"{where}{error}") from None
    return CommandLine(model, merge(parsed), tuple(notes))
