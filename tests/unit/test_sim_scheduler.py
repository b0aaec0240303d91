"""Continuous batching, step by step, without a clock."""

import pytest

from workers.sim.cache import PrefixCache
from workers.sim.hardware import find_hardware
from workers.sim.scheduler import Limits, Scheduler, Sequence, Step
from workers.sim.speed import Speed
from workers.sim.text import Answer, Tokenizer

BLOCK = 16
SPEED = Speed(find_hardware("H200"))


class Bench:
    """A scheduler with a cache of `blocks` blocks and steps of `step_tokens` tokens."""

    def __init__(self, blocks: int, step_tokens: int = 64, seqs: int = 8) -> None:
        self.cache = PrefixCache(blocks, BLOCK)
        self.scheduler = Scheduler(self.cache, SPEED, step_tokens, seqs)

    def submit(self, tokens: int, *, out: int = 4, first: int = 0, ready_at: float = 0.0) -> Sequence:
        prompt = Tokenizer(BLOCK).group([first, *range(1, tokens)])
        answer = Answer(0, prompt, spaced=False)
        sequence = Sequence(b"", prompt, Limits(out, None), answer, 0.0, ready_at, lambda: None)
        self.scheduler.submit(sequence)
        return sequence

    def step(self, now: float = 0.0) -> Step:
        step = self.scheduler.plan(now)
        assert step is not None
        self.scheduler.settle(step, now)
        return step

    def drain(self) -> None:
        for _ in range(10_000):
            step = self.scheduler.plan(0.0)
            if step is None:
                return
            self.scheduler.settle(step, 0.0)
        raise AssertionError(repr(self.scheduler))


def counts(step: Step) -> list[int]:
    return [count for _, count in step.work]


def test_a_long_prompt_is_cut_into_chunks_and_others_decode_beside_it() -> None:
    bench = Bench(blocks=100)
    short = bench.submit(10, out=50)
    bench.step()
    long = bench.submit(150, first=1)
    assert [counts(bench.step()) for _ in range(3)] == [[1, 63], [1, 63], [1, 24]]
    assert (short.emitted, long.emitted) == (4, 1)


def test_a_mixed_step_costs_its_prefill_and_its_decode() -> None:
    bench = Bench(blocks=100)
    bench.submit(10, out=50)
    assert bench.step().seconds == SPEED.prefill_seconds(0, 10)
    bench.submit(150, first=1)
    assert bench.step().seconds == SPEED.prefill_seconds(0, 63) + SPEED.decode_seconds(1)


def test_identical_cold_prompts_together_the_later_one_hits() -> None:
    bench = Bench(blocks=100)
    one, two = bench.submit(130), bench.submit(130)
    bench.drain()
    assert (one.cached_tokens, two.cached_tokens) == (0, 128)


def test_a_prompt_of_whole_blocks_computes_its_last_block_again() -> None:
    bench = Bench(blocks=100)
    sends = []
    for tokens in (64, 64, 65):
        sends.append(bench.submit(tokens))
        bench.drain()
    assert [sequence.cached_tokens for sequence in sends] == [0, 48, 64]


def test_generated_tokens_fill_blocks_that_are_cached() -> None:
    bench = Bench(blocks=100)
    first = bench.submit(20, out=30)
    bench.drain()
    assert len(first.keys) == 50 // BLOCK
    # Of 50 tokens the last was never computed: 49 make three full blocks.
    assert len(bench.cache.find(first.keys, 1000)) == 3


def test_requests_wait_for_blocks_in_order() -> None:
    bench = Bench(blocks=8, step_tokens=1000)
    first = bench.submit(100, out=4)
    second = bench.submit(40, first=1)
    third = bench.submit(5, first=2)
    bench.step()
    assert list(bench.scheduler.waiting) == [second, third]
    bench.drain()
    assert [one.finish_reason for one in (first, second, third)] == ["length"] * 3
    assert bench.cache.used == 0


