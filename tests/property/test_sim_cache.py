"""The simulated prefix cache keeps vLLM's laws, whatever is asked of it."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from workers.sim.cache import PrefixCache, chain_key, root_key

BLOCK = 4

prompts = st.lists(st.integers(0, 2), min_size=1, max_size=30)


def chain(tokens: list[int], root: bytes = b"") -> list[bytes]:
    keys: list[bytes] = []
    for start in range(0, len(tokens) // BLOCK * BLOCK, BLOCK):
        root = chain_key(root, bytes(tokens[start : start + BLOCK]))
        keys.append(root)
    return keys


@dataclass(eq=False)
class User:
    """One request as the cache sees it."""

    tokens: list[int]
    held: list[int]
    fresh: list[int]
    blocks: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.blocks = self.held + self.fresh


def enter(cache: PrefixCache, tokens: list[int]) -> User | None:
    keys = chain(tokens)
    held = cache.find(keys, len(tokens))
    fresh = cache.acquire(held, -(-len(tokens) // BLOCK) - len(held))
    if fresh is None:
        return None
    user = User(tokens, held, fresh)
    for block, key in zip(user.blocks, keys, strict=False):
        cache.publish(block, key)
    return user


def common_blocks(one: list[int], other: list[int]) -> int:
    count = 0
    for start in range(0, min(len(one), len(other)) // BLOCK * BLOCK, BLOCK):
        if one[start : start + BLOCK] != other[start : start + BLOCK]:
            break
        count += 1
    return count


@given(st.lists(prompts, min_size=1, max_size=12))
def test_without_eviction_a_hit_is_the_longest_prefix_ever_seen(series: list[list[int]]) -> None:
    cache = PrefixCache(1000, BLOCK)
    seen: list[list[int]] = []
    for tokens in series:
        hit = len(cache.find(chain(tokens), len(tokens))) * BLOCK
        longest = max((common_blocks(tokens, earlier) for earlier in seen), default=0)
        assert hit == min(longest, (len(tokens) - 1) // BLOCK) * BLOCK
        assert hit % BLOCK == 0
        assert hit < len(tokens)
        user = enter(cache, tokens)
        assert user is not None
        cache.release(user.blocks)
        seen.append(tokens)


@given(st.lists(st.tuples(prompts, st.integers(0, 3)), max_size=40), st.integers(1, 12))
def test_blocks_in_use_are_never_taken_and_never_more_than_there_are(
    moves: list[tuple[list[int], int]], capacity: int
) -> None:
    cache = PrefixCache(capacity, BLOCK)
    running: list[User] = []
    for tokens, leaving in moves:
        pinned = {block for user in running for block in user.blocks}
        user = enter(cache, tokens)
        if user is not None:
            assert not pinned & set(user.fresh)
            assert len(set(user.blocks)) == len(user.blocks)
            running.append(user)
        else:
            assert cache.used + -(-len(tokens) // BLOCK) > capacity
        if leaving < len(running):
            cache.release(running.pop(leaving).blocks)
        in_use = {block for user in running for block in user.blocks}
        assert cache.used == len(in_use) <= capacity
        for user in running:
            # What is pinned stays findable: its own block, or an older copy that somebody else published.
            reach = cache.find(chain(user.tokens), len(user.tokens) // BLOCK * BLOCK + 1)
            assert len(reach) >= len(user.held)


@given(st.integers(2, 10), st.integers(1, 9))
def test_a_prompts_tail_goes_before_its_head(length: int, taken: int) -> None:
    cache = PrefixCache(length, BLOCK)
    tokens = [index % 3 for index in range(length * BLOCK)]
    first = enter(cache, tokens)
    assert first is not None
    cache.release(first.blocks)
    taken = min(taken, length)
    assert cache.acquire((), taken) is not None
    assert len(cache.find(chain(tokens), len(tokens) + 1)) == length - taken


@given(st.integers(1, 8), st.integers(1, 8))
def test_the_least_recently_used_prompt_goes_first(older: int, newer: int) -> None:
    cache = PrefixCache(older + newer, BLOCK)
    one, two = [0] * older * BLOCK, [1] * newer * BLOCK
    for tokens in (one, two, one):
        user = enter(cache, tokens)
        assert user is not None
        cache.release(user.blocks)
    assert cache.acquire((), newer) is not None
    assert cache.find(chain(two), len(two) + 1) == []
    # The second pass recomputed the first prompt's last block only, so its head is all there.
    assert len(cache.find(chain(one), len(one))) == older - 1


@given(prompts)
def test_model_and_salt_separate_caches(tokens: list[int]) -> None:
    roots = [root_key("m", None), root_key("m", "a"), root_key("m", "b"), root_key("m:a", None), root_key("n", None)]
    chains = [chain(tokens * BLOCK, root) for root in roots]
    assert len({keys[0] for keys in chains}) == len(roots)


def test_a_failed_acquire_changes_nothing() -> None:
    cache = PrefixCache(3, BLOCK)
    user = enter(cache, [0] * 2 * BLOCK)
    assert user is not None
    cache.release(user.blocks)
    held = cache.find(chain(user.tokens), 2 * BLOCK + 1)
    assert len(held) == 2
    assert cache.acquire(held, 2) is None
    assert repr(cache) == "<PrefixCache 0 of 3 blocks in use, 2 with a key>"
