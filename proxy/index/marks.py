"""One stored entry as one number: when a block was last used, the tokens up to its end, whose turn ended there.

A sorted set keeps a 64-bit score exactly up to 2^53, which holds all three: 29 bits of seconds since 2025, 20 bits of
tokens, 4 bits of turn. Seconds lead and tokens are inverted, so rank order is eviction order: least recently used
first, and of one prompt the tail before the head.
"""

from __future__ import annotations

import struct

# 2025-01-01T00:00:00Z; 29 bits of seconds reach to 2042.
EPOCH = 1_735_689_600
TOKEN_BITS, TURN_BITS = 20, 4
MOST_TOKENS = (1 << TOKEN_BITS) - 1
MOST_TURN = (1 << TURN_BITS) - 1

MEMBER = struct.Struct("<Q")


def to_score(used: float, tokens: int, turn: int) -> int:
    """Packs one entry; `used` is in seconds since 1970, tokens and turn are capped at what fits."""
    seconds = max(int(used) - EPOCH, 0)
    depth = MOST_TOKENS - min(tokens, MOST_TOKENS)
    return (seconds << (TOKEN_BITS + TURN_BITS)) | (depth << TURN_BITS) | min(turn, MOST_TURN)


def from_score(score: float) -> tuple[float, int, int]:
    """Unpacks (used, tokens, turn)."""
    packed = int(score)
    depth = (packed >> TURN_BITS) & MOST_TOKENS
    return float((packed >> (TOKEN_BITS + TURN_BITS)) + EPOCH), MOST_TOKENS - depth, packed & MOST_TURN


def to_member(block: int) -> bytes:
    """Packs a block hash into 8 bytes."""
    return MEMBER.pack(block)


def from_member(member: bytes) -> int:
    """Unpacks a block hash."""
    return int(MEMBER.unpack(member)[0])
