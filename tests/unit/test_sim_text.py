"""The simulator's own tokens: complete, stable under replay, about four bytes each."""

import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.sim import scheduler
from workers.sim.text import Answer, Prompt, Tokenizer, render_chat

BLOCK = 8
TOKENIZER = Tokenizer(BLOCK)


def pieces(text: bytes) -> list[bytes]:
    return list(Tokenizer(10**6).cut(text).tail)


@given(st.text() | st.text(alphabet=" \n\tab_<|>1."))
def test_no_byte_is_lost_and_blocks_are_what_single_tokens_make(text: str) -> None:
    raw = text.encode("utf-8")
    prompt = TOKENIZER.cut(raw)
    tokens = pieces(raw)
    assert b"".join(tokens) == raw
    assert prompt.tokens == len(tokens)
    assert list(prompt.blocks) == [
        b"".join(tokens[start : start + BLOCK]) for start in range(0, len(tokens) - BLOCK + 1, BLOCK)
    ]
    assert list(prompt.tail) == tokens[len(tokens) // BLOCK * BLOCK :]


def test_tokens_are_about_four_bytes_of_code() -> None:
    raw = inspect.getsource(scheduler).encode()
    assert 3.0 < len(raw) / TOKENIZER.cut(raw).tokens < 5.0


def test_an_answer_that_comes_back_is_cut_as_it_was_emitted() -> None:
    asked = [{"role": "user", "content": "Why?\n"}]
    first = TOKENIZER.cut(render_chat(asked, None, add_generation_prompt=True))
    answer = Answer(7, first, spaced=False)
    words = [answer.word() for _ in range(100)]
    later = [*asked, {"role": "assistant", "content": "".join(words)}, {"role": "user", "content": "And?"}]
    tokens = pieces(render_chat(later, None, add_generation_prompt=True))
    assert tokens[first.tokens : first.tokens + 101] == [*(word.encode() for word in words), Answer.end]


def test_an_answer_depends_on_seed_and_prompt_alone() -> None:
    def write(seed: int, text: bytes) -> list[str]:
        answer = Answer(seed, TOKENIZER.cut(text), spaced=True)
        return [str(answer.natural_tokens), *(answer.word() for _ in range(20))]

    assert write(1, b"a b c") == write(1, b"a b c")
    assert write(1, b"a b c") != write(2, b"a b c")
    assert write(1, b"a b c") != write(1, b"a b d")


def test_token_ids_are_grouped_into_blocks() -> None:
    prompt = TOKENIZER.group(list(range(10)))
    assert prompt == Prompt((b"0 1 2 3 4 5 6 7 ",), (b"8 ", b"9 "), 10)


@pytest.mark.parametrize("content", [None, "x", [{"type": "text", "text": "x"}], [{"type": "image_url"}], {"a": 1}, 5])
def test_any_content_is_rendered(content: object) -> None:
    text = render_chat([{"role": "user", "content": content}], None, add_generation_prompt=False)
    assert text.startswith(b"<|im_start|>user\n")
    assert text.endswith(b"<|im_end|>\n")


def test_tools_come_before_messages_and_their_order_matters() -> None:
    one = render_chat([{"role": "user", "content": "x"}], [{"a": 1, "b": 2}], add_generation_prompt=True)
    two = render_chat([{"role": "user", "content": "x"}], [{"b": 2, "a": 1}], add_generation_prompt=True)
    assert one.index(b'"a"') < one.index(b"<|im_start|>user")
    assert one != two