def test_a_request_without_room_to_grow_makes_the_youngest_start_over() -> None:
    bench = Bench(blocks=4, step_tokens=1000)
    old, young = bench.submit(30, out=10), bench.submit(30, out=10, first=1)
    preempted = 0
    admitted: list[Sequence] = []
    texts = ""
    while (step := bench.scheduler.plan(0.0)) is not None:
        bench.scheduler.settle(step, 0.0)
        preempted += step.preempted
        admitted.extend(step.admitted)
        texts = "".join(young.outbox)
    assert preempted >= 1
    assert admitted == [old, young]
    assert (old.emitted, young.emitted) == (10, 10)
    again = Bench(blocks=100, step_tokens=1000)
    alone = again.submit(30, out=10, first=1)
    again.drain()
    assert "".join(alone.outbox) == texts
    assert bench.cache.used == 0


def test_a_request_that_starts_over_goes_before_those_that_wait() -> None:
    bench = Bench(blocks=4, step_tokens=1000)
    queue = [bench.submit(30, out=10, first=index) for index in range(3)]
    ended: list[Sequence] = []
    while (step := bench.scheduler.plan(0.0)) is not None:
        bench.scheduler.settle(step, 0.0)
        ended.extend(one for one in queue if one.finish_reason and one not in ended)
    assert ended == queue


@pytest.mark.parametrize(
    ("flight", "measured", "tolerance"), [(1, 65.0, 0.03), (8, 456.0, 0.03), (32, 1345.0, 0.05), (64, 1959.0, 0.10)]
)
def test_throughput_is_near_the_measured_one(flight: int, measured: float, tolerance: float) -> None:
    """Exactly 256 tokens out, 512-token unshared prompts, two rounds."""
    bench = Bench(blocks=5000, step_tokens=8192, seqs=256)
    left = [bench.submit(512, out=256, first=-index) for index in range(2 * flight)]
    bench.scheduler.waiting.clear()
    now, done = 0.0, 0
    for sequence in left[:flight]:
        bench.scheduler.submit(sequence)
    while (step := bench.scheduler.plan(now)) is not None:
        now += step.seconds
        for sequence in bench.scheduler.settle(step, now):
            if sequence.finish_reason:
                done += 1
                if done <= flight:
                    bench.scheduler.submit(left[flight + done - 1])
    # The host's work on a request is not the scheduler's: every round waits for it once.
    now += 2 * SPEED.base_seconds
    assert 2 * flight * 256 / now == pytest.approx(measured, rel=tolerance)


def test_seats_are_limited() -> None:
    bench = Bench(blocks=100, step_tokens=1000, seqs=2)
    for index in range(3):
        bench.submit(10, first=index)
    assert len(bench.step().admitted) == 2


def test_a_request_is_admitted_no_sooner_than_it_is_ready() -> None:
    bench = Bench(blocks=100)
    bench.submit(10, ready_at=5.0)
    assert bench.scheduler.plan(4.9) is None
    assert bench.step(5.0).work


def test_an_abort_frees_blocks_in_the_middle_of_a_step() -> None:
    bench = Bench(blocks=100)
    kept, gone = bench.submit(20, out=8), bench.submit(20, out=8, first=1)
    step = bench.scheduler.plan(0.0)
    assert step is not None
    bench.scheduler.abort(gone)
    bench.scheduler.abort(gone)
    assert bench.scheduler.settle(step, 0.0) == [kept]
    assert bench.cache.used == len(kept.blocks) == 2
    assert gone.finish_reason == "abort"


def test_an_answer_ends_on_its_own_with_an_empty_last_token() -> None:
    bench = Bench(blocks=100)
    sequence = bench.submit(20, out=50)
    sequence.limits = Limits(50, 5)
    bench.drain()
    assert sequence.finish_reason == "stop"
    assert sequence.emitted == 5
    assert sequence.outbox[-1] == ""
    assert all(sequence.outbox[:-1])
