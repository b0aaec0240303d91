"""Which headers travel, in each direction."""

from __future__ import annotations

from collections.abc import Iterable

from .asgi import Headers

# RFC 9110 §7.6.1, and the older ones that are still seen: they concern one connection only.
HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
# The client's credentials are for the proxy; a worker never sees them. Host and length are the new request's own.
NOT_FOR_WORKERS = HOP_BY_HOP | {
    b"authorization",
    b"x-api-key",
    b"cookie",
    b"host",
    b"content-length",
    b"expect",
}
# The proxy answers with its own; a worker's Server and Date would double what this server adds.
NOT_FOR_CLIENTS = HOP_BY_HOP | {b"x-request-id", b"server", b"date"}


def to_worker(headers: Iterable[tuple[bytes, bytes]], request_id: str) -> Headers:
    """Returns the client's headers that travel on, with the request's id."""
    kept = without(headers, NOT_FOR_WORKERS | {b"x-request-id"})
    return [*kept, (b"x-request-id", request_id.encode("latin-1"))]


def to_client(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Returns the worker's headers that travel back; repeated ones stay repeated."""
    return without(headers, NOT_FOR_CLIENTS)


def without(headers: Iterable[tuple[bytes, bytes]], dropped: frozenset[bytes] | set[bytes]) -> Headers:
    """Drops headers by name, and those that `Connection` names. Names come out in lower case."""
    lowered = [(name.lower(), value) for name, value in headers]
    named = {token.strip().lower() for name, value in lowered if name == b"connection" for token in value.split(b",")}
    return [(name, value) for name, value in lowered if name not in dropped and name not in named]
