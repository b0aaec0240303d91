"""Continuous batching as vLLM does it: which tokens are computed in the next step, and what the step yields.

Pure: no clock and no I/O; the engine says when a step begins and when it is over.
Running requests come first, in the order they were admitted; waiting ones follow, first come first served, as long
as the step has tokens, seats and blocks for them. A long prompt is cut into chunks and shares its steps.
A running request that finds no block makes the youngest one give up all of its own.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from workers.sim.cache import PrefixCache, chain_key
from workers.sim.speed import Speed
from workers.sim.text import Answer, Prompt


@dataclass(frozen=True, slots=True)
class Limits:
    """How an answer may end: after `longest` tokens, or on its own as token number `end_at` (`None`: never)."""

    longest: int
    end_at: int | None


@dataclass(slots=True, eq=False)
class Sequence:
    """One request inside the engine; times are the engine's clock."""

    root: bytes
    prompt: Prompt
    limits: Limits
    answer: Answer
    arrived_at: float
    ready_at: float
    on_change: Callable[[], None]
    tokens: int = field(init=False)
    """Prompt tokens and emitted ones."""
    keys: list[bytes] = field(init=False)
    tail: list[bytes] = field(init=False)
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    outbox: list[str] = field(default_factory=list)
    """Texts of emitted tokens that nobody has taken yet."""
    finish_reason: str | None = None
    admitted_at: float | None = None
    first_token_at: float | None = None

    def __post_init__(self) -> None:
        """Chains the keys of the prompt's full blocks."""
        self.tokens = self.prompt.tokens
        self.tail = list(self.prompt.tail)
        self.keys = []
        parent = self.root
        for content in self.prompt.blocks:
            parent = chain_key(parent, content)
            self.keys.append(parent)

    @property
    def emitted(self) -> int:
        """Tokens of the answer so far."""
        return self.tokens - self.prompt.tokens

    def append(self, content: bytes, block_size: int) -> None:
        """Adds one emitted token; a block that it fills gets its key."""
        self.tokens += 1
        self.tail.append(content)
        if len(self.tail) == block_size:
            self.keys.append(chain_key(self.keys[-1] if self.keys else self.root, b"".join(self.tail)))
            self.tail.clear()


@dataclass(frozen=True, slots=True)
class Step:
    """One pass of the model: tokens to compute by request, and how long it takes in GPU seconds.

    `admitted` are the requests that run for the first time; one that starts over is not among them.
    """

    work: tuple[tuple[Sequence, int], ...]
    admitted: tuple[Sequence, ...]
    preempted: int
    seconds: float


