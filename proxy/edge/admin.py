"""The control plane, in FastAPI: probes, metrics, the model list, and the fleet's membership."""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.exceptions import HTTPException

from .. import __version__
from ..core.lifecycle import Event
from ..errors import BadRequest, Forbidden, HomingError, NotFound, Unauthorized, WrongMethod
from .networks import Network, check_allowed, read_url

WORKER_ID = r"[A-Za-z0-9._-]{1,64}"


class Registration(BaseModel):
    """The body of `POST /workers`; docs/reference/registration.md explains the fields."""

    model_config = ConfigDict(extra="ignore")

    id: str = Field(pattern=f"^{WORKER_ID}$")
    url: str = Field(max_length=2048)
    incarnation: str = Field(min_length=1, max_length=128, pattern=r"^[!-~]+$")
    identity: dict[str, Any] = Field(default_factory=dict)
    engine: dict[str, Any] = Field(default_factory=dict)


class Life(BaseModel):
    """Names one life of a worker."""

    incarnation: str = Field(min_length=1, max_length=128)


class Desk(Protocol):
    """What the control plane does; the composition root implements it over fleet, index and store."""

    async def register(self, registration: Registration) -> dict[str, object]:
        """Takes in a worker. Raises BadRequest or Conflict."""

    def heartbeat(self, worker_id: str, incarnation: str) -> dict[str, object]:
        """Prolongs a lease. Raises NotFound or Conflict."""

    def drain(self, worker_id: str, incarnation: str) -> dict[str, object]:
        """Ends placements on a worker. Raises NotFound or Conflict."""

    def operate(self, worker_id: str, event: Event) -> dict[str, object]:
        """Cordons, uncordons or drains a worker for an operator. Raises NotFound."""

    async def expel(self, worker_id: str) -> None:
        """Removes a worker for an operator. Raises NotFound."""

    async def remove(self, worker_id: str, incarnation: str) -> None:
        """Forgets a worker. Raises NotFound or Conflict."""

    def workers(self) -> list[dict[str, object]]:
        """Renders the fleet."""

    def models(self) -> list[dict[str, object]]:
        """Returns the union of what ready workers serve."""

    def readiness(self) -> dict[str, object]:
        """Returns `{"ready": bool, "reasons": [...], ...}`."""

    def metrics(self) -> tuple[bytes, str]:
        """Renders the exposition and names its content type."""


@dataclass(frozen=True, slots=True)
class Access:
    """Who may do what. None for a token means that there is none."""

    join_token: str | None
    admin_key: str | None
    worker_networks: Sequence[Network]


def make_admin(desk: Desk, access: Access, lifespan: Callable[[FastAPI], Any]) -> FastAPI:
    """Builds the application for everything but inference."""
    app = FastAPI(
        title="Homing",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        lifespan=lifespan,
    )
    add_errors(app)
    add_public(app, desk)
    add_fleet(app, desk, access)
    add_membership(app, desk, access)
    return app


def add_public(app: FastAPI, desk: Desk) -> None:
    """Routes that anyone may ask."""

    @app.get("/livez")
    async def livez() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz")
    @app.get("/health")
    async def readyz() -> JSONResponse:
        report = desk.readiness()
        is_ready = bool(report["ready"])
        return JSONResponse(report, 200 if is_ready else 503, headers={} if is_ready else {"retry-after": "1"})

    @app.get("/metrics")
    async def metrics() -> Response:
        body, kind = desk.metrics()
        return Response(body, headers={"content-type": kind})

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/v1/models")
    async def models() -> dict[str, object]:
        return {"object": "list", "data": desk.models()}

    @app.get("/v1/models/{model:path}")
    async def model_of(model: str) -> dict[str, object]:
        for found in desk.models():
            if found.get("id") == model:
                return found
        raise NotFound(f"The model `{model}` does not exist. GET /v1/models lists what there is.", param="model")


def add_fleet(app: FastAPI, desk: Desk, access: Access) -> None:
    """Routes for operators."""

    async def may_operate(request: Request) -> None:
        if access.admin_key is not None:
            check_bearer(request, access.admin_key, "admin key", "HOMING_ADMIN_KEY")
        elif not is_loopback(request):
            raise Forbidden("This route is open to this machine only; set HOMING_ADMIN_KEY to use it from elsewhere.")

    @app.get("/workers", dependencies=[Depends(may_operate)])
    async def workers() -> dict[str, object]:
        return {"workers": desk.workers()}

    @app.get("/workers/{worker_id}", dependencies=[Depends(may_operate)])
    async def worker_of(worker_id: str) -> dict[str, object]:
        for worker in desk.workers():
            if worker["id"] == worker_id:
                return worker
        raise NotFound(f"There is no worker {worker_id!r}. GET /workers lists the fleet.")

    for name, event in OPERATIONS.items():
        add_operation(app, desk, name, event, may_operate)

    @app.post("/fleet/workers/{worker_id}/remove", status_code=204, dependencies=[Depends(may_operate)])
    async def expel(worker_id: str) -> Response:
        await desk.expel(worker_id)
        return Response(status_code=204)


