"""Reading request bodies: what reaches the canonical prompt, and that nothing odd stops a request."""

import json
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.prompt import Dialect, read_prompt
from proxy.errors import BadJson, MissingModel

CHAT, COMPLETIONS = Dialect.CHAT, Dialect.COMPLETIONS
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}
OTHER_TOOL = {"type": "function", "function": {"name": "g", "parameters": {}}}


def chat(**fields):
    return {"model": "m", "messages": MESSAGES} | fields


def hashes(body, dialect=CHAT):
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return read_prompt(dialect, raw).blocks(1).hashes


def test_the_fields_that_matter_are_read():
    read = read_prompt(CHAT, json.dumps(chat(stream=True, cache_salt="s")).encode())
    assert (read.dialect, read.model, read.stream, read.salt) == (CHAT, "m", True, "s")
    assert read.segments == (b"system\x1fbe brief\n", b"user\x1fhi\n")
    assert (read.open_ended, read.exact_tokens) == (False, None)


@pytest.mark.parametrize("stream", [False, None, "yes", 1])
def test_only_true_is_a_stream(stream):
    assert not read_prompt(CHAT, json.dumps(chat(stream=stream)).encode()).stream


def test_white_space_and_key_order_of_the_json_do_not_matter():
    plain = b'{"model":"m","messages":[{"role":"user","content":"hi","name":"n"}]}'
    spaced = b'\n{ "messages" : [ {"name":"n",\t"content": "h\\u0069","role" : "user"} ] , "model":"m","n":1 }'
    assert hashes(plain) == hashes(spaced)


def test_sampling_fields_do_not_matter():
    assert hashes(chat()) == hashes(chat(temperature=1e-3, seed=9007199254740993, max_tokens=5, tool_choice="auto"))


def test_the_order_inside_a_tool_matters():
    swapped = {"function": TOOL["function"], "type": "function"}
    schema = {"type": "function", "function": {"parameters": {"properties": {"a": {}}, "type": "object"}, "name": "f"}}
    different = {hashes(chat(tools=[tool])) for tool in (TOOL, swapped, schema)}
    assert len(different) == 3


def test_tools_and_their_order_matter():
    variants = [None, [TOOL], [OTHER_TOOL], [TOOL, OTHER_TOOL], [OTHER_TOOL, TOOL]]
    first_blocks = {hashes(chat(tools=tools))[0] for tools in variants[:3]}
    assert len(first_blocks) == 3  # tools lead the prompt, so they part at once
    assert len({hashes(chat(tools=tools)) for tools in variants}) == 5


def test_the_same_body_twice_is_the_same_prompt():
    assert hashes(chat(tools=[TOOL])) == hashes(chat(tools=[TOOL]))


@pytest.mark.parametrize(
    "change",
    [
        {"model": "n"},
        {"cache_salt": "s"},
        {"messages": [{"role": "user", "content": "be brief"}, {"role": "user", "content": "hi"}]},
    ],
)
def test_model_salt_and_role_separate_from_the_first_block(change):
    assert not set(hashes(chat())) & set(hashes(chat(**change)))


@pytest.mark.parametrize("field", ["name", "tool_call_id", "reasoning_content", "reasoning", "tool_calls"])
def test_rendered_fields_of_a_message_matter(field):
    with_field = [{"role": "assistant", "content": "x", field: "v"}]
    assert hashes(chat(messages=with_field)) != hashes(chat(messages=[{"role": "assistant", "content": "x"}]))


def test_the_next_turn_extends_the_prompt():
    longer = [*MESSAGES, {"role": "assistant", "content": "hello"}, {"role": "user", "content": "more"}]
    first, second = hashes(chat()), hashes(chat(messages=longer))
    assert second[: len(first)] == first


def image(data, **more):
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64," + data}} | more


