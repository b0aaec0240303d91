"""What two answers to one probe prompt prove, and what is sent to find out."""

import itertools
import json

import httpx
import pytest

from proxy.core.types import Usage
from proxy.fleet.registry import Facts, Source, Worker
from proxy.fleet.verify import PROBE_TOKENS, Verification, Verifier, judge, probe_text, read_verification

pytestmark = pytest.mark.anyio


def worker(*, block: int | None = 32, window: int | None = 16384, caching: bool | None = True) -> Worker:
    models = ({"id": "b", "max_model_len": window}, {"id": "a"})
    facts = Facts(models=models, block_tokens=block, prefix_caching=caching)
    return Worker("w", "http://w:8000", "life-1", Source.REGISTERED, facts=facts)


def usage(prompt: int | None, cached: int | None) -> Usage:
    return Usage(prompt, cached, 1)


# First and second answer, block, seconds of each; then passed, trust, speed, and the reason's beginning.
CASES = {
    "hit": (usage(512, 0), usage(512, 480), 32, (0.5, 0.1), True, "inferred", 1200.0, None),
    "no hit": (
        usage(512, 0),
        usage(512, 0),
        32,
        (0.5, 0.5),
        False,
        "inferred",
        None,
        "the second send of the same 512",
    ),
    "one block and a token": (
        usage(33, 0),
        usage(33, 0),
        32,
        (0.5, 0.5),
        False,
        "inferred",
        None,
        "the second send of",
    ),
    "too short to hit": (usage(32, 0), usage(32, 0), 32, (0.5, 0.5), True, "inferred", None, None),
    "block unknown": (usage(512, 0), usage(512, 0), None, (0.5, 0.5), True, "inferred", None, "nothing was delivered"),
    "prompt unknown": (usage(None, 0), usage(None, 0), 32, (0.5, 0.5), True, "inferred", None, None),
    "says nothing": (usage(512, None), usage(512, None), 32, (0.5, 0.1), True, "blind", None, "it reports no cached"),
    "says it late": (usage(512, None), usage(512, 480), 32, (0.5, 0.1), True, "inferred", None, None),
    "held it before": (usage(512, 480), usage(512, 480), 32, (0.1, 0.1), True, "inferred", None, None),
    "held part of it": (usage(512, 96), usage(512, 480), 32, (0.5, 0.25), True, "inferred", 1536.0, None),
    "second is slower": (usage(512, 0), usage(512, 480), 32, (0.1, 0.5), True, "inferred", None, None),
    "same time": (usage(512, 0), usage(512, 480), 32, (0.1, 0.1), True, "inferred", None, None),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_two_answers_show(case) -> None:
    first, second, block, seconds, passed, trust, speed, reason = case
    told = judge(worker(block=block), first, second, *seconds)
    assert (told.passed, told.trust, told.prefill_tokens_per_second) == (passed, trust, speed)
    assert (told.reason or "").startswith(reason or "")
    assert (told.reason is None) == (reason is None)
    assert (told.prompt_tokens, told.cached_tokens) == (second.prompt_tokens, second.cached_tokens)
    assert (told.incarnation, told.first_seconds, told.second_seconds) == ("life-1", *seconds)


def test_a_reason_says_what_to_do_next() -> None:
    blind = judge(worker(), usage(512, None), usage(512, None), 0.5, 0.1)
    assert "--enable-prompt-tokens-details" in blind.reason


def test_a_report_is_read_back_as_it_was() -> None:
    told = judge(worker(), usage(512, 0), usage(512, 480), 0.5, 0.1)
    assert read_verification(json.loads(json.dumps(told.report()))) == told
    assert read_verification({"passed": True}) is None
    assert read_verification({**told.report(), "from_a_later_version": 1}) is None


@pytest.mark.parametrize(
    ("block", "window", "tokens"),
    [
        (32, 16384, PROBE_TOKENS),
        (784, 16384, 3 * 784),
        (None, 16384, PROBE_TOKENS),
        (784, 2048, 1024),
        (32, 256, 128),
        (32, None, PROBE_TOKENS),
    ],
)
def test_the_probe_is_a_few_blocks_and_stays_inside_the_window(block, window, tokens) -> None:
    facts = worker(block=block, window=window).facts
    assert len(probe_text(facts)) == 4 * tokens
    assert probe_text(facts) != probe_text(facts)


class Engine:
    """Answers probes from a list; keeps what was asked."""

    def __init__(self, *answers: httpx.Response | Exception) -> None:
        self.answers = list(answers)
        self.asked: list[dict] = []

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        assert (request.method, str(request.url)) == ("POST", "http://w:8000/v1/completions")
        self.asked.append(json.loads(request.content))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def verify(self, one: Worker) -> Verification:
        clock = itertools.count()
        async with httpx.AsyncClient(transport=httpx.MockTransport(self)) as client:
            return await Verifier(client, lambda: float(next(clock))).verify(one)


def answer(cached: int | None) -> httpx.Response:
    details = None if cached is None else {"cached_tokens": cached}
    told = {"prompt_tokens": 512, "completion_tokens": 1, "prompt_tokens_details": details}
    return httpx.Response(200, json={"choices": [], "usage": told})


async def test_the_same_prompt_is_sent_twice_for_one_token() -> None:
    engine = Engine(answer(0), answer(480))
    told = await engine.verify(worker())
    assert told.passed
    first, second = engine.asked
    assert first == second
    assert (first["model"], first["max_tokens"]) == ("a", 1)
    assert (told.first_seconds, told.second_seconds) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("answers", "asked", "reason"),
    [
        ([httpx.Response(500)], 1, "it answered a probe completion with 500"),
        ([httpx.Response(404)], 1, "it answered a probe completion with 404"),
        ([answer(0), httpx.Response(503)], 2, "it answered a probe completion with 503"),
        ([httpx.ReadTimeout("late")], 1, "it did not answer a probe completion (ReadTimeout)"),
        ([answer(0), httpx.ReadError("reset")], 2, "it did not answer a probe completion (ReadError)"),
    ],
)
async def test_an_engine_that_does_not_answer_fails(answers, asked, reason) -> None:
    engine = Engine(*answers)
    told = await engine.verify(worker())
    assert (told.passed, told.reason, told.incarnation) == (False, reason, "life-1")
    assert told.prefill_tokens_per_second is None
    assert len(engine.asked) == asked


async def test_an_engine_whose_cache_is_off_is_not_even_asked() -> None:
    engine = Engine()
    told = await engine.verify(worker(caching=False))
    assert (told.passed, engine.asked) == (False, [])
    assert "--enable-prefix-caching" in told.reason


@pytest.mark.parametrize("body", [b"", b"not JSON", b"[]", b'{"usage": 5}'])
async def test_an_answer_that_cannot_be_read_counts_as_blind(body) -> None:
    engine = Engine(httpx.Response(200, content=body), httpx.Response(200, content=body))
    told = await engine.verify(worker())
    assert (told.passed, told.trust, told.cached_tokens) == (True, "blind", None)
