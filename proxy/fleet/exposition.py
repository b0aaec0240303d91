"""Reads the few samples that matter from an engine's `/metrics` page (`vllm:*`), by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from .registry import EngineLoad

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
KV_USAGE = "vllm:kv_cache_usage_perc"
CACHE_CONFIG = "vllm:cache_config_info"
# The moment the engine's process began: any of these names one life of it.
STARTED = ("process_start_time_seconds", "vllm:prompt_tokens_created", "vllm:generation_tokens_created")
WANTED = (RUNNING, WAITING, KV_USAGE, CACHE_CONFIG, *STARTED)


@dataclass(frozen=True, slots=True)
class EnginePage:
    """What the page said; None where it said nothing."""

    load: EngineLoad
    block_tokens: int | None
    capacity_tokens: int | None
    prefix_caching: bool | None
    kv_cache_dtype: str | None
    started: str | None


def read_page(text: str) -> EnginePage:
    """Reads a page of metrics. Ranks of one engine are taken together; a page of something else reads as all unknown.

    Raises:
        ValueError: a wanted line is not in the exposition format.
    """
    # The whole page has hundreds of histogram lines; parsing only the wanted ones keeps the event loop free.
    lines = [line for line in text.splitlines() if line.startswith(WANTED)]
    values: dict[str, list[float]] = {}
    configs: list[Mapping[str, str]] = []
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            values.setdefault(sample.name, []).append(sample.value)
            if sample.name == CACHE_CONFIG:
                configs.append(sample.labels)
    config = configs[0] if configs else {}
    capacities = [capacity_of(rank) for rank in configs]
    capacity = sum(known for known in capacities if known is not None)
    started = next((min(values[name]) for name in STARTED if name in values), None)
    usage = values.get(KV_USAGE)
    return EnginePage(
        load=EngineLoad(
            running=as_count(sum(values[RUNNING]) if RUNNING in values else None),
            waiting=as_count(sum(values[WAITING]) if WAITING in values else None),
            kv_usage=None if usage is None else sum(usage) / len(usage),
        ),
        block_tokens=as_count(config.get("block_size")),
        capacity_tokens=capacity or None,
        prefix_caching={"True": True, "False": False}.get(config.get("enable_prefix_caching", "")),
        kv_cache_dtype=config.get("cache_dtype"),
        started=None if started is None else f"{started:.3f}",
    )


def capacity_of(config: Mapping[str, str]) -> int | None:
    """Returns the tokens that one rank's cache can hold: as it says, else blocks times their size."""
    said = as_count(config.get("kv_cache_size_tokens"))
    block, blocks = as_count(config.get("block_size")), as_count(config.get("num_gpu_blocks"))
    return block * blocks if said is None and block is not None and blocks is not None else said


def as_count(value: str | float | None) -> int | None:
    """Returns a whole number, or None for what is absent or no number ("None" is what engines write for unset)."""
    try:
        return None if value is None else int(float(value))
    except (ValueError, OverflowError):
        return None
