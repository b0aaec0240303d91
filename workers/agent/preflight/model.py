"""Where a model's files lie on this machine, and what they say: its configuration and the size of its weights.

A folder is read as it is; a repository's name is looked up in the Hugging Face cache. No network is asked.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What lies in a model's folder; `weights_bytes` is `None` when the weights are not all there."""

    config: Mapping[str, Any]
    weights_bytes: int | None = None


def read_model(model: str, revision: str | None = None) -> ModelFiles | None:
    """Reads a model's files; `None` when it has no readable config.json on this machine."""
    folder = _find_folder(model, revision)
    config = None if folder is None else _read_json(folder / "config.json")
    if folder is None or config is None:
        return None
    beside = _read_json(folder / "hf_quant_config.json")
    if beside is not None and "quantization_config" not in config:
        config = config | {"quantization_config": {"quant_method": "modelopt"} | beside.get("quantization", {})}
    return ModelFiles(config, _weigh(folder))


def _find_folder(model: str, revision: str | None) -> Path | None:
    """Returns the folder itself, or the cache's snapshot of a repository; the layout is huggingface_hub's."""
    local = Path(model).expanduser()
    if local.is_dir():
        return local
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()
    repository = cache / f"models--{model.replace('/', '--')}"
    wanted = revision or "main"
    try:
        commit = (repository / "refs" / wanted).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        commit = wanted
    snapshot = repository / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None


def _weigh(folder: Path) -> int | None:
    """Adds up the safetensors files; `None` when there are none, or the index names one that is not there."""
    index = _read_json(folder / "model.safetensors.index.json")
    names = set(index.get("weight_map", {}).values()) if index else {path.name for path in folder.glob("*.safetensors")}
    try:
        return sum((folder / name).stat().st_size for name in names) or None
    except OSError:
        return None


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
