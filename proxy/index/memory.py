"""The index on the hot path: which worker is believed to hold which part of the prompt tree.

An entry is *assumed* at dispatch, so that a burst of siblings follows the first, and corrected at settle. Each worker's
set is bounded by the capacity that its engine reports, and gives way as the engine does: least recently used first,
and of one prompt the tail before the head. What a worker holds is always a prefix: a run goes before its parent.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ..core.types import Overlap, Room
from .tree import MOST_BLOCKS, PromptTree, Run, Trail

# Bound for a worker that does not report its capacity: enough for a handful of full windows, small in memory.
UNREPORTED_CAPACITY_TOKENS = 1_000_000
# A served prompt of this length spans at least one cache block of any engine seen (hybrids: up to 1,072 tokens), so a
# later hit of nothing at all means that the engine has given it up.
EVIDENT_TOKENS = 2048
# When something must go, at least this share of a run goes: splitting off single blocks would fray the tree.
LEAST_SHARE = 8


@dataclass(slots=True)
class Shelf:
    """What one incarnation of one worker is believed to hold.

    Attributes:
        used: for each run held, when it was last used (seconds on the caller's clock).
        leaves: the runs that no held run continues, least recently used first: what may go.
        kids: for each run held, how many held runs continue it.
    """

    worker: str
    incarnation: str
    capacity_tokens: int | None
    bit: int
    used: dict[Run, float] = field(default_factory=dict)
    leaves: OrderedDict[Run, None] = field(default_factory=OrderedDict)
    kids: dict[Run, int] = field(default_factory=dict)
    held_tokens: int = 0
    held_blocks: int = 0

    @property
    def bound(self) -> int:
        """The most tokens that this shelf keeps."""
        return UNREPORTED_CAPACITY_TOKENS if self.capacity_tokens is None else self.capacity_tokens

    def room(self, now: float) -> Room:
        """Tells what a new prompt would push out."""
        coldest = next(iter(self.leaves), None)
        free = None if self.capacity_tokens is None else self.capacity_tokens - self.held_tokens
        return Room(free, None if coldest is None else max(now - self.used[coldest], 0.0))


@dataclass(frozen=True, slots=True)
class Assumption:
    """What `assume` did for one attempt, so that settle can correct it.

    Attributes:
        shelf: whose.
        trail, tip: the prompt, and the run that it ends with.
        used: when this attempt used its runs.
        depth: leading blocks that had been held before.
        was_used: for the runs of these, when they had been used before.
        evicted: what had to go for it, with when it had been used; the first to go is first.
        is_evident: a served prompt long enough ends within what was held: its absence is news.
    """

    shelf: Shelf
    trail: Trail
    tip: Run
    used: float
    depth: int
    was_used: dict[Run, float]
    evicted: tuple[tuple[Run, float], ...]
    is_evident: bool


class MemoryIndex(PromptTree):
    """Which worker holds which prefix, in this process."""

    def __init__(self, bound: int = MOST_BLOCKS) -> None:
        super().__init__(bound)
        self._shelves: dict[str, Shelf] = {}
        self._by_bit: dict[int, Shelf] = {}
        self.evicted_blocks = 0

    def __repr__(self) -> str:
        shelves = ", ".join(f"{worker}: {shelf.held_blocks}" for worker, shelf in self._shelves.items())
        return f"<MemoryIndex {len(self)} blocks ({shelves})>"

    def begin(self, worker: str, incarnation: str, capacity_tokens: int | None) -> bool:
        """Opens the shelf of a worker. A known incarnation keeps what it has; a new one starts empty.

        Returns whether the shelf is new.
        """
        shelf = self._shelves.get(worker)
        if shelf is not None and shelf.incarnation == incarnation:
            shelf.capacity_tokens = capacity_tokens
            self._trim(shelf)
            return False
        self.forget(worker)
        bit = 1
        while bit in self._by_bit:
            bit <<= 1
        self._shelves[worker] = self._by_bit[bit] = Shelf(worker, incarnation, capacity_tokens, bit)
        return True

    def forget(self, worker: str) -> None:
        """Drops a worker's set for good: this life of the engine has ended."""
        self.suspend(worker)

    def suspend(self, worker: str) -> None:
        """Closes a worker's shelf: it is out of sight, but its engine may come back with all that it held."""
        shelf = self._shelves.pop(worker, None)
        if shelf is not None:
            del self._by_bit[shelf.bit]
            for run in shelf.used:
                run.holders &= ~shelf.bit
                self._rest(run)

    def overlap(self, trail: Trail, workers: Iterable[str], now: float) -> Overlap:
        """Tells how many leading tokens of a prompt each of the workers is believed to hold."""
        shelves = [shelf for worker in workers if (shelf := self._shelves.get(worker)) is not None]
        wanted = 0
        for shelf in shelves:
            wanted |= shelf.bit
        tokens: dict[str, int] = {}
        run, upto = trail.run, trail.known_tokens
        while run is not None and wanted:
            found = run.holders & wanted
            if found:
                wanted &= ~found
                tokens |= {shelf.worker: upto for shelf in shelves if shelf.bit & found}
            run = run.parent
            upto = run.end_tokens if run is not None else 0
        return Overlap(tokens, {shelf.worker: shelf.room(now) for shelf in shelves})

    def assume(self, worker: str, trail: Trail, now: float) -> Assumption | None:
        """Records at dispatch that a worker is about to hold a prompt. None when there is nothing to record."""
        shelf = self._shelves.get(worker)
        tip = None if shelf is None else self.grow(trail)
        if shelf is None or tip is None:
            return None
        added: list[Run] = []
        was_used: dict[Run, float] = {}
        run: Run | None = tip
        while run is not None:
            before = shelf.used.get(run)
            if before is None:
                added.append(run)
            else:
                was_used[run] = before
                shelf.used[run] = now
            run = run.parent
        depth = max((run.end for run in was_used), default=0)
        is_evident = any(run.turn and run.end_tokens >= EVIDENT_TOKENS for run in was_used)
        added.reverse()
        for run in added:
            self._hold(shelf, run, now)
        if tip in shelf.leaves:
            shelf.leaves.move_to_end(tip)
        evicted = [(run, used) for run, used in self._trim(shelf) if used != now]  # not its own overlong tail
        self._shrink()
        return Assumption(shelf, trail, tip, now, depth, was_used, tuple(evicted), is_evident)

    def withdraw(self, assumption: Assumption) -> None:
        """Takes an assumption back: the attempt ended before its prompt was computed.

        What another attempt has used since stays as it is; what had to go comes back while there is room for it.
        """
        shelf = assumption.shelf
        if not self._is_live(shelf):
            return
        mine: list[Run] = []
        run: Run | None = assumption.tip
        before = assumption.used
        while run is not None:
            before = assumption.was_used.get(run, before)
            if shelf.used.get(run) == assumption.used and run.first < assumption.depth:
                shelf.used[run] = before  # a head that has been cut off since was used when its tail was
            elif shelf.used.get(run) == assumption.used:
                mine.append(run)
            run = run.parent
        for run in mine:
            if run not in shelf.kids:
                self._drop(shelf, run)
        self._restore(shelf, reversed(assumption.evicted))
        if assumption.tip in shelf.leaves:
            self._reorder(shelf)

    def confirm(
        self, assumption: Assumption, prompt_tokens: int | None, delivered_tokens: int | None, turn: int
    ) -> int:
        """Corrects the view by what the engine counted and delivered; None is unknown and corrects nothing.

        The prompt is computed, so it is there whatever was delivered. But where all of a prompt that had been served
        was missing, the engine had given it up, and with it, being an LRU, everything that had been used no later:
        that goes. Returns how many runs went.
        """
        tip = assumption.tip
        grown = self.learn(assumption.trail, tip, prompt_tokens, turn)
        for shelf in self._holders_of(tip):
            shelf.held_tokens += grown
            self._trim(shelf)
        shelf = assumption.shelf
        if not self._is_live(shelf):
            return 0
        stale: list[Run] = []
        if delivered_tokens == 0 and assumption.is_evident:
            limit = max(assumption.was_used.values())
            stale = [run for run, used in shelf.used.items() if used <= limit]
            for run in sorted(stale, key=lambda run: (shelf.used[run], -run.first)):
                self._drop(shelf, run)
        return len(stale)

    def held(self, worker: str) -> list[tuple[Run, float]]:
        """Returns the runs that a worker is believed to hold, and when each was last used."""
        shelf = self._shelves.get(worker)
        return [] if shelf is None else list(shelf.used.items())

    def shelf_sizes(self) -> dict[str, tuple[int, int]]:
        """Returns blocks and tokens believed held, by worker."""
        return {worker: (shelf.held_blocks, shelf.held_tokens) for worker, shelf in self._shelves.items()}

    def _is_live(self, shelf: Shelf) -> bool:
        return self._shelves.get(shelf.worker) is shelf

    def _holders_of(self, run: Run) -> Iterator[Shelf]:
        left = run.holders
        while left:
            bit = left & -left
            left ^= bit
            yield self._by_bit[bit]

    def _hold(self, shelf: Shelf, run: Run, used: float) -> None:
        run.holders |= shelf.bit
        self._idle.pop(run, None)
        shelf.used[run] = used
        shelf.leaves[run] = None
        shelf.held_tokens += run.weight
        shelf.held_blocks += len(run.blocks)
        if run.parent is not None:
            shelf.kids[run.parent] = shelf.kids.get(run.parent, 0) + 1
            shelf.leaves.pop(run.parent, None)

    def _drop(self, shelf: Shelf, run: Run) -> None:
        run.holders &= ~shelf.bit
        del shelf.used[run]
        shelf.leaves.pop(run, None)
        shelf.kids.pop(run, None)
        shelf.held_tokens -= run.weight
        shelf.held_blocks -= len(run.blocks)
        parent = run.parent
        if parent is not None and parent in shelf.kids:
            shelf.kids[parent] -= 1
            if not shelf.kids[parent]:
                del shelf.kids[parent]
                self._add_leaf(shelf, parent)
        self._rest(run)

    def _add_leaf(self, shelf: Shelf, run: Run) -> None:
        """Puts a run among the leaves by its time: mostly first, since it was used with the one that has just gone."""
        coldest = next(iter(shelf.leaves), run)
        shelf.leaves[run] = None
        if shelf.used[run] <= shelf.used[coldest]:
            shelf.leaves.move_to_end(run, last=False)
        else:
            self._reorder(shelf)

    def _trim(self, shelf: Shelf) -> list[tuple[Run, float]]:
        """Lets go of the least recently used until the capacity is kept. Returns what went, the first first."""
        gone: list[tuple[Run, float]] = []
        while shelf.held_tokens > shelf.bound and shelf.leaves:
            run = next(iter(shelf.leaves))
            excess = max(shelf.held_tokens - shelf.bound, run.weight // LEAST_SHARE)
            if len(run.blocks) > 1 and excess < run.weight:
                keep = max(len(run.blocks) - -(-len(run.blocks) * excess // run.weight), 1)
                self.cut(run, keep)  # `run` stays as the tail
            gone.append((run, shelf.used[run]))
            self.evicted_blocks += len(run.blocks)
            self._drop(shelf, run)
        return gone

    def _shrink(self) -> None:
        """Keeps the bound of the whole tree: when everything is held, the fullest shelf gives way."""
        while not self.prune():
            fullest = max(self._shelves.values(), key=lambda shelf: shelf.held_blocks)
            run = next(iter(fullest.leaves), None)
            if run is None:
                return
            self.evicted_blocks += len(run.blocks)
            self._drop(fullest, run)

    def _restore(self, shelf: Shelf, runs: Iterable[tuple[Run, float]]) -> None:
        """Puts runs back that were held before, parents first, while there is room."""
        is_changed = False
        for run, used in runs:
            is_known = self._where.get(run.key) is run
            has_parent = run.parent is None or run.parent in shelf.used
            if is_known and has_parent and run not in shelf.used and shelf.held_tokens + run.weight <= shelf.bound:
                self._hold(shelf, run, used)
                is_changed = True
        if is_changed:
            self._reorder(shelf)

    def _reorder(self, shelf: Shelf) -> None:
        shelf.leaves = OrderedDict.fromkeys(sorted(shelf.leaves, key=lambda run: shelf.used[run]))

    def _was_split(self, head: Run, tail: Run) -> None:
        for shelf in self._holders_of(head):
            shelf.used[head] = shelf.used[tail]
            shelf.kids[head] = 1
