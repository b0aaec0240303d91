"""What the deliveries of a run must show, as bars; pure functions of what was noted."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from tests.support.vllm.drive import Delivery
from tests.support.vllm.worker import BLOCK_TOKENS
from workers.bench.bars import Bar


def judge(deliveries: Sequence[Delivery], counted: Mapping[str, int]) -> list[Bar]:
    """Returns the run's bars. `counted` is by worker what its engine itself counted as cache hits, in tokens."""
    followers = pair_second(deliveries)
    noted = sum_cached(deliveries)
    apart = sum(abs(counted.get(worker, 0) - noted[worker]) for worker in counted.keys() | noted.keys())
    return [
        Bar(
            "second_request_same_worker",
            share(a.worker == b.worker for a, b in followers),
            ">=",
            1.0,
            "share",
        ),
        Bar("second_request_within_one_block", share(agrees(b) for _, b in followers), ">=", 1.0, "share"),
        Bar("expected_within_one_block", share(map(agrees, deliveries)), ">=", 0.95, "share"),
        Bar("hits_unlike_engine_counter", apart, "<=", 0, "tokens"),
    ]


def pair_second(deliveries: Iterable[Delivery]) -> list[tuple[Delivery, Delivery]]:
    """Returns every session's first and second request."""
    by_turn = {(delivery.session, delivery.turn): delivery for delivery in deliveries}
    return [(by_turn[session, 0], second) for (session, turn), second in by_turn.items() if turn == 1]


def share_at_home(deliveries: Iterable[Delivery]) -> float | None:
    """Returns the share of third and later requests that went where the request before them went."""
    workers = {(delivery.session, delivery.turn): delivery.worker for delivery in deliveries}
    return share(worker == workers[name, turn - 1] for (name, turn), worker in workers.items() if turn > 1)


def sum_cached(deliveries: Iterable[Delivery]) -> Counter[str]:
    """Returns the delivered cached tokens by worker."""
    total: Counter[str] = Counter()
    for delivery in deliveries:
        total[delivery.worker] += delivery.cached or 0
    return total


def agrees(delivery: Delivery) -> bool:
    """Tells whether expected and delivered hit lie within one block; an engine that says nothing does not agree."""
    return delivery.cached is not None and abs(delivery.expected - delivery.cached) <= BLOCK_TOKENS


def share(outcomes: Iterable[bool]) -> float | None:
    """Returns the share that holds, or None of nothing."""
    listed = list(outcomes)
    return sum(listed) / len(listed) if listed else None


def median_ttft(deliveries: Iterable[Delivery], turn: int) -> float | None:
    """Returns the median seconds to first content over the streamed requests of one turn (from 0)."""
    times = [d.ttft for d in deliveries if d.turn == turn and d.ttft is not None]
    return median(times) if times else None
