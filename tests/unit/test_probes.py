"""What a probe makes of what engines answer, and of what happens while it asks."""

import json

import httpx
import pytest

from proxy.core.lifecycle import Event, State
from proxy.fleet.probes import SILENT_PROBES, Prober
from proxy.fleet.registry import EngineLoad, Facts, Registry, Source, Worker

pytestmark = pytest.mark.anyio

MODELS = {"object": "list", "data": [{"id": "m", "max_model_len": 100}]}
METRICS = 'vllm:num_requests_waiting{engine="0"} 2.0\nvllm:cache_config_info{block_size="32",num_gpu_blocks="10"} 1.0\n'


class Engine:
    """Answers by path: bytes, an object to be rendered, a status, or a fault to be raised."""

    def __init__(self, **answers):
        self.answers = {"v1/models": MODELS, "metrics": METRICS, "version": {"version": "0.32.0"}} | answers

    def __call__(self, request):
        answer = self.answers[request.url.path.lstrip("/")]
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, int):
            return httpx.Response(answer)
        content = answer if isinstance(answer, str | bytes) else json.dumps(answer)
        return httpx.Response(200, content=content)


class Desk:
    """One worker, its engine, and a prober with a clock."""

    def __init__(self, engine, warm=None, source=Source.REGISTERED):
        self.now = 0.0
        self.warmed = 0
        self.registry = Registry()
        self.worker = self.registry.upsert(Worker("a", "http://a", "1", source))

        async def note(worker):
            self.warmed += 1
            if warm is not None:
                warm(self)

        self.client = httpx.AsyncClient(transport=httpx.MockTransport(engine))
        self.prober = Prober(self.registry, self.client, lambda: self.now, note)

    async def probe(self, times=1):
        for _ in range(times):
            await self.prober.probe(self.worker)
        return self.worker.state


async def test_an_engine_that_answers_becomes_ready_and_is_warmed_once():
    desk = Desk(Engine())
    assert await desk.probe(3) is State.READY
    assert desk.warmed == 1
    assert desk.worker.facts == Facts("0.32.0", ({"id": "m", "max_model_len": 100},), 32, 320)
    assert desk.worker.load == EngineLoad(None, 2, None)


@pytest.mark.parametrize("version", [404, 500, "not json", {}, [], {"version": 3}, "[" * 10])
async def test_an_odd_version_is_no_obstacle(version):
    desk = Desk(Engine(version=version))
    assert await desk.probe() is State.READY
    assert desk.worker.facts.version is None


@pytest.mark.parametrize("page", [404, 500, "", "<html>", b"\xff\xfe"])
async def test_an_engine_without_metrics_serves_all_the_same(page):
    desk = Desk(Engine(metrics=page))
    assert await desk.probe() is State.READY
    assert desk.worker.load == EngineLoad()


@pytest.mark.parametrize(
    "models", [404, 503, "", "not json", [], {}, {"data": 5}, {"data": "m"}, httpx.ReadTimeout("slow")]
)
async def test_what_is_no_list_of_models_is_no_answer(models):
    engine = Engine()
    desk = Desk(engine)
    await desk.probe()
    engine.answers["v1/models"] = models
    assert await desk.probe(SILENT_PROBES - 1) is State.READY
    assert await desk.probe() is State.SUSPECT
    engine.answers["v1/models"] = MODELS
    assert await desk.probe() is State.READY


async def test_a_refused_connection_counts_at_once():
    engine = Engine()
    desk = Desk(engine)
    await desk.probe()
    engine.answers["v1/models"] = httpx.ConnectError("refused")
    assert await desk.probe() is State.SUSPECT
    assert await desk.prober.is_alive(desk.worker) is False


@pytest.mark.parametrize("data", [[], [None], [{"id": 5}], [{"object": "model"}]])
async def test_an_engine_that_serves_nothing_does_not_become_ready(data):
    desk = Desk(Engine(**{"v1/models": {"data": data}}))
    assert await desk.probe() is State.JOINING


async def test_a_restart_while_it_is_warmed_waits_for_a_probe_of_its_own():
    desk = Desk(Engine(), warm=lambda desk: desk.registry.restarted(desk.worker, "2") if desk.warmed == 1 else None)
    assert await desk.probe() is State.JOINING
    assert await desk.probe() is State.READY
    assert desk.warmed == 2


async def test_a_worker_that_leaves_while_it_is_warmed_stays_away():
    desk = Desk(Engine(), warm=lambda desk: desk.registry.apply(desk.worker, Event.REMOVED))
    await desk.probe()
    assert len(desk.registry) == 0
    assert desk.registry.snapshot().known_models == frozenset()


async def test_a_static_worker_is_named_by_when_its_engine_began():
    engine = Engine(metrics=METRICS + "process_start_time_seconds 1000.5\n")
    desk = Desk(engine, source=Source.STATIC)
    assert await desk.probe() is State.READY
    assert desk.worker.incarnation == "1000.500"
    engine.answers["metrics"] = METRICS + "process_start_time_seconds 2000.5\n"
    assert await desk.probe() is State.READY
    assert (desk.worker.incarnation, desk.warmed) == ("2000.500", 2)
