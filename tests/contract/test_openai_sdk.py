"""The OpenAI client, with nothing changed but its base URL: answers, streams, and its own typed errors."""

import asyncio

import openai
import pytest

from tests.support.fleet import LOOP, Proxy, proxying
from tests.support.scripted import (
    DONE,
    ROLE,
    Exchange,
    Scripted,
    adapts,
    answers,
    chunk,
    completion,
    hangs,
    stream_head,
    streams,
    token,
    until,
)

pytestmark = pytest.mark.anyio
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def anyio_backend():
    return LOOP


def client_of(proxy: Proxy, **given: object) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(**{"base_url": f"{proxy.url}/v1", "api_key": "sk-secret", "max_retries": 0} | given)


async def test_an_answer_in_one_piece() -> None:
    async with Scripted(play=adapts) as worker, proxying(worker) as proxy, client_of(proxy) as client:
        raw = await client.chat.completions.with_raw_response.create(model="m1", messages=HI)
        assert raw.headers["x-homing-worker"] == "w0"
        assert raw.headers["x-homing-attempts"] == "1"
        answer = raw.parse()
        assert answer.choices[0].message.content == "Hello"
        assert (answer.usage.prompt_tokens, answer.usage.prompt_tokens_details.cached_tokens) == (100, 0)
        assert b"sk-secret" not in worker.heard[0].raw
        assert [model.id async for model in client.models.list()] == ["m1"]
        assert (await client.models.retrieve("m1")).id == "m1"


async def test_a_stream() -> None:
    async with Scripted(play=adapts) as worker, proxying(worker) as proxy, client_of(proxy) as client:
        chunks = [
            piece
            async for piece in await client.chat.completions.create(
                model="m1", messages=HI, stream=True, stream_options={"include_usage": True}
            )
        ]
        assert "".join(piece.choices[0].delta.content or "" for piece in chunks if piece.choices) == "Hello"
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-1].usage.prompt_tokens == 100


async def test_the_older_completions() -> None:
    body = completion().replace(b"chat.completion", b"text_completion")
    body = body.replace(b'"message": {"role": "assistant", "content": "Hello"}', b'"text": "Hello"')
    async with Scripted(play=answers(body)) as worker, proxying(worker) as proxy, client_of(proxy) as client:
        for prompt in ("Once", [1, 2, 3]):
            assert (await client.completions.create(model="m1", prompt=prompt)).choices[0].text == "Hello"
        assert worker.served == 2


VLLM_ERROR = b'{"error":{"message":"This model\'s maximum context length is 16384 tokens.","type":"BadRequestError","param":"input_tokens","code":400}}'


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_workers_errors_are_typed(is_stream: bool) -> None:
    expected = [
        (400, openai.BadRequestError),
        (404, openai.NotFoundError),
        (422, openai.UnprocessableEntityError),
        (429, openai.RateLimitError),
        (500, openai.InternalServerError),
        (503, openai.InternalServerError),
    ]
    async with Scripted() as worker, proxying(worker) as proxy, client_of(proxy) as client:
        for status, kind in expected:
            worker.play = answers(VLLM_ERROR, status)
            with pytest.raises(kind, match="maximum context length is 16384") as caught:
                await client.chat.completions.create(model="m1", messages=HI, stream=is_stream)
            assert (caught.value.status_code, caught.value.param) == (status, "input_tokens")
            assert caught.value.request_id == caught.value.response.headers["x-request-id"]


async def test_the_proxys_own_errors_are_typed() -> None:
    async with Scripted() as worker, proxying(worker) as proxy, client_of(proxy) as client:
        with pytest.raises(openai.NotFoundError, match="`nope` does not exist") as unknown:
            await client.chat.completions.create(model="nope", messages=HI)
        assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.BadRequestError) as nameless:
            await client.chat.completions.create(model="", messages=HI)
        assert nameless.value.code == "missing_model"
        with pytest.raises(openai.NotFoundError) as lost:
            await client.embeddings.create(model="m1", input="x")
        assert lost.value.code == "not_found"
        await worker.refuse()
        with pytest.raises(openai.InternalServerError) as dead:
            await client.chat.completions.create(model="m1", messages=HI)
        assert dead.value.status_code in (502, 503)
        await proxy.ready()
        with pytest.raises(openai.InternalServerError) as away:
            await client.chat.completions.create(model="m1", messages=HI)
        assert (away.value.status_code, away.value.code) == (503, "no_worker")


async def test_a_stream_that_breaks_is_an_error_and_no_end() -> None:
    go = asyncio.Event()

    async def dies(exchange: Exchange) -> None:
        exchange.send(stream_head() + chunk(ROLE) + chunk(token("one")))
        await go.wait()
        exchange.reset()

    async with Scripted(play=dies) as worker, proxying(worker) as proxy, client_of(proxy) as client:
        stream = await client.chat.completions.create(model="m1", messages=HI, stream=True)
        seen = []

        async def read() -> None:
            async for piece in stream:
                seen.append(piece.choices[0].delta.content)
                if seen[-1]:
                    go.set()

        with pytest.raises(openai.APIError, match="worker w0 broke off its answer") as caught:
            await read()
        assert seen == ["", "one"]
        assert caught.value.code == "worker_died"


async def test_a_client_that_stops_listening_stops_the_worker() -> None:
    async def trickles(exchange: Exchange) -> None:
        exchange.send(stream_head() + chunk(ROLE))
        while True:
            exchange.send(chunk(token("x")))
            await asyncio.sleep(0.02)

    async with Scripted(play=trickles) as worker, proxying(worker) as proxy, client_of(proxy) as client:
        stream = await client.chat.completions.create(model="m1", messages=HI, stream=True)
        async for piece in stream:
            if piece.choices[0].delta.content:
                break
        await stream.close()
        await until(lambda: not worker.busy, seconds=2)
        worker.play = hangs
        with pytest.raises(openai.APITimeoutError):
            await client.chat.completions.create(model="m1", messages=HI, timeout=0.2)
        await until(lambda: not worker.busy, seconds=2)
        await until(lambda: proxy.results == ["client_gone", "client_gone"])


async def test_the_clients_own_retries_find_the_fleet_again() -> None:
    async with Scripted() as worker, proxying(worker) as proxy, client_of(proxy, max_retries=3) as client:
        worker.plays += [answers(b'{"error":{"message":"busy"}}', 503), streams(ROLE, token("yes"), DONE)]
        stream = await client.chat.completions.create(model="m1", messages=HI, stream=True)
        assert [piece.choices[0].delta.content async for piece in stream] == ["", "yes"]
        assert worker.served == 2
