"""What served prompts have taught, for the whole fleet: how many tokens they are, and which turn they were.

Byte blocks say *which* bytes are held; engines count tokens. Every served prompt reports its exact length, and because
the end of a prompt is a block boundary, a prompt that extends it knows that length to the token. Between such fixed
points lengths are interpolated by bytes; beyond them a ratio learned per model is used.
"""

from __future__ import annotations

from collections import OrderedDict

from ..core.blocks import Blocks

# Bytes per token before a model has answered once: English and code under common tokenizers lie between 3 and 5.
FIRST_RATIO = 4.0
# How fast the ratio of a model follows new prompts.
RATIO_WEIGHT = 0.2


class Bounded(OrderedDict[int, int]):
    """A map from block hash to a number that forgets the least recently written beyond its bound."""

    def __init__(self, bound: int) -> None:
        super().__init__()
        self._bound = bound

    def store(self, block: int, value: int) -> None:
        """Writes one value and, if need be, forgets the oldest."""
        self[block] = value
        self.move_to_end(block)
        if len(self) > self._bound:
            self.popitem(last=False)


class History:
    """Lengths and turns of served prompts. Bounded; what is forgotten is estimated again."""

    def __init__(self, bound: int = 1_000_000) -> None:
        self._tokens = Bounded(bound)
        self._turns = Bounded(bound)
        self._bytes_per_token: dict[str, float] = {}

    def bytes_per_token(self, model: str) -> float:
        """Returns the learned ratio of a model, or a first guess."""
        return self._bytes_per_token.get(model, FIRST_RATIO)

    def set_ratio(self, model: str, bytes_per_token: float) -> None:
        """Takes over a ratio that was learned before a restart."""
        self._bytes_per_token.setdefault(model, bytes_per_token)

    def ratios(self) -> dict[str, float]:
        """Returns the learned bytes per token, by model."""
        return dict(self._bytes_per_token)

    def restore(self, block: int, tokens: int, turn: int) -> None:
        """Takes over what was known of one block before a restart; turn 0 means that no prompt ended there."""
        if block not in self._tokens:
            self._tokens.store(block, tokens)
        if turn and block not in self._turns:
            self._turns.store(block, turn)

    def marks(self, blocks: Blocks, model: str) -> list[tuple[int, int]]:
        """Returns for each block the tokens up to its end, and the turn of the prompt that ends there (0: none)."""
        total, marks = 0, []
        for block, size in zip(blocks.hashes, self.sizes(blocks, model), strict=True):
            total += size
            marks.append((total, self._turns.get(block, 0)))
        return marks

    def mark(self, block: int) -> tuple[int, int] | None:
        """Returns tokens and turn of one block; None when its length is not known."""
        tokens = self._tokens.get(block)
        return None if tokens is None else (tokens, self._turns.get(block, 0))

    def tokens_at(self, blocks: Blocks, depth: int, model: str) -> int:
        """Returns the tokens of the first `depth` blocks: known, or estimated from the deepest known point before."""
        for position in range(depth - 1, -1, -1):
            known = self._tokens.get(blocks.hashes[position])
            if known is not None:
                beyond = blocks.ends[depth - 1] - blocks.ends[position]
                return known + round(beyond / self.bytes_per_token(model))
        return round(blocks.ends[depth - 1] / self.bytes_per_token(model)) if depth else 0

    def sizes(self, blocks: Blocks, model: str) -> list[int]:
        """Returns the tokens of each block. They add up to the estimate of the whole prompt, give or take rounding."""
        sizes: list[int] = []
        ratio = self.bytes_per_token(model)
        total, end = 0, 0
        for block, block_end in zip(blocks.hashes, blocks.ends, strict=True):
            known = self._tokens.get(block)
            upto = known if known is not None else total + max(round((block_end - end) / ratio), 1)
            upto = max(upto, total)
            sizes.append(upto - total)
            total, end = upto, block_end
        return sizes

    def turn(self, blocks: Blocks) -> int:
        """Returns which request of its prefix this is: 1 for the first, 2 when it extends (or repeats) a served first.

        The deepest served prompt that is a prefix of this one decides.
        """
        for block in reversed(blocks.hashes):
            served = self._turns.get(block)
            if served is not None:
                return served + 1
        return 1

    def learn(self, blocks: Blocks, model: str, prompt_tokens: int | None, turn: int) -> None:
        """Takes in a served prompt: its turn, and its length in tokens if the engine said."""
        if not blocks.closed:
            return
        self._turns.store(blocks.hashes[blocks.closed - 1], turn)
        if prompt_tokens:
            self._learn_length(blocks, model, prompt_tokens)

    def _learn_length(self, blocks: Blocks, model: str, prompt_tokens: int) -> None:
        base, position = 0, -1
        for index in range(blocks.closed - 1, -1, -1):
            known = self._tokens.get(blocks.hashes[index])
            if known is not None and known <= prompt_tokens:
                base, position = known, index
                break
        start = blocks.ends[position] if position >= 0 else 0
        if blocks.size > start:
            rate = (prompt_tokens - base) / (blocks.size - start)
            for index in range(position + 1, blocks.closed):
                self._tokens.store(blocks.hashes[index], base + round((blocks.ends[index] - start) * rate))
        if blocks.closed == len(blocks):
            self._tokens.store(blocks.hashes[-1], prompt_tokens)
        seen = blocks.size / prompt_tokens
        before = self._bytes_per_token.get(model, seen)
        self._bytes_per_token[model] = before + RATIO_WEIGHT * (seen - before)
