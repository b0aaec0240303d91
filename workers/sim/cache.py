"""A paged prefix cache with vLLM's rules: who holds which block, and which block goes next.

Pure: no clock, no I/O.
Only full blocks have a key, and a key names its block together with all before it.
A block is pinned while a request uses it; a free block keeps its content until it is taken for something else.
Blocks are taken least recently freed first, a request's tail before its head; blocks without content go before all.
Not modelled: a hybrid's state checkpoints, which real vLLM keeps only at some of the block boundaries.
"""

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

_KEY_BYTES = 16


def root_key(model: str, salt: str | None) -> bytes:
    """Returns the key before the first block; another model or cache salt is another cache."""
    separated = f"{len(model)}:{model}{'' if salt is None else ':' + salt}"
    return blake2b(separated.encode("utf-8", "surrogatepass"), digest_size=_KEY_BYTES).digest()


def chain_key(parent: bytes, content: bytes) -> bytes:
    """Returns the key of a full block from the key before it and the bytes of its tokens."""
    return blake2b(parent + content, digest_size=_KEY_BYTES).digest()


class PrefixCache:
    """`num_blocks` blocks of `block_size` tokens, named by their numbers."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._pins = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    def __repr__(self) -> str:
        return f"<PrefixCache {self.used} of {self.num_blocks} blocks in use, {len(self._block_of)} with a key>"

    @property
    def used(self) -> int:
        """Blocks pinned by running requests."""
        return self.num_blocks - len(self._free)

    def find(self, keys: Sequence[bytes], tokens: int) -> list[int]:
        """Returns the longest leading run of cached blocks for `tokens` tokens whose full blocks have `keys`.

        The last token is always computed, so k full blocks and nothing after them hit at most k - 1.
        """
        held: list[int] = []
        for key in keys[: (tokens - 1) // self.block_size]:
            block = self._block_of.get(key)
            if block is None:
                break
            held.append(block)
        return held

    def acquire(self, held: Sequence[int], count: int) -> list[int] | None:
        """Pins `held` and takes `count` more blocks; returns the latter, or `None` with nothing changed."""
        spare = len(self._free) - sum(block in self._free for block in held)
        if count > spare:
            return None
        for block in held:
            self._pins[block] += 1
            self._free.pop(block, None)
        return [self._take() for _ in range(count)]

    def publish(self, block: int, key: bytes) -> None:
        """Makes a full block findable; where its content is cached already, the older block stays the one found."""
        if self._block_of.setdefault(key, block) == block:
            self._keys[block] = key

    def release(self, blocks: Sequence[int]) -> None:
        """Unpins a request's blocks, given from its head to its tail."""
        for block in reversed(blocks):
            self._pins[block] -= 1
            if self._pins[block] == 0:
                self._free[block] = None
                if self._keys[block] is None:
                    self._free.move_to_end(block, last=False)

    def _take(self) -> int:
        block, _ = self._free.popitem(last=False)
        key = self._keys[block]
        if key is not None:
            del self._block_of[key]
            self._keys[block] = None
        self._pins[block] = 1
        return block
