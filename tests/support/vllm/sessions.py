"""The agent sessions that are sent: chats that grow, each request repeating the one before it and adding to it.

Real sessions come from the recorded traces, where they lie beside the repository. Without them, made-up ones of the same shape take their place, and the run says so.
"""

import gzip
import json
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

Message = dict[str, str]

TURNS = 4
# vLLM caches whole blocks of 32 tokens. A chat of less than two or three has nothing to come home to, so the
# shortest recorded exchanges ("hello") are gathered into the opening request until it is this long.
OPENING_CHARACTERS = 200
# 10 000 tokens of the tiny model, 20 000 where the text is dense; those take a CPU some seconds.
CONTEXT_CHARACTERS = 30_000
TRACE = Path("traces") / "lmcache_agents.jsonl.gz"
MADE_UP = 60


@dataclass(frozen=True, slots=True)
class Session:
    """One agent's chat. `turns[k]` holds the messages that request k adds to those before it."""

    name: str
    turns: tuple[tuple[Message, ...], ...]

    def messages(self, turn: int) -> list[Message]:
        """Returns the whole chat that request `turn` (from 0) sends."""
        return [message for added in self.turns[: turn + 1] for message in added]


def find_trace(root: Path) -> Path | None:
    """Returns the recorded sessions' file, or None where it is not: in `shared` beside the repository `root`."""
    trace = root.parent / "shared" / TRACE
    return trace if trace.is_file() else None


def read_sessions(trace: Path) -> list[Session]:
    """Returns every recorded session's first requests, in order of appearance.

    A line of the trace holds what its input shares with the session's previous input (`lcp` characters), the rest
    (`input_suffix`), and the answer (`output`). The rest is what the agent newly says.
    """
    recorded: dict[tuple[str, str], list[tuple[str, str]]] = {}
    with gzip.open(trace, "rt", encoding="utf-8") as lines:
        for line in lines:
            entry = json.loads(line)
            exchanges = recorded.setdefault((entry["agent"], entry["session_id"]), [])
            exchanges.append((entry["input_suffix"], entry["output"]))
    return [
        Session(f"{agent}-{number}", repeat_single(list(grow_chat(exchanges))))
        for number, ((agent, _), exchanges) in enumerate(recorded.items())
    ]


def make_sessions(count: int = MADE_UP, seed: int = 1) -> list[Session]:
    """Returns made-up sessions: an opening of 1 to 20 thousand characters, then tool results of some hundreds."""
    sessions = []
    for number in range(count):
        rng = random.Random(f"{seed}:{number}")
        sizes = [rng.randint(1_000, 20_000), *(rng.randint(200, 3_000) for _ in range(TURNS - 1))]
        exchanges = [(write_text(rng, size), write_text(rng, rng.randint(100, 800))) for size in sizes]
        sessions.append(Session(f"made-up-{number}", tuple(grow_chat(exchanges))))
    return sessions


def grow_chat(exchanges: Iterable[tuple[str, str]]) -> Iterator[tuple[Message, ...]]:
    """Yields what each request adds to the chat, from (newly said, answered) pairs; at most TURNS requests.

    A request ends with something newly said. Lines that say nothing new only add their answer to the next request.
    A chat that never reaches the opening's length is one request.
    """
    added: list[Message] = []
    length = turns = 0
    for said, answered in exchanges:
        if said:
            room = CONTEXT_CHARACTERS - length - sum(len(message["content"]) for message in added)
            if room <= 0:
                return
            added.append({"role": "user", "content": said[:room]})
            size = sum(len(message["content"]) for message in added)
            if turns > 0 or size >= OPENING_CHARACTERS:
                yield tuple(added)
                length, turns, added = length + size, turns + 1, []
            if turns == TURNS:
                return
        if answered:
            added.append({"role": "assistant", "content": answered})
    if turns == 0 and added:
        yield tuple(added)


def repeat_single(turns: list[tuple[Message, ...]]) -> tuple[tuple[Message, ...], ...]:
    """Returns `turns`, where a single request is sent a second time as it was, as an agent's retry is."""
    return (*turns, ()) if len(turns) == 1 else tuple(turns)


def write_text(rng: random.Random, size: int) -> str:
    """Returns about `size` characters of words drawn from a small vocabulary."""
    words = []
    while size > 0:
        word = rng.choice(WORDS) if rng.random() < 0.9 else f"{rng.choice(WORDS)}_{rng.randrange(1000)}"
        words.append(word)
        size -= len(word) + 1
    return " ".join(words)


WORDS = re.findall(
    r"\w+",
    "read write open close file path line error value test class return import raise module index list string "
    "parse default option result the a to of in is not and when that it fails because after before",
)
