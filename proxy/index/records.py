"""One run of the prompt tree as bytes: what is kept of it in Redis. Layout: docs/reference/store.md."""

from __future__ import annotations

import struct
from dataclasses import dataclass

# Parent's last block hash (0: none), last use (seconds since 1970), bytes and tokens up to the end, turn.
HEAD = struct.Struct("<QIIIH")
KEY = struct.Struct("<Q")
MOST_32, MOST_16 = (1 << 32) - 1, (1 << 16) - 1


@dataclass(frozen=True, slots=True)
class Record:
    """What is stored of a run; fields as in `tree.Run`, `used` in seconds since 1970."""

    parent: int | None
    used: float
    end_bytes: int
    end_tokens: int
    turn: int
    blocks: tuple[int, ...]

    @property
    def key(self) -> int:
        """The hash of its last block."""
        return self.blocks[-1]

    def pack(self) -> bytes:
        """Renders it: a fixed head, then 8 bytes per block."""
        head = HEAD.pack(
            self.parent or 0,
            min(max(int(self.used), 0), MOST_32),
            min(self.end_bytes, MOST_32),
            min(self.end_tokens, MOST_32),
            min(self.turn, MOST_16),
        )
        return head + struct.pack(f"<{len(self.blocks)}Q", *self.blocks)


def pack_key(key: int) -> bytes:
    """Renders the name of a run."""
    return KEY.pack(key)


def unpack(name: bytes, value: bytes) -> Record | None:
    """Reads what `Record.pack` rendered; None for what no proxy wrote."""
    count, rest = divmod(len(value) - HEAD.size, KEY.size)
    if len(name) != KEY.size or count < 1 or rest:
        return None
    parent, used, end_bytes, end_tokens, turn = HEAD.unpack_from(value)
    blocks = struct.unpack_from(f"<{count}Q", value, HEAD.size)
    record = Record(parent or None, float(used), end_bytes, end_tokens, turn, blocks)
    return record if record.key == KEY.unpack(name)[0] else None
