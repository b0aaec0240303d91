"""Rules on room: whether weights, one longest context and the rest fit into a GPU, and whether the GPUs suffice."""

from collections.abc import Iterator
from dataclasses import replace

from workers.agent.preflight.findings import Severity, WayOut
from workers.agent.preflight.memory import Estimate, estimate, read_utilization
from workers.agent.preflight.rule import Fires, Rule
from workers.agent.preflight.situation import Missing, Situation

_GIB = 1024**3

_SLACK = 0.1
"""How far the estimate may be off: closer to the edge than this, it warns and does not refuse."""

_MOST = 0.95
"""The highest utilization that is offered: the rest is for what else the driver and the desktop keep."""


def _lacks_room_for_weights(situation: Situation) -> Fires | None:
    room = estimate(situation)
    if room.stated_cache_bytes is not None or room.weights_bytes + room.overhead_bytes < room.budget_bytes:
        return None
    return Fires(_show_room(room), tuple(_find_ways(situation)))


def _lacks_room_for_context(situation: Situation) -> Fires | None:
    room = _weigh_context(situation)
    if room is None or room.windows >= 1 - _SLACK:
        return None
    return Fires(_show_room(room), tuple(_find_ways(situation)))


def _barely_has_room(situation: Situation) -> Fires | None:
    room = _weigh_context(situation)
    if room is None or not 1 - _SLACK <= room.windows < 1 + _SLACK:
        return None
    return Fires(_show_room(room), tuple(_find_ways(situation)))


def _weigh_context(situation: Situation) -> Estimate | None:
    """Returns the estimate, `None` where vLLM fits the context itself or the weights alone are too much."""
    if situation.line.value("--max-model-len") in {"auto", "-1"}:
        return None
    room = estimate(situation)
    return None if room.stated_cache_bytes is None and not room.cache_bytes else room


def _show_room(room: Estimate) -> dict[str, object]:
    return {
        "weights": f"{room.weights_bytes / _GIB:.1f}",
        "overhead": f"{room.overhead_bytes / _GIB:.1f}",
        "budget": f"{room.budget_bytes / _GIB:.1f}",
        "memory": f"{room.memory_bytes / _GIB:.1f}",
        "cache": f"{room.cache_bytes / _GIB:.1f}",
        "window": f"{room.window_blocks * room.block_bytes / _GIB:.1f}",
        "context": room.context,
    }


def _find_ways(situation: Situation) -> Iterator[WayOut]:
    """Yields the changes after which, by the estimate, one longest context fits with slack."""
    for way in _propose(situation):
        line = situation.line.amend(way.set_flags, way.remove_flags, "preflight")
        try:
            room = estimate(replace(situation, line=line))
        except Missing:
            continue
        if room.windows >= 1 + _SLACK:
            yield way


def _propose(situation: Situation) -> Iterator[WayOut]:
    shorter = int(estimate(situation).longest_context * (1 - _SLACK)) // 1024 * 1024
    if shorter:
        yield WayOut(f"shorten the context to {shorter:,} tokens", {"--max-model-len": str(shorter)})
    hopper_case = situation.capability[0] == 9 and situation.dtype == "float16"
    if situation.capability >= (8, 9) and not hopper_case and situation.cache_dtype in {"bfloat16", "float16"}:
        yield WayOut("store the cache in FP8, half the size", {"--kv-cache-dtype": "fp8"})
    if read_utilization(situation) < _MOST:
        yield WayOut(f"let vLLM take {_MOST:.0%} of the memory", {"--gpu-memory-utilization": str(_MOST)})
    for ways in _list_splits(situation):
        yield WayOut(f"split the model over {ways} GPUs", {"--tensor-parallel-size": str(ways)})


def _list_splits(situation: Situation) -> list[int]:
    """Lists the wider tensor-parallel sizes that this machine has GPUs for and the model divides by."""
    present = situation.number("--tensor-parallel-size", 1)
    stages = situation.number("--pipeline-parallel-size", 1)
    most = (situation.host.gpu_count or 1) // stages
    return [ways for ways in (2, 4, 8, 16) if present < ways <= most and _divides(situation, ways)]


def _divides(situation: Situation, ways: int) -> bool:
    """Tells whether every GPU gets the same share of heads; key-value heads may also be repeated evenly."""
    shape = situation.shape
    heads, kv_heads = situation.know(shape.heads, "num_attention_heads"), shape.kv_heads or 1
    linear = 0 if shape.linear is None else shape.linear.key_heads
    return not (heads % ways or linear % ways or (kv_heads % ways and ways % kv_heads))


def _splits_heads_unevenly(situation: Situation) -> Fires | None:
    ways = situation.number("--tensor-parallel-size", 1)
    if ways == 1 or _divides(situation, ways):
        return None
    fitting = max(size for size in range(1, ways) if _divides(situation, size))
    way = WayOut(f"split over {fitting}", {"--tensor-parallel-size": str(fitting)})
    return Fires({"ways": ways, "heads": situation.shape.heads, "kv_heads": situation.shape.kv_heads}, (way,))


def _lacks_gpus(situation: Situation) -> Fires | None:
    ways, stages = (situation.number(f"--{kind}-parallel-size", 1) for kind in ("tensor", "pipeline"))
    count = situation.know(situation.host.gpu_count, "the number of GPUs")
    # Several hosts, or a Ray cluster, bring GPUs that this machine cannot count.
    elsewhere = situation.number("--nnodes", 1) > 1 or situation.line.value("--distributed-executor-backend") == "ray"
    if ways * stages <= count or elsewhere:
        return None
    fitting = max((size for size in (1, 2, 4, 8, 16) if size * stages <= count), default=None)
    way = () if fitting is None else (WayOut(f"split over {fitting}", {"--tensor-parallel-size": str(fitting)}),)
    return Fires({"needed": ways * stages, "count": count}, way)


_ROOM = "of $budget GiB that vLLM may take of $memory GiB, weights take $weights GiB and the rest about $overhead GiB"

RULES = (
    Rule(
        "weights-do-not-fit",
        Severity.ERROR,
        _lacks_room_for_weights,
        f"the model does not fit: {_ROOM}, which leaves nothing for the cache",
        (WayOut("serve a smaller or more strongly quantized build of the model"),),
    ),
    Rule(
        "context-does-not-fit",
        Severity.ERROR,
        _lacks_room_for_context,
        f"one request of $context tokens does not fit: {_ROOM}; of the $cache GiB left it would take $window GiB",
    ),
    Rule(
        "context-barely-fits",
        Severity.WARNING,
        _barely_has_room,
        f"one request of $context tokens fits barely or not: {_ROOM}; of the $cache GiB left it would take $window "
        "GiB, and the estimate may be off by a tenth",
    ),
    Rule(
        "split-does-not-divide-heads",
        Severity.ERROR,
        _splits_heads_unevenly,
        "--tensor-parallel-size $ways does not divide the model's $heads attention heads and $kv_heads key-value heads",
    ),
    Rule(
        "too-few-gpus",
        Severity.ERROR,
        _lacks_gpus,
        "tensor and pipeline parallelism need $needed GPUs; this machine has $count",
    ),
)
