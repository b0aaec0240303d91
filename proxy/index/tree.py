"""Every prompt that has been served, as one tree of runs: how long each is in tokens, and which turn it was.

A *run* is a stretch of blocks that some prompt added to another; it ends where a prompt ended or where two parted. So
bytes become tokens exactly at the ends of served prompts, which the engine counted, and by interpolation inside a run;
beyond what is known, a ratio learned per model is used. Finding a prompt costs a few dictionary look-ups however long
it is: hashes are chained, so the known part is a prefix, and its end is found by galloping from the back.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

from ..core.blocks import Blocks

# Bytes per token before a model has answered once: English and code under common tokenizers lie between 3 and 5.
FIRST_RATIO = 4.0
# How fast the ratio of a model follows new prompts, and from which length (tokens) a prompt counts in full: a chat
# template adds tens of tokens to every prompt, which are most of a short one.
RATIO_WEIGHT, LONG_TOKENS = 0.2, 1000
# Blocks kept in all, about 100 bytes each.
MOST_BLOCKS = 4_000_000


class Run:
    """A stretch of blocks with one parent.

    Attributes:
        parent: the run that it continues; None for one that begins a prompt.
        blocks: its hashes.
        first: blocks before it, from the beginning of the prompt.
        end_bytes, end_tokens: of the prompt up to its end; tokens are exact if an engine counted them.
        turn: which request of its prefix the prompt that ended here was; 0 when none ended here.
        holders: bit mask of the workers that hold it.
        children: runs that continue it.
    """

    __slots__ = ("blocks", "children", "end_bytes", "end_tokens", "first", "holders", "parent", "turn", "weight")

    def __init__(self, parent: Run | None, blocks: tuple[int, ...], end_bytes: int, end_tokens: int) -> None:
        self.parent = parent
        self.blocks = blocks
        self.first = 0 if parent is None else parent.end
        self.end_bytes = end_bytes
        self.end_tokens = end_tokens
        self.turn = 0
        self.holders = 0
        self.children = 0
        self.weight = max(end_tokens - self.start_tokens, 0)

    def __repr__(self) -> str:
        return f"<Run blocks {self.first}-{self.end}, {self.start_tokens}-{self.end_tokens} tokens, turn {self.turn}>"

    @property
    def end(self) -> int:
        """Blocks up to its end, from the beginning of the prompt."""
        return self.first + len(self.blocks)

    @property
    def start_tokens(self) -> int:
        """Tokens before it."""
        return 0 if self.parent is None else self.parent.end_tokens

    @property
    def start_bytes(self) -> int:
        """Bytes before it."""
        return 0 if self.parent is None else self.parent.end_bytes

    @property
    def key(self) -> int:
        """The hash of its last block, which names it."""
        return self.blocks[-1]

    def tokens_upto(self, position: int) -> int:
        """Returns the tokens up to a byte position inside it, interpolated."""
        span = self.end_bytes - self.start_bytes
        share = (position - self.start_bytes) / span if span else 1.0
        return self.start_tokens + round((self.end_tokens - self.start_tokens) * share)


@dataclass(slots=True)
class Trail:
    """A prompt, and how far it is known.

    Attributes:
        blocks: the prompt's blocks.
        model: the model it is for.
        run: the run in which the known part ends; None when nothing is known.
        depth: known leading blocks.
        known_tokens: of the known part.
        tokens: of the whole prompt: known, or estimated beyond the known part.
        turn: which request of its prefix this is: 1 for the first, 2 when it extends (or repeats) a served first.
    """

    blocks: Blocks
    model: str
    run: Run | None
    depth: int
    known_tokens: int
    tokens: int
    turn: int


class PromptTree:
    """The served prompts. Bounded: what nobody holds and was served longest ago is forgotten first."""

    def __init__(self, bound: int = MOST_BLOCKS) -> None:
        self._bound = bound
        self._where: dict[int, Run] = {}
        self._idle: OrderedDict[Run, None] = OrderedDict()
        self._bytes_per_token: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._where)

    def bytes_per_token(self, model: str) -> float:
        """Returns the learned ratio of a model, or a first guess."""
        return self._bytes_per_token.get(model, FIRST_RATIO)

    def ratios(self) -> dict[str, float]:
        """Returns the learned bytes per token, by model."""
        return dict(self._bytes_per_token)

    def set_ratio(self, model: str, bytes_per_token: float) -> None:
        """Takes over a ratio that was learned before a restart. What cannot be one is not taken."""
        if 1 <= bytes_per_token < math.inf:
            self._bytes_per_token.setdefault(model, bytes_per_token)

    def find(self, blocks: Blocks, model: str) -> Trail:
        """Finds how far a prompt is known."""
        depth = self._known_depth(blocks)
        ratio = self.bytes_per_token(model)
        if not depth:
            return Trail(blocks, model, None, 0, 0, round(blocks.size / ratio), 1)
        run = self._where[blocks.hashes[depth - 1]]
        position = blocks.ends[depth - 1]
        known = run.end_tokens if depth == run.end else run.tokens_upto(position)
        tokens = known + round((blocks.size - position) / ratio)
        served: Run | None = run if depth == run.end else run.parent
        while served is not None and not served.turn:
            served = served.parent
        return Trail(blocks, model, run, depth, known, tokens, 1 if served is None else served.turn + 1)

    def _known_depth(self, blocks: Blocks) -> int:
        """Returns the leading blocks that are known: gallops from the back, then halves."""
        hashes, where = blocks.hashes, self._where
        unknown, step = blocks.closed + 1, 1
        known = blocks.closed
        while known > 0 and hashes[known - 1] not in where:
            unknown = known
            known = max(known - step, 0)
            step *= 2
        while unknown - known > 1:
            middle = (known + unknown) // 2
            if hashes[middle - 1] in where:
                known = middle
            else:
                unknown = middle
        return known

    def grow(self, trail: Trail) -> Run | None:
        """Makes the prompt a path of the tree that ends with a run. None for a prompt without a closed block."""
        blocks, run = trail.blocks, trail.run
        if run is not None and trail.depth < run.end:
            run = self._split(run, trail.depth, blocks.ends[trail.depth - 1], trail.known_tokens)
        closed = blocks.closed
        if trail.depth == closed:
            return run
        end_bytes = blocks.ends[closed - 1]
        beyond = round((blocks.size - end_bytes) / self.bytes_per_token(trail.model))
        new = Run(run, blocks.hashes[trail.depth : closed], end_bytes, max(trail.tokens - beyond, trail.known_tokens))
        self._add(new)
        return new

    def graft(self, parent: Run | None, blocks: tuple[int, ...], end_bytes: int, end_tokens: int) -> Run:
        """Makes `blocks` after `parent` a path that ends with a run, whatever of it is there. Returns that run."""
        known = 0
        while known < len(blocks) and blocks[known] in self._where:
            known += 1
        run = parent
        if known:
            run = self._where[blocks[known - 1]]
            run = self.cut(run, run.blocks.index(blocks[known - 1]) + 1)
        if known == len(blocks) and run is not None:
            return run
        new = Run(run, blocks[known:], end_bytes, end_tokens)
        self._add(new)
        return new

    def at(self, block: int) -> Run | None:
        """Returns the run that ends with a block, cutting one if need be; None when the block is not known."""
        run = self._where.get(block)
        return None if run is None else self.cut(run, run.blocks.index(block) + 1)

    def cut(self, run: Run, keep: int) -> Run:
        """Returns a run that ends after the first `keep` blocks of `run`; bytes and tokens are shared out by blocks."""
        if keep == len(run.blocks):
            return run
        position = run.start_bytes + round((run.end_bytes - run.start_bytes) * keep / len(run.blocks))
        return self._split(run, run.first + keep, position, run.tokens_upto(position))

    def _add(self, run: Run) -> None:
        self._where.update(dict.fromkeys(run.blocks, run))
        self._idle[run] = None
        if run.parent is not None:
            run.parent.children += 1
            self._idle.pop(run.parent, None)

    def _split(self, run: Run, depth: int, position: int, tokens: int) -> Run:
        """Cuts a run in two after `depth` blocks of the prompt. Returns the new head; the run itself stays as tail."""
        cut = depth - run.first
        head = Run(run.parent, run.blocks[:cut], position, tokens)
        head.holders, head.children = run.holders, 1
        head.weight = min(head.weight, run.weight)
        run.parent, run.first, run.blocks = head, depth, run.blocks[cut:]
        run.weight -= head.weight
        self._where.update(dict.fromkeys(head.blocks, head))
        self._was_split(head, run)
        return head

    def _was_split(self, head: Run, tail: Run) -> None:
        """Told after a split: whoever keeps notes by run must know of the new one."""

    def learn(self, trail: Trail, tip: Run, prompt_tokens: int | None, turn: int) -> int:
        """Takes in a served prompt: its turn, and its length if the engine said. Returns how much `tip` grew."""
        tip.turn = turn
        blocks = trail.blocks
        if not prompt_tokens or not blocks.size:
            return 0
        end_tokens = (
            round(prompt_tokens * tip.end_bytes / blocks.size) if blocks.closed < len(blocks) else prompt_tokens
        )
        tip.end_tokens = max(end_tokens, tip.start_tokens)
        grown = tip.end_tokens - tip.start_tokens - tip.weight
        tip.weight += grown
        self._learn_ratio(trail.model, blocks.size / prompt_tokens, min(prompt_tokens / LONG_TOKENS, 1.0))
        return grown

    def _learn_ratio(self, model: str, seen: float, share: float) -> None:
        if seen < 1:
            return  # every token of a text is a byte at least: most of this prompt is template or pictures
        weight = share * RATIO_WEIGHT if model in self._bytes_per_token else share
        before = self.bytes_per_token(model)
        self._bytes_per_token[model] = before + weight * (seen - before)

    def prune(self) -> bool:
        """Forgets what nobody holds until the bound is kept. Returns whether it is."""
        while len(self._where) > self._bound and self._idle:
            run, _ = self._idle.popitem(last=False)
            for block in run.blocks:
                del self._where[block]
            parent = run.parent
            if parent is not None:
                parent.children -= 1
                self._rest(parent)
        return len(self._where) <= self._bound

    def _rest(self, run: Run) -> None:
        """Notes a run that nobody holds and nothing continues, as the latest of those that may be forgotten."""
        if not run.holders and not run.children:
            self._idle[run] = None
            self._idle.move_to_end(run)
