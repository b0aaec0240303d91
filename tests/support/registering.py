"""A scripted worker's registration at a proxy under test, over the wire."""

import json

from tests.support.clients import Response
from tests.support.fleet import Proxy
from tests.support.scripted import Scripted, until

TOKEN = "open-sesame"
BEARER = [("authorization", f"Bearer {TOKEN}")]


def card(worker: Scripted, worker_id: str = "h200-a", incarnation: str = "life-1", **fields: object) -> dict:
    identity = {"name": "H200 SXM", "gpu_count": 1, "source": "declared"}
    engine = {"version": "0.32.0", "models": worker.models, "block_size": 16, "capacity_tokens": 65536}
    told = {"id": worker_id, "url": worker.url, "incarnation": incarnation, "identity": identity, "engine": engine}
    return told | fields


async def tell(proxy: Proxy, path: str, body: object, headers=BEARER, method: str = "POST") -> Response:
    return await proxy.call(method, path, body if isinstance(body, bytes) else json.dumps(body).encode(), headers)


async def join(proxy: Proxy, worker: Scripted, worker_id: str = "h200-a", incarnation: str = "life-1") -> None:
    answer = await tell(proxy, "/workers", card(worker, worker_id, incarnation))
    assert (answer.status, json.loads(answer.body)["id"]) == (200, worker_id)
    await until(lambda: proxy.states.get(worker_id) == "ready")