def test_images_go_by_digest():
    def picture(data):
        content = [{"type": "text", "text": "what is this?"}, image(data)]
        return chat(messages=[{"role": "user", "content": content}])

    one, other = picture("A" * 100_000), picture("A" * 99_999 + "B")
    assert hashes(one) == hashes(one)
    assert hashes(one) != hashes(other)
    assert sum(map(len, read_prompt(CHAT, json.dumps(one).encode()).segments)) < 100
    reordered = json.loads(json.dumps(one))
    reordered["messages"][0]["content"][1] = dict(reversed(reordered["messages"][0]["content"][1].items()))
    assert hashes(reordered) == hashes(one)


def test_text_parts_read_as_the_text_they_carry():
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    assert hashes(chat(messages=parts)) == hashes(chat(messages=[{"role": "user", "content": "hi"}]))


ODD_MESSAGES = [
    [{"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]}],
    [{"role": "tool", "content": [{"type": "text", "text": "5"}], "tool_call_id": "1"}],
    [{"role": "latest_reminder", "content": "x"}],
    [{"role": "user", "content": [None]}],
    [{"role": "assistant", "tool_calls": [None]}],
    [{"role": "user", "content": 5}],
    [{"role": 7, "content": {"deep": [True, -0.0]}}],
    [{"role": "user", "content": [[["x"]], 3, {"text": 4}, {"type": "text"}]}],
    [{}],
    [None, 3, "x", []],
    [],
    "hi",
    None,
    {"role": "user"},
    5,
]


@pytest.mark.parametrize("messages", ODD_MESSAGES)
def test_odd_messages_are_the_engines_business(messages):
    read = read_prompt(CHAT, json.dumps({"model": "m", "messages": messages}).encode())
    assert all(isinstance(part, bytes) for part in read.segments)
    assert len(read.blocks(1)) >= 0


def test_odd_messages_differ_from_each_other():
    different = {hashes({"model": "m", "messages": messages}) for messages in ODD_MESSAGES}
    assert len(different) == len(ODD_MESSAGES)


@pytest.mark.parametrize(
    "fields",
    [{"tools": None}, {"tools": {}}, {"tools": "x"}, {"tools": [None, 3]}, {"cache_salt": 5}, {"stream": {}}],
)
def test_odd_fields_are_the_engines_business(fields):
    assert read_prompt(CHAT, json.dumps(chat(**fields)).encode()).salt is None


def test_a_body_without_messages_is_the_engines_business():
    assert read_prompt(CHAT, b'{"model":"m"}').segments == (b"null",)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"[]",
        b'"x"',
        b"5",
        b"null",
        b'{"a":',
        b'{"model":"m"}x',
        b'{"\xff"}',
        b"\x80",
        b"\x00" * 8,
        b'{"a":01}',
    ],
)
def test_what_is_no_json_object_is_refused(body):
    with pytest.raises(BadJson) as refusal:
        read_prompt(CHAT, body)
    assert json.loads(refusal.value.body())["error"]["code"] == "bad_json"


def test_a_byte_order_mark_is_read_over():
    assert hashes(b"\xef\xbb\xbf" + json.dumps(chat()).encode()) == hashes(chat())


@pytest.mark.parametrize("body", [b"{}", b'{"model":7}', b'{"model":null}', b'{"model":""}', b'{"model":["m"]}'])
@pytest.mark.parametrize("dialect", [CHAT, COMPLETIONS])
def test_a_body_without_a_model_is_refused(dialect, body):
    with pytest.raises(MissingModel) as refusal:
        read_prompt(dialect, body)
    assert refusal.value.param == "model"


DEEP = [
    ("[", "]"),
    ('{"a":', "}"),
]


