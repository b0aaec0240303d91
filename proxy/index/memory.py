"""The index on the hot path: block hash → workers, and for each worker an LRU of what it is believed to hold.

An entry is *assumed* at dispatch, so that a burst of siblings follows the first, and corrected at settle. Each worker's
set is bounded by the capacity that its engine reports, and gives way as the engine does: least recently used first,
and of one prompt the tail before the head.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..core.blocks import Blocks
from ..core.types import Overlap, Room
from .history import History

# Bound for a worker that does not report its capacity: enough for a handful of full windows, small in memory.
UNREPORTED_CAPACITY_TOKENS = 1_000_000


@dataclass(slots=True)
class Entry:
    """One block on one worker: its tokens, and when it was last used (seconds on the caller's clock)."""

    tokens: int
    used: float


@dataclass(slots=True)
class Shelf:
    """What one incarnation of one worker is believed to hold, least recently used first."""

    incarnation: str
    capacity_tokens: int | None
    bit: int
    entries: OrderedDict[int, Entry] = field(default_factory=OrderedDict)
    held_tokens: int = 0

    @property
    def bound(self) -> int:
        """The most tokens that this shelf keeps."""
        return UNREPORTED_CAPACITY_TOKENS if self.capacity_tokens is None else self.capacity_tokens

    def room(self, now: float) -> Room:
        """Tells what a new prompt would push out."""
        coldest = next(iter(self.entries.values()), None)
        free = None if self.capacity_tokens is None else self.capacity_tokens - self.held_tokens
        return Room(free, None if coldest is None else max(now - coldest.used, 0.0))


@dataclass(frozen=True, slots=True)
class Assumption:
    """What `assume` did for one attempt, so that settle can take it back.

    Attributes:
        worker, incarnation: whose shelf.
        depth: leading blocks that were there before.
        was_used: when the first `depth` blocks had been used before this attempt, shallowest first.
    """

    worker: str
    incarnation: str
    depth: int
    was_used: tuple[float, ...]


class MemoryIndex:
    """Which worker holds which prefix, in this process."""

    def __init__(self, history: History) -> None:
        self.history = history
        self._shelves: dict[str, Shelf] = {}
        self._holders: dict[int, int] = {}
        self._free_bits: list[int] = []
        self.evicted_blocks = 0

    def __repr__(self) -> str:
        shelves = ", ".join(f"{worker}: {len(shelf.entries)}" for worker, shelf in self._shelves.items())
        return f"<MemoryIndex {len(self._holders)} blocks ({shelves})>"

    def __len__(self) -> int:
        return sum(len(shelf.entries) for shelf in self._shelves.values())

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
        bit = self._free_bits.pop() if self._free_bits else 1 << len(self._shelves)
        self._shelves[worker] = Shelf(incarnation, capacity_tokens, bit)
        return True

    def forget(self, worker: str) -> None:
        """Drops a worker's set for good: this life of the engine has ended."""
        self.suspend(worker)

    def suspend(self, worker: str) -> None:
        """Closes a worker's shelf: it is out of sight, but its engine may come back with all that it held."""
        shelf = self._shelves.pop(worker, None)
        if shelf is not None:
            for block in shelf.entries:
                self._release(block, shelf.bit)
            self._free_bits.append(shelf.bit)

    def overlap(self, blocks: Blocks, model: str, workers: Iterable[str], now: float) -> Overlap:
        """Tells how many leading tokens of a prompt each of the workers is believed to hold."""
        shelves = {worker: shelf for worker in workers if (shelf := self._shelves.get(worker)) is not None}
        depths = self.depths(blocks.hashes, shelves)
        return Overlap(
            tokens={worker: self.history.tokens_at(blocks, depth, model) for worker, depth in depths.items()},
            room={worker: shelf.room(now) for worker, shelf in shelves.items()},
        )

    def depths(self, hashes: Sequence[int], shelves: dict[str, Shelf]) -> dict[str, int]:
        """Returns the leading blocks that each shelf holds, for those that hold any."""
        bits = {worker: shelf.bit for worker, shelf in shelves.items()}
        holding = 0
        for bit in bits.values():
            holding |= bit
        found: dict[str, int] = {}
        depth = 0
        for block in hashes:
            still = holding & self._holders.get(block, 0)
            if still != holding:
                found |= {worker: depth for worker, bit in bits.items() if holding & ~still & bit}
                holding = still
                if not holding:
                    break
            depth += 1
        found |= {worker: depth for worker, bit in bits.items() if holding & bit}
        return {worker: depth for worker, depth in found.items() if depth}

    def assume(self, worker: str, blocks: Blocks, model: str, now: float) -> Assumption | None:
        """Records at dispatch that a worker is about to hold a prompt. None when the worker has no shelf."""
        shelf = self._shelves.get(worker)
        if shelf is None:
            return None
        depth = self.depths(blocks.hashes, {worker: shelf}).get(worker, 0)
        was_used = tuple(shelf.entries[block].used for block in blocks.hashes[:depth])
        self.put(worker, blocks.hashes, self.history.sizes(blocks, model), now)
        return Assumption(worker, shelf.incarnation, depth, was_used)

    def put(self, worker: str, hashes: Sequence[int], sizes: Sequence[int], used: float) -> None:
        """Stores blocks as most recently used, the first of them last to go. `sizes` are tokens per block."""
        shelf = self._shelves[worker]
        for block, size in zip(reversed(hashes), reversed(sizes), strict=True):
            entry = shelf.entries.get(block)
            if entry is None:
                shelf.entries[block] = Entry(size, used)
                self._holders[block] = self._holders.get(block, 0) | shelf.bit
            else:
                shelf.held_tokens -= entry.tokens
                entry.tokens, entry.used = size, used
                shelf.entries.move_to_end(block)
            shelf.held_tokens += size
        self._trim(shelf)

    def withdraw(self, assumption: Assumption, blocks: Blocks) -> None:
        """Takes an assumption back: the attempt ended before its prompt was computed."""
        shelf = self._live(assumption)
        if shelf is not None:
            for block in blocks.hashes[assumption.depth :]:
                self._drop(shelf, block)

    def confirm(self, assumption: Assumption, blocks: Blocks, delivered_tokens: int | None) -> int:
        """Corrects the view by what the engine delivered; None is unknown and corrects nothing.

        The prompt is computed, so its own blocks are there whatever was delivered. But where all of an expected hit
        was missing, the engine had given those blocks up, and with them, being an LRU, everything that had been used
        no later: those entries go. Returns how many went.
        """
        shelf = self._live(assumption)
        if shelf is None or delivered_tokens != 0 or not assumption.depth:
            return 0
        limit = max(assumption.was_used)
        current = set(blocks.hashes)
        stale = [block for block, entry in shelf.entries.items() if entry.used <= limit and block not in current]
        for block in stale:
            self._drop(shelf, block)
        return len(stale)

    def restore(self, worker: str, hashes: Sequence[int], entries: Sequence[Entry]) -> None:
        """Takes over what was held before a restart, least recently used first, as older than all that is there."""
        shelf = self._shelves.get(worker)
        if shelf is None:
            return
        current = shelf.entries
        shelf.entries = OrderedDict(
            (block, entry) for block, entry in zip(hashes, entries, strict=True) if block not in current
        )
        for block, entry in shelf.entries.items():
            self._holders[block] = self._holders.get(block, 0) | shelf.bit
            shelf.held_tokens += entry.tokens
        shelf.entries.update(current)
        self._trim(shelf)

    def entries(self, worker: str) -> list[tuple[int, Entry]]:
        """Returns what a worker is believed to hold, least recently used first."""
        shelf = self._shelves.get(worker)
        return [] if shelf is None else list(shelf.entries.items())

    def shelf_sizes(self) -> dict[str, tuple[int, int]]:
        """Returns blocks and tokens believed held, by worker."""
        return {worker: (len(shelf.entries), shelf.held_tokens) for worker, shelf in self._shelves.items()}

    def _live(self, assumption: Assumption) -> Shelf | None:
        shelf = self._shelves.get(assumption.worker)
        return shelf if shelf is not None and shelf.incarnation == assumption.incarnation else None

    def _trim(self, shelf: Shelf) -> None:
        while shelf.held_tokens > shelf.bound and shelf.entries:
            block, entry = shelf.entries.popitem(last=False)
            shelf.held_tokens -= entry.tokens
            self._release(block, shelf.bit)
            self.evicted_blocks += 1

    def _drop(self, shelf: Shelf, block: int) -> None:
        entry = shelf.entries.pop(block, None)
        if entry is not None:
            shelf.held_tokens -= entry.tokens
            self._release(block, shelf.bit)

    def _release(self, block: int, bit: int) -> None:
        left = self._holders.get(block, 0) & ~bit
        if left:
            self._holders[block] = left
        else:
            self._holders.pop(block, None)
