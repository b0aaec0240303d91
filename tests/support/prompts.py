"""Short words for the tests of the index: prompts of so many tokens, served on a worker, and who holds them."""

from proxy.core.blocks import chain
from proxy.index.shared import SharedIndex


class Clocks:
    """A wall clock and a steady clock, moved by hand; they begin at different points, as they do."""

    def __init__(self, wall=1_800_000_000.0, steady=500.0):
        self.wall, self.steady = wall, steady

    def move(self, seconds):
        self.wall += seconds
        self.steady += seconds


def shared(redis, clocks=None):
    clocks = clocks or Clocks()
    return SharedIndex(redis, lambda: clocks.wall, lambda: clocks.steady)


def text(letter, tokens):
    return letter.encode() * tokens * 4


S, U, V, W = text("s", 3000), text("u", 500), text("v", 500), text("w", 500)


def find(index, *segments, model="m"):
    return index.find(chain(segments, 1), model)


def overlap(index, *segments, workers="ab"):
    return dict(index.overlap(find(index, *segments), workers, 1000.0).tokens)


def assume(index, worker, *segments, now=500.0):
    trail = find(index, *segments)
    return index.assume(worker, trail, now), trail


def serve(index, worker, *segments, now=500.0, tokens=0, delivered=None):
    assumption, trail = assume(index, worker, *segments, now=now)
    return index.confirm(assumption, trail.blocks.size // 4 if tokens == 0 else tokens, delivered, trail.turn)


async def warm(redis, clocks=None, worker="a", incarnation="1", capacity=None):
    """An index as a restarted proxy has it."""
    index = shared(redis, clocks)
    await index.load_ratios()
    index.begin(worker, incarnation, capacity)
    await index.load(worker)
    return index
