"""What an engine's Prometheus text says: the shape of its cache, and when it started.

Pure: text in, facts out; an absent, broken or contradictory figure is `None`.
Names and labels are vLLM's; the values in `vllm:cache_config_info` are Python's `str` of each setting.
"""

from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from workers.agent.agreement import agree

_HELD = ("vllm:num_requests_running", "vllm:num_requests_waiting")
# A long prefill moves the cache's use with each chunk, and the counters only at its end.
_MOVING = ("vllm:kv_cache_usage_perc", "vllm:prompt_tokens_total", "vllm:generation_tokens_total")


@dataclass(frozen=True, slots=True)
class CacheShape:
    """An engine's prefix cache; `block_size` in tokens, `capacity_tokens` summed over data-parallel ranks."""

    block_size: int | None
    capacity_tokens: int | None
    prefix_caching: bool | None
    kv_cache_dtype: str | None


@dataclass(frozen=True, slots=True)
class Work:
    """The requests that an engine holds, running or waiting, and figures of which one moves with every step."""

    requests: int
    mark: tuple[float, ...]


def read_cache(exposition: str) -> CacheShape:
    """Reads the cache's shape; a fact on which the ranks differ is `None`."""
    ranks = {labels.get("engine"): labels for labels, _ in _select(exposition, "vllm:cache_config_info")}.values()
    capacities = [_read_capacity(labels) for labels in ranks]
    known = [capacity for capacity in capacities if capacity is not None]
    return CacheShape(
        block_size=agree(_read_count(labels.get("block_size")) for labels in ranks),
        capacity_tokens=sum(known) if known and len(known) == len(capacities) else None,
        prefix_caching=agree(
            {"True": True, "False": False}.get(labels.get("enable_prefix_caching", "")) for labels in ranks
        ),
        kv_cache_dtype=agree(labels.get("cache_dtype") for labels in ranks),
    )


def read_incarnation(exposition: str) -> str | None:
    """Names the engine's life by its start in milliseconds, in hex; `None` when no start time is shown.

    The process's own start comes first; a counter's `_created` twin is set once, while the engine starts.
    """
    for name in ("process_start_time_seconds", "vllm:prompt_tokens_created"):
        starts = [value for _, value in _select(exposition, name)]
        if starts:
            return f"{int(min(starts) * 1000):x}"
    created = [value for _, value in _select(exposition, "vllm:", "_created")]
    return f"{int(min(created) * 1000):x}" if created else None


def read_work(exposition: str) -> Work | None:
    """Reads what shows whether an engine computes; `None` when the page does not hold it."""
    held = [value for name in _HELD for _, value in _select(exposition, name, name)]
    mark = tuple(value for name in _MOVING for _, value in _select(exposition, name, name))
    return Work(requests=int(sum(held)), mark=mark) if held and mark else None


def _select(exposition: str, prefix: str, suffix: str = "") -> list[tuple[dict[str, str], float]]:
    """Returns labels and value of every sample so named.

    Only those lines are parsed: the rest of a busy engine's page is some thousand histogram buckets.
    """
    lines = [
        line
        for line in exposition.splitlines()
        if line.startswith(prefix) and line.partition("{")[0].partition(" ")[0].endswith(suffix)
    ]
    try:
        families = list(text_string_to_metric_families("\n".join([*lines, ""])))
    except ValueError:
        return []
    return [(sample.labels, sample.value) for family in families for sample in family.samples]


def _read_capacity(labels: dict[str, str]) -> int | None:
    """Returns one rank's tokens: as stated (vLLM 0.32 and later), else its blocks times their size."""
    stated = _read_count(labels.get("kv_cache_size_tokens"))
    if stated is not None:
        return stated
    blocks, size = _read_count(labels.get("num_gpu_blocks")), _read_count(labels.get("block_size"))
    return None if blocks is None or size is None else blocks * size


def _read_count(text: str | None) -> int | None:
    """Reads a positive whole number; vLLM writes `None` for what is not set."""
    return int(text) if text is not None and text.isdecimal() and int(text) > 0 else None
