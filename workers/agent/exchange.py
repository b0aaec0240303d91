"""The four calls of `docs/reference/registration.md`, and what each answer means.

Every answer becomes a value, `ProxyAway` (ask again later) or `MembershipRefused` (do not ask again).
Nothing here waits, retries or remembers: that is `membership`'s part.
"""

import asyncio
from dataclasses import dataclass
from http import HTTPStatus
from types import TracebackType
from typing import Self
from urllib.parse import quote

import httpx

_CALL_SECONDS = 10.0
"""A registration may make the proxy ask the old engine of this name first: more time than a heartbeat."""

_RETRIED = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS})


class MembershipRefused(Exception):
    """The proxy said no, for a reason that time does not mend; the message says in one line what to do."""


class ProxyAway(Exception):
    """The proxy could not be reached or could not answer just now; asking again later is right."""


@dataclass(frozen=True, slots=True)
class Grant:
    """What a registration was answered with, both in seconds."""

    heartbeat_seconds: float
    lease_seconds: float


class Exchange:
    """Speaks for one worker to one proxy, with `token` as the bearer.

    An `async with` block owns its connections.
    """

    def __init__(self, proxy_url: str, token: str | None) -> None:
        self.proxy_url = proxy_url.rstrip("/")
        self._token = token

    async def __aenter__(self) -> Self:
        """Opens the client; raises `MembershipRefused` when the token cannot be sent in a header."""
        headers = {"accept": "application/json"}
        if self._token is not None:
            if not (self._token and self._token.isascii() and self._token.isprintable()):
                raise MembershipRefused(
                    "HOMING_JOIN_TOKEN must be printable ASCII and not empty: "
                    "set it to the value the proxy was started with"
                )
            headers["authorization"] = f"Bearer {self._token}"
        # No connection is kept: a new one every few seconds is cheap, and none is found dead at its next use.
        self._client = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(_CALL_SECONDS, connect=3.0),
            limits=httpx.Limits(max_connections=4, max_keepalive_connections=0),
            follow_redirects=False,
            trust_env=False,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def register(self, body: dict[str, object]) -> Grant:
        """Registers, and returns how often to beat."""
        answer = await self._call("POST", "/workers", body)
        if answer.status_code == HTTPStatus.OK:
            return self._read_grant(answer)
        said = self._quote(answer)
        if answer.status_code == HTTPStatus.CONFLICT:
            raise MembershipRefused(
                f"the proxy at {self.proxy_url} already has a live worker {body['id']!r} at another address "
                f"({said}): pass another --id, or stop that worker first"
            )
        if answer.status_code in {HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED} or answer.is_redirect:
            raise MembershipRefused(
                f"{self.proxy_url} does not answer as a Homing proxy ({said}): check the proxy's URL"
            )
        raise MembershipRefused(
            f"the proxy at {self.proxy_url} does not accept this registration ({said}): "
            "check --id, --advertise and that both sides run the same version of homing"
        )

    async def heartbeat(self, worker_id: str, incarnation: str, within: float) -> str | None:
        """Renews the lease; returns the worker's state there, `None` = it must register again."""
        answer = await self._call("POST", f"{_path(worker_id)}/heartbeat", {"incarnation": incarnation}, within)
        return None if self._is_unknown(answer) else str(_read_object(answer).get("state"))

    async def drain(self, worker_id: str, incarnation: str) -> int | None:
        """Asks for no more placements; returns the requests in flight, `None` = no longer known there."""
        answer = await self._call("POST", f"{_path(worker_id)}/drain", {"incarnation": incarnation})
        if self._is_unknown(answer):
            return None
        inflight = _read_object(answer).get("inflight")
        if not isinstance(inflight, int):
            raise ProxyAway(f"the proxy at {self.proxy_url} did not say how many requests are in flight")
        return inflight

    async def remove(self, worker_id: str, incarnation: str) -> None:
        """Takes the worker out of the fleet; one that is not there is as good as removed."""
        self._is_unknown(await self._call("DELETE", f"{_path(worker_id)}?incarnation={quote(incarnation, safe='')}"))

    async def _call(
        self, method: str, path: str, body: dict[str, object] | None = None, within: float = _CALL_SECONDS
    ) -> httpx.Response:
        """Makes one call in at most `within` seconds, and sorts out what means the same everywhere."""
        try:
            async with asyncio.timeout(within):
                answer = await self._client.request(method, self.proxy_url + path, json=body)
        except TimeoutError:
            raise ProxyAway(f"the proxy at {self.proxy_url} did not answer in {within:g} s") from None
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise ProxyAway(f"the proxy at {self.proxy_url} cannot be reached ({reason})") from error
        if answer.is_server_error or answer.status_code in _RETRIED:
            raise ProxyAway(f"the proxy at {self.proxy_url} cannot answer now ({self._quote(answer)})")
        if answer.status_code == HTTPStatus.UNAUTHORIZED:
            raise MembershipRefused(
                f"the proxy at {self.proxy_url} does not accept this join token ({self._quote(answer)}): "
                "set HOMING_JOIN_TOKEN to the value the proxy was started with"
            )
        if answer.status_code == HTTPStatus.FORBIDDEN:
            raise MembershipRefused(
                f"the proxy at {self.proxy_url} lets this worker in no fleet ({self._quote(answer)}): "
                "start it with HOMING_JOIN_TOKEN set and this worker's address in its allowed networks"
            )
        return answer

    def _is_unknown(self, answer: httpx.Response) -> bool:
        """Tells whether the proxy holds no such worker, or another life; any other no is `ProxyAway`."""
        if answer.is_success:
            return False
        if answer.status_code in {HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT}:
            return True
        raise ProxyAway(f"the proxy at {self.proxy_url} answered {self._quote(answer)}")

    def _read_grant(self, answer: httpx.Response) -> Grant:
        fields = _read_object(answer)
        beat, lease = fields.get("heartbeat_seconds"), fields.get("lease_seconds")
        if not (isinstance(beat, int | float) and isinstance(lease, int | float) and 0 < beat <= lease):
            raise MembershipRefused(
                f"{self.proxy_url} answered with heartbeat_seconds={beat!r} and lease_seconds={lease!r}, "
                "which is no lease: check that it is a Homing proxy"
            )
        return Grant(heartbeat_seconds=float(beat), lease_seconds=float(lease))

    def _quote(self, answer: httpx.Response) -> str:
        """Returns the status and, on the same line, what the proxy said about it."""
        error = _read_object(answer).get("error")
        message = error.get("message") if isinstance(error, dict) else None
        said = " ".join(str(message).split())[:300] if message else answer.reason_phrase
        return f"{answer.status_code}: {said}"


def _path(worker_id: str) -> str:
    return f"/workers/{quote(worker_id, safe='')}"


def _read_object(answer: httpx.Response) -> dict[str, object]:
    """Reads a JSON object; anything else reads as an empty one."""
    try:
        fields = answer.json()
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}
