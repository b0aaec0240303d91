"""The reader that remembers comes to what the plain reading comes to."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from proxy.core.prompt import Dialect, read_prompt
from proxy.core.reader import PromptReader
from proxy.errors import BadJson, MissingModel

CHAT, COMPLETIONS = Dialect.CHAT, Dialect.COMPLETIONS

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats()
    | st.text(st.characters(codec=None, categories=("L", "Cc", "Cs", "P")), max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "text", "type", "tool_calls", "name", "x"]), inner)
    ),
    max_leaves=10,
)
messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "tool"]), "content": st.text(max_size=90) | values})
    | values,
    max_size=4,
)
bodies = st.fixed_dictionaries(
    {"model": st.sampled_from(["m", "n", "", "\ud800", 5, None])},
    optional={
        "messages": messages | values,
        "tools": st.lists(values, max_size=3) | values,
        "stream": st.sampled_from([True, False, None, 1]),
        "cache_salt": st.sampled_from(["s", "", None, 5]),
        "prompt": values,
    },
)
styles = st.sampled_from([{}, {"indent": 1}, {"separators": (",", ":")}, {"ensure_ascii": False}])


def plain(dialect, body):
    prompt = read_prompt(dialect, body)
    return prompt.model, prompt.stream, prompt.exact_tokens, prompt.blocks(1), prompt.reads_cache


def outcome(read, *arguments):
    try:
        return tuple(read(*arguments))
    except (BadJson, MissingModel) as refusal:
        return type(refusal), refusal.message


def encode(body, style):
    return json.dumps(body, **style).encode("utf-8", "surrogatepass")


@pytest.mark.parametrize(("field", "reads"), [("prompt_logprobs", False), ("logprobs", True)])
def test_a_scored_prompt_does_not_read_the_cache(field, reads):
    raw = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}], field: 1}).encode()
    assert PromptReader().read(CHAT, raw, 1).reads_cache is reads


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([CHAT, CHAT, COMPLETIONS]), bodies, styles), min_size=1, max_size=4))
@example([(CHAT, {"model": "m", "messages": [{"role": "user", "content": 10**25}]}, {})])
@example([(CHAT, {"model": "m", "messages": [], "tools": [{"max": 2**64, "least": -(2**63) - 1, "p": 1e22}]}, {})])
@example([(CHAT, {"model": "m", "messages": [{"a": 1, "b": float("nan")}, {"x": -0.0, "y": 5e-324}]}, {})])
def test_reading_with_a_memory_is_reading(requests):
    reader = PromptReader()
    for dialect, body, style in [*requests, *requests]:
        raw = encode(body, style)
        assert outcome(reader.read, dialect, raw, 1) == outcome(plain, dialect, raw)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 5), max_size=6), max_size=8), st.integers(0, 40))
def test_a_small_memory_forgets_and_reads_the_same(conversations, bound):
    reader = PromptReader(bound)
    for numbers in conversations:
        said = [{"role": "user", "content": f"hello {number} " * 30} for number in numbers]
        raw = encode({"model": "m", "messages": said}, {})
        assert outcome(reader.read, CHAT, raw, 1) == outcome(plain, CHAT, raw)
        assert reader._kept == sum(len(memory.hashes) for memory in reader._memories.values())
        assert reader._kept <= bound or len(reader._memories) <= 1


def test_a_tool_and_a_message_of_the_same_bytes_are_two_things():
    reader, piece = PromptReader(), {"role": "user", "content": "x"}
    for tools, said in (([piece], [piece]), ([], [piece, piece]), ([piece, piece], []), ([piece], [piece])):
        raw = encode({"model": "m", "tools": tools, "messages": said}, {})
        assert outcome(reader.read, CHAT, raw, 1) == outcome(plain, CHAT, raw)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"model":"m","model":"n","messages":[1],"messages":[2]}',
        b'{"messages":[{"role":"user","role":"tool","content":"a","content":"b"}],"model":"m"}',
        b'\xef\xbb\xbf{"model":"m","messages":[1]}',
        '{"model":"m","messages":[1]}'.encode("utf-16"),
        b'{"model":"m","messages":[1]} x',
        b'{"model":"m","messages":[{"content":"\\q"}]}',
        b'{"model":"m","messages":["\xff"]}',
        b'{"model":"m","messages":[01]}',
        b'{"model":"m","messages":[' + b"[" * 5000 + b"]" * 5000 + b"]}",
        b'{"model":"m","messages":[' + b"1" * 5000 + b"]}",
        b"",
        b"[]",
    ],
)
def test_raw_oddities_are_read_alike(raw):
    reader = PromptReader()
    for _ in range(2):
        assert outcome(reader.read, CHAT, raw, 1) == outcome(plain, CHAT, raw)


@settings(max_examples=100, deadline=None)
@given(bodies, styles, st.data())
def test_damaged_bodies_end_in_a_refusal_at_worst(body, style, data):
    raw = bytearray(encode(body, style))
    raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    outcome(PromptReader().read, CHAT, bytes(raw), 1)
