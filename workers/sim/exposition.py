"""The worker's `/metrics`: vLLM's names, types, labels and units.

Durations are wall seconds, so that a scrape agrees with what a client measures at any time scale.
"""

from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from workers.sim.options import Shape
from workers.sim.scheduler import Sequence

_TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_PHASE_BUCKETS = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
_COUNT_BUCKETS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))

_COUNTERS = {
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "prompt_tokens": "Prompt tokens of admitted requests.",
    "prompt_tokens_cached": "Prompt tokens that needed no computing.",
    "generation_tokens": "Tokens emitted.",
    "num_preemptions": "Requests that had to give up their blocks.",
}
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("Arrival to first token.", _TTFT_BUCKETS),
    "request_queue_time_seconds": ("Arrival to admission.", _PHASE_BUCKETS),
    "request_prefill_time_seconds": ("Admission to first token.", _PHASE_BUCKETS),
    "e2e_request_latency_seconds": ("Arrival to last token.", _PHASE_BUCKETS),
    "request_prefill_kv_computed_tokens": ("Prompt tokens computed for a request.", _COUNT_BUCKETS),
}


@dataclass(frozen=True, slots=True)
class Gauges:
    """Readers of the engine's state; usage is 0 to 1 and counts pinned blocks only."""

    running: Callable[[], float]
    waiting: Callable[[], float]
    usage: Callable[[], float]


class Meters:
    """All series of one worker, in a registry of its own."""

    def __init__(self, model: str, shape: Shape) -> None:
        self._registry = CollectorRegistry()
        self._labels = {"engine": "0", "model_name": model}
        names = tuple(self._labels)
        self._counters = {
            name: Counter(f"vllm:{name}", text, names, registry=self._registry).labels(**self._labels)
            for name, text in _COUNTERS.items()
        }
        self._histograms = {
            name: Histogram(f"vllm:{name}", text, names, buckets=buckets, registry=self._registry).labels(
                **self._labels
            )
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        by_source = Counter(
            "vllm:prompt_tokens_by_source",
            "Prompt tokens by where their KV came from.",
            (*names, "source"),
            registry=self._registry,
        )
        self._computed = by_source.labels(**self._labels, source="local_compute")
        self._recalled = by_source.labels(**self._labels, source="local_cache_hit")
        self._finished = Counter(
            "vllm:request_success", "Finished requests.", (*names, "finished_reason"), registry=self._registry
        )
        for reason in ("stop", "length", "abort", "error", "repetition"):
            self._finished.labels(**self._labels, finished_reason=reason)
        self._declare_cache(shape)

    def watch(self, gauges: Gauges) -> None:
        """Declares the gauges over an engine's state."""
        readers = {
            "num_requests_running": ("Requests being computed.", gauges.running),
            "num_requests_waiting": ("Requests waiting for a seat, blocks or a step.", gauges.waiting),
            "kv_cache_usage_perc": ("Share of blocks in use by running requests, 0 to 1.", gauges.usage),
        }
        for name, (text, read) in readers.items():
            gauge = Gauge(f"vllm:{name}", text, tuple(self._labels), registry=self._registry)
            gauge.labels(**self._labels).set_function(read)

    @property
    def incarnation(self) -> str:
        """The engine's start in milliseconds, in hex: what a reader of `_created` derives, too."""
        created = self._registry.get_sample_value("vllm:prompt_tokens_created", self._labels)
        return f"{int((created or 0.0) * 1000):x}"

    def render(self) -> bytes:
        """Returns the text exposition."""
        return generate_latest(self._registry)

    def note_admitted(self, sequence: Sequence) -> None:
        """Counts a request's look-up in the cache."""
        tokens, cached = sequence.prompt.tokens, sequence.cached_tokens
        self._counters["prefix_cache_queries"].inc(tokens)
        self._counters["prefix_cache_hits"].inc(cached)
        self._counters["prompt_tokens"].inc(tokens)
        self._counters["prompt_tokens_cached"].inc(cached)
        self._computed.inc(tokens - cached)
        self._recalled.inc(cached)

    def note_preempted(self, count: int) -> None:
        """Counts requests that gave up their blocks."""
        self._counters["num_preemptions"].inc(count)

    def note_served(self, count: int) -> None:
        """Counts emitted tokens."""
        self._counters["generation_tokens"].inc(count)

    def note_first_token(self, sequence: Sequence, now: float) -> None:
        """Observes what led to a first token."""
        admitted = now if sequence.admitted_at is None else sequence.admitted_at
        self._histograms["time_to_first_token_seconds"].observe(now - sequence.arrived_at)
        self._histograms["request_queue_time_seconds"].observe(max(admitted - sequence.ready_at, 0.0))
        self._histograms["request_prefill_time_seconds"].observe(max(now - admitted, 0.0))
        self._histograms["request_prefill_kv_computed_tokens"].observe(sequence.prompt.tokens - sequence.cached_tokens)

    def note_finished(self, sequence: Sequence, now: float) -> None:
        """Counts a request that ended on its own."""
        self._finished.labels(**self._labels, finished_reason=sequence.finish_reason).inc()
        self._histograms["e2e_request_latency_seconds"].observe(now - sequence.arrived_at)

    def _declare_cache(self, shape: Shape) -> None:
        facts = {
            "_block_size_resolved": "True",
            "block_size": str(shape.block_size),
            "cache_dtype": "auto",
            "enable_prefix_caching": "True",
            "engine": "0",
            "kv_cache_size_tokens": str(shape.capacity_tokens),
            "num_gpu_blocks": str(shape.num_blocks),
            "prefix_caching_hash_algo": "blake2b",
        }
        gauge = Gauge("vllm:cache_config_info", "The cache's shape.", tuple(facts), registry=self._registry)
        gauge.labels(**facts).set(1)
