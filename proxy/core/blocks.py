"""A canonical prompt as chained block hashes: equal leading hashes mean equal leading bytes.

A block ends after a fixed span of bytes, and at the end of every segment. The second rule makes the end of a whole
prompt a block boundary that every longer prompt of the conversation shares, so what is known about the first (its
length in tokens, to the token) holds for the second. Spans grow with depth: prompts of different conversations part
early, where it pays to see exactly where; 1 KiB far inside a 200k-token prompt is a thousandth of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

# Up to these offsets blocks have these many bytes; 64 bytes are about 16-25 tokens, an engine's smallest block.
SHALLOW, SHALLOW_SPAN = 4096, 64
DEEP, MIDDLE_SPAN = 65536, 256
DEEP_SPAN = 1024


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of one prompt.

    Attributes:
        hashes: chained 64-bit hashes, one per block.
        ends: bytes of the prompt up to the end of each block; strictly increasing.
        closed: how many leading blocks every extension of this prompt shares (all of them, unless the prompt is raw
            text whose last block may go on).
    """

    hashes: tuple[int, ...]
    ends: tuple[int, ...]
    closed: int

    def __len__(self) -> int:
        return len(self.hashes)

    @property
    def size(self) -> int:
        """Bytes of the whole canonical prompt."""
        return self.ends[-1] if self.ends else 0


def root(seed: int, *parts: str) -> int:
    """Mixes what separates caches (fleet seed, model as served, cache salt) into the hash that a chain starts from."""
    digest = seed
    for part in parts:
        digest = xxh3_64_intdigest(part.encode("utf-8", "surrogatepass"), digest)
    return digest


def chain(segments: Sequence[bytes], start: int, *, open_ended: bool = False) -> Blocks:
    """Hashes a canonical prompt.

    Args:
        segments: its pieces in the order in which the chat template renders them.
        start: the root that the chain begins from, see `root`.
        open_ended: the last segment may be continued by a longer prompt (raw text), so its last partial block is not
            closed.
    """
    hashes: list[int] = []
    ends: list[int] = []
    digest, offset = start, 0
    for segment in segments:
        more_hashes, more_ends = chain_from(segment, digest, offset)
        if more_hashes:
            hashes += more_hashes
            ends += more_ends
            digest, offset = hashes[-1], ends[-1]
    closed = len(hashes)
    if open_ended and segments and closed and not is_whole(ends):
        closed -= 1
    return Blocks(tuple(hashes), tuple(ends), closed)


def chain_from(segment: bytes, digest: int, offset: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Hashes one segment that follows `offset` bytes whose last hash is `digest`.

    Returns its hashes, and where each block ends in the whole prompt.
    """
    hashes: list[int] = []
    ends: list[int] = []
    view = memoryview(segment)
    position, length = 0, len(segment)
    while position < length:
        end = min(position + span_at(offset + position), length)
        digest = xxh3_64_intdigest(view[position:end], digest)
        hashes.append(digest)
        ends.append(offset + end)
        position = end
    return tuple(hashes), tuple(ends)


def span_at(offset: int) -> int:
    """Returns the span of a block that begins at `offset`."""
    if offset < SHALLOW:
        return SHALLOW_SPAN
    return MIDDLE_SPAN if offset < DEEP else DEEP_SPAN


def is_whole(ends: Sequence[int]) -> bool:
    """Tells whether the last block has its full span."""
    begin = ends[-2] if len(ends) > 1 else 0
    return ends[-1] - begin == span_at(begin)
