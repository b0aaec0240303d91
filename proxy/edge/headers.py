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
# The client's credentials are for the proxy; a worker never sees them. Host, length and id are the new request's own.
NOT_FOR_WORKERS = HOP_BY_HOP | {
    b"x-request-id",
    b"authorization",
    b"x-api-key",
    b"api-key",
    b"cookie",
    b"host",
    b"content-length",
    b"expect",
}
# The proxy answers with its own; a worker's Server and Date would double what this server adds.
NOT_FOR_CLIENTS = HOP_BY_HOP | {
    b"server",
    b"date",
    b"x-request-id",
    b"x-homing-worker",
    b"x-homing-reason",
    b"x-homing-expected-tokens",
    b"x-homing-attempts",
}


def to_worker(headers: Iterable[tuple[bytes, bytes]], request_id: str) -> Headers:
    """Returns the client's headers that travel on, with the request's id. Names are in lower case, as ASGI has them."""
    kept = without(headers, NOT_FOR_WORKERS)
    kept.append((b"x-request-id", request_id.encode("latin-1")))
    return kept


def to_client(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Returns the worker's headers that travel back; repeated ones stay repeated. Names are in lower case."""
    return without(headers, NOT_FOR_CLIENTS)


def without(headers: Iterable[tuple[bytes, bytes]], dropped: frozenset[bytes]) -> Headers:
    """Drops headers by name, and those that `Connection` names."""
    kept: Headers = []
    named: list[bytes] = []
    for header in headers:
        name = header[0]
        if name not in dropped:
            kept.append(header)
        elif name == b"connection":
            named += [token.strip().lower() for token in header[1].split(b",")]
    return [header for header in kept if header[0] not in named] if named else kept
