"""How a worker gets its vLLM arguments: a model's recipe, merged flag by flag for the machine at hand.

Here live the recipe files and their reader, the flags that vLLM knows, the merge with its provenance, and their table.
Nothing here reads a model's files, judges whether a command line can work, or starts an engine.
`workers.cli`, `workers.agent.preflight` and `workers.agent.launch` call `build` and read the `CommandLine`.
"""

from workers.agent.recipe.book import BadRecipe, Recipe, find_recipe
from workers.agent.recipe.catalogue import BadFlag
from workers.agent.recipe.compose import build
from workers.agent.recipe.flags import CommandLine, Flag, overlay
from workers.agent.recipe.host import HostFacts, choose_host, imagine_host, read_host

__all__ = [
    "BadFlag",
    "BadRecipe",
    "CommandLine",
    "Flag",
    "HostFacts",
    "Recipe",
    "build",
    "choose_host",
    "find_recipe",
    "imagine_host",
    "overlay",
    "read_host",
]