# What an operator may do to a worker. The worker's own calls have the join token, these the admin key.
OPERATIONS = {"cordon": Event.CORDON, "uncordon": Event.UNCORDON, "drain": Event.DRAIN}


def add_operation(app: FastAPI, desk: Desk, name: str, event: Event, guard: Callable[..., Awaitable[None]]) -> None:
    """Adds `POST /fleet/workers/{id}/NAME`."""

    @app.post(f"/fleet/workers/{{worker_id}}/{name}", name=name, dependencies=[Depends(guard)])
    async def operate(worker_id: str) -> dict[str, object]:
        return desk.operate(worker_id, event)


def add_membership(app: FastAPI, desk: Desk, access: Access) -> None:
    """Routes for workers, behind the join token."""

    async def may_join(request: Request) -> None:
        if access.join_token is None:
            raise Forbidden("This proxy takes no registrations: start it with HOMING_JOIN_TOKEN set.")
        check_bearer(request, access.join_token, "join token", "HOMING_JOIN_TOKEN")

    # The token is checked before the body is read: a stranger's JSON is not even parsed.
    @app.post("/workers", dependencies=[Depends(may_join)])
    async def register(
        registration: Annotated[Registration, Depends(body_of(Registration))],
    ) -> dict[str, object]:
        url = read_url(registration.url)
        await check_allowed(url, access.worker_networks)
        return await desk.register(registration.model_copy(update={"url": url}))

    @app.post("/workers/{worker_id}/heartbeat", dependencies=[Depends(may_join)])
    async def heartbeat(worker_id: str, life: Annotated[Life, Depends(body_of(Life))]) -> dict[str, object]:
        return desk.heartbeat(worker_id, life.incarnation)

    @app.post("/workers/{worker_id}/drain", dependencies=[Depends(may_join)])
    async def drain(worker_id: str, life: Annotated[Life, Depends(body_of(Life))]) -> dict[str, object]:
        return desk.drain(worker_id, life.incarnation)

    @app.delete("/workers/{worker_id}", status_code=204, dependencies=[Depends(may_join)])
    async def remove(worker_id: str, incarnation: str) -> Response:
        await desk.remove(worker_id, incarnation)
        return Response(status_code=204)


# A registration lists an engine's models; a megabyte is far more than the longest.
MOST_CONTROL_BYTES = 1024 * 1024


def body_of(model: type[BaseModel]) -> Callable[[Request], Awaitable[BaseModel]]:
    """Reads a bounded JSON body as `model`, as a dependency, so that it runs after the token's check."""

    async def read(request: Request) -> BaseModel:
        size, pieces = 0, []
        async for piece in request.stream():
            size += len(piece)
            if size > MOST_CONTROL_BYTES:
                raise BadRequest(f"the body is over {MOST_CONTROL_BYTES} bytes")
            pieces.append(piece)
        try:
            return model.model_validate_json(b"".join(pieces))
        except ValidationError as problem:
            first = problem.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "body"
            raise BadRequest(f"{where}: {first['msg']}", param=where) from None

    return read


def add_errors(app: FastAPI) -> None:
    """Gives every error the OpenAI shape."""

    @app.exception_handler(HomingError)
    async def ours(_: Request, problem: HomingError) -> Response:
        return render(problem)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, problem: RequestValidationError) -> Response:
        first = problem.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return render(BadRequest(f"{where}: {first['msg']}", param=where))

    @app.exception_handler(HTTPException)
    async def framework(request: Request, problem: HTTPException) -> Response:
        if problem.status_code == 404:
            return render(NotFound(f"There is no route {request.method} {request.url.path} here."))
        if problem.status_code == 405:
            wrong = render(WrongMethod(f"{request.url.path} does not take {request.method}."))
            wrong.headers.update(problem.headers or {})
            return wrong
        error = {"message": problem.detail, "type": "invalid_request_error", "param": None, "code": None}
        return JSONResponse({"error": error}, problem.status_code, headers=problem.headers)


def render(problem: HomingError) -> Response:
    """Renders an error of ours."""
    headers = {"content-type": "application/json"}
    if problem.retry_after is not None:
        headers["retry-after"] = str(problem.retry_after)
    return Response(problem.body(), problem.status, headers)


def check_bearer(request: Request, expected: str, what: str, variable: str) -> None:
    """Compares the bearer token in constant time.

    Raises:
        Unauthorized: it is missing or another one.
    """
    given = re.match(r"(?i)bearer\s+(\S+)\s*$", request.headers.get("authorization", ""))
    if given is None:
        raise Unauthorized(f"The {what} is missing; send `Authorization: Bearer` with the value of {variable}.")
    if not hmac.compare_digest(given[1].encode("latin-1"), expected.encode()):
        raise Unauthorized(f"The {what} is not the one this proxy was started with; check {variable} on both sides.")


def is_loopback(request: Request) -> bool:
    """Tells whether the peer is this machine (a unix socket has no address and is)."""
    if request.client is None:
        return True
    try:
        return ipaddress.ip_address(request.client.host).is_loopback
    except ValueError:
        return False