class Scheduler:
    """Owns the queue, the running requests and their blocks."""

    def __init__(self, cache: PrefixCache, speed: Speed, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        self._cache = cache
        self._speed = speed
        self._max_tokens = max_num_batched_tokens
        self._max_seqs = max_num_seqs
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def __repr__(self) -> str:
        return f"<Scheduler {len(self.running)} running, {len(self.waiting)} waiting, {self._cache!r}>"

    def submit(self, sequence: Sequence) -> None:
        """Queues a request; requests are ready in the order they are submitted."""
        self.waiting.append(sequence)

    def plan(self, now: float) -> Step | None:
        """Chooses the next step's work and pins its blocks; `None` when nothing can be computed now."""
        draft = _StepDraft(self._max_tokens)
        self._go_on(draft)
        if not draft.preempted:
            self._take_in(draft, now)
        if not draft.work:
            return None
        seconds = draft.seconds + self._speed.decode_seconds(draft.decoding)
        return Step(tuple(draft.work), tuple(draft.admitted), draft.preempted, seconds)

    def settle(self, step: Step, now: float) -> list[Sequence]:
        """Books a step that is over; returns the requests that got a token."""
        served: list[Sequence] = []
        for sequence, count in step.work:
            if sequence.finish_reason is not None:
                continue
            sequence.computed += count
            if sequence.computed == sequence.tokens:
                self._emit(sequence, now)
                served.append(sequence)
        return served

    def abort(self, sequence: Sequence) -> None:
        """Ends a request at once and frees its blocks; harmless when it has ended already."""
        if sequence.finish_reason is None:
            self._finish(sequence, "abort")

    def _go_on(self, draft: "_StepDraft") -> None:
        """Adds the running requests' next tokens."""
        for sequence in tuple(self.running):
            count = min(sequence.tokens - sequence.computed, draft.budget)
            if count == 0 or (draft.preempted and sequence not in self.running):
                continue
            preempted = self._make_room(sequence, count)
            draft.preempted += preempted
            if preempted and sequence not in self.running:
                break
            if sequence.emitted and count == 1:
                draft.decoding += 1
            else:
                draft.seconds += self._speed.prefill_seconds(sequence.computed, count)
            self._book(draft, sequence, count)

    def _take_in(self, draft: "_StepDraft", now: float) -> None:
        """Admits waiting requests and adds their first tokens."""
        while draft.budget and (sequence := self._admit(draft, now)) is not None:
            count = min(sequence.tokens - sequence.computed, draft.budget)
            draft.seconds += self._speed.recall_seconds(sequence.computed)
            draft.seconds += self._speed.prefill_seconds(sequence.computed, count)
            self._book(draft, sequence, count)

    def _book(self, draft: "_StepDraft", sequence: Sequence, count: int) -> None:
        """Adds work, and makes the blocks findable that it fills: a later request in the same step hits them."""
        size = self._cache.block_size
        for index in range(sequence.computed // size, (sequence.computed + count) // size):
            self._cache.publish(sequence.blocks[index], sequence.keys[index])
        draft.work.append((sequence, count))
        draft.budget -= count

    def _admit(self, draft: "_StepDraft", now: float) -> Sequence | None:
        """Moves the first waiting request to the running ones, with blocks for all of its tokens."""
        if not self.waiting or len(self.running) >= self._max_seqs:
            return None
        sequence = self.waiting[0]
        if sequence.ready_at > now:
            return None
        held = self._cache.find(sequence.keys, sequence.tokens)
        size = self._cache.block_size
        fresh = self._cache.acquire(held, -(-sequence.tokens // size) - len(held))
        if fresh is None:
            return None
        self.waiting.popleft()
        self.running.append(sequence)
        sequence.blocks = held + fresh
        sequence.computed = len(held) * size
        if sequence.admitted_at is None:
            sequence.admitted_at = now
            sequence.cached_tokens = sequence.computed
            draft.admitted.append(sequence)
        return sequence

    def _make_room(self, sequence: Sequence, count: int) -> int:
        """Takes the blocks for `count` more tokens; returns how many requests were preempted for it."""
        missing = -(-(sequence.computed + count) // self._cache.block_size) - len(sequence.blocks)
        preempted = 0
        while missing > 0:
            fresh = self._cache.acquire((), missing)
            if fresh is not None:
                sequence.blocks.extend(fresh)
                break
            victim = self.running.pop()
            self._cache.release(victim.blocks)
            victim.blocks = []
            victim.computed = 0
            self.waiting.appendleft(victim)
            preempted += 1
            if victim is sequence:
                break
        return preempted

    def _emit(self, sequence: Sequence, now: float) -> None:
        if sequence.first_token_at is None:
            sequence.first_token_at = now
        ends = sequence.emitted + 1 == sequence.limits.end_at
        text = "" if ends else sequence.answer.word()
        sequence.append(Answer.end if ends else text.encode(), self._cache.block_size)
        sequence.outbox.append(text)
        if ends:
            self._finish(sequence, "stop")
        elif sequence.emitted == sequence.limits.longest:
            self._finish(sequence, "length")
        else:
            sequence.on_change()

    def _finish(self, sequence: Sequence, reason: str) -> None:
        sequence.finish_reason = reason
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self._cache.release(sequence.blocks)
        sequence.blocks = []
        sequence.on_change()


@dataclass(slots=True)
class _StepDraft:
    """A step while it is put together."""

    budget: int
    work: list[tuple[Sequence, int]] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    seconds: float = 0.0
    decoding: int = 0
    preempted: int = 0