@pytest.mark.parametrize(("opening", "closing"), DEEP)
@pytest.mark.parametrize(
    ("dialect", "frame"),
    [
        (CHAT, '{"model":"m","messages":[{"role":"user","content":[%s]}]}'),
        (CHAT, '{"model":"m","messages":%s}'),
        (CHAT, '{"model":"m","tools":[%s]}'),
        (CHAT, '{"model":%s}'),
        (COMPLETIONS, '{"model":"m","prompt":%s}'),
    ],
)
def test_no_depth_of_nesting_ends_in_anything_but_a_refusal(dialect, frame, opening, closing):
    def is_read(depth):
        body = (frame % (opening * depth + "1" + closing * depth)).encode()
        try:
            read_prompt(dialect, body)
        except (BadJson, MissingModel) as refusal:
            return "deep" not in refusal.message
        return True

    shallow, deep = 1, 2000
    assert is_read(shallow)
    assert not is_read(deep)
    assert not is_read(100_000)
    while deep - shallow > 1:
        middle = (shallow + deep) // 2
        shallow, deep = (middle, deep) if is_read(middle) else (shallow, middle)
    for depth in range(shallow - 10, shallow + 10):  # just inside of what can be parsed lies what cannot be rendered
        assert is_read(depth) == (depth <= shallow)


def test_lone_surrogates_pass():
    body = b'{"model":"m\\ud800","cache_salt":"\\udfff","messages":[{"role":"\\ud800","content":[{"x":"\\ud800"}, "\\udc00"]}]}'
    read = read_prompt(CHAT, body)
    assert read.model == "m\ud800"
    assert len(read.blocks(1)) == 2
    assert read_prompt(COMPLETIONS, b'{"model":"m","prompt":"\\ud800"}').segments == (b"\xed\xa0\x80",)


def test_numbers_keep_their_digits():
    tool = b'{"model":"m","messages":[],"tools":[{"max":1234567890123456789012345,"p":0.95,"e":1e-3}]}'
    assert read_prompt(CHAT, tool).segments == (b'tool\x1f{"max":1234567890123456789012345,"p":0.95,"e":0.001}',)
    assert read_prompt(CHAT, b'{"model":"m","seed":1e999,"messages":[NaN]}').segments == (b"?\x1fNaN",)
    with pytest.raises(BadJson):  # a number that Python refuses to read
        read_prompt(CHAT, b'{"model":"m","seed":%s}' % (b"1" * 5000))


def completions(prompt):
    return read_prompt(COMPLETIONS, json.dumps({"model": "m", "prompt": prompt}).encode())


def test_raw_text_is_open_ended():
    read = completions("once upon")
    assert (read.segments, read.open_ended, read.exact_tokens) == ((b"once upon",), True, None)


def test_token_ids_have_an_exact_length():
    read = completions([1, 2, 70_000])
    assert read.segments == (struct.pack("<3I", 1, 2, 70_000),)
    assert (read.open_ended, read.exact_tokens) == (True, 3)
    longer = completions([*range(100)]).blocks(1)
    assert completions([*range(64)]).blocks(1).hashes == longer.hashes[:4]


def test_a_batch_is_one_prompt_of_all_its_parts():
    # The engine reports one sum of tokens for all of them, and lengths are learned from it.
    assert completions(["ab", "c"]).segments == (b"ab", b"c")
    ids = completions([[1, 2], [3]])
    assert (len(ids.segments), ids.exact_tokens) == (2, 3)
    assert completions(["x" * 64, "y"]).blocks(1).hashes[0] == completions("x" * 64).blocks(1).hashes[0]


@pytest.mark.parametrize(
    "prompt", [None, 5, {}, [], [[]], [None], [1, "a"], ["a", 1], [[1], ["a"]], [True], [-1], [1 << 32], [1.0]]
)
def test_odd_prompts_are_the_engines_business(prompt):
    read = completions(prompt)
    assert all(isinstance(part, bytes) for part in read.segments)
    assert read.exact_tokens in (None, 0)


def test_text_ids_and_chat_share_no_hash():
    text, ids = completions("\x01\x00\x00\x00"), completions([1])
    assert text.segments == ids.segments
    assert not set(text.blocks(1).hashes) & set(ids.blocks(1).hashes)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "text", "x"]), inner)
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(json_values, json_values, json_values)
def test_any_json_with_a_model_is_accepted(messages, tools, prompt):
    body = {"model": "m", "messages": messages, "tools": tools, "prompt": prompt}
    raw = json.dumps(body).encode()
    assert hashes(raw) == hashes(raw)
    assert hashes(raw, COMPLETIONS) == hashes(raw, COMPLETIONS)
