"""Which addresses a worker may have. A registration is an instruction to connect somewhere, so it is checked first."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from ..errors import BadRequest, Forbidden

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

# This machine and private networks. Link-local is left out: cloud metadata services live there.
PRIVATE = tuple(
    ipaddress.ip_network(text)
    for text in (
        "127.0.0.0/8",
        "::1/128",
        "10.0.0.0/8",
        "172.16.0.0/12",
        "192.168.0.0/16",
        "100.64.0.0/10",
        "fc00::/7",
    )
)


# Scheme, host and port, and nothing else: no user, path, query, space or control character.
BASE_URL = re.compile(r"https?://[^/?#@\s\x00-\x1f\x7f]+/?")


def read_url(url: str) -> str:
    """Checks a worker's base URL and returns it without a trailing slash.

    Raises:
        BadRequest: it is not an http(s) URL of a host.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as problem:
        raise BadRequest(f"url {url!r} cannot be read ({problem}); give http://HOST:PORT", param="url") from None
    is_plain = BASE_URL.fullmatch(url) is not None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or not is_plain:
        raise BadRequest(f"url {url!r} is not a worker's base URL; give http://HOST:PORT", param="url")
    return url.rstrip("/")


async def check_allowed(url: str, allowed: Sequence[Network]) -> None:
    """Resolves the host of a checked URL and makes sure that every address of it is allowed.

    Raises:
        BadRequest: the name does not resolve.
        Forbidden: an address lies outside the allowed networks.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, parts.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as problem:  # UnicodeError: a label is empty or too long
        raise BadRequest(f"the host {host!r} of url {url!r} does not resolve ({problem})", param="url") from None
    for *_, address in found:
        ip = ipaddress.ip_address(str(address[0]).partition("%")[0])
        if not any(ip.version == network.version and ip in network for network in allowed):
            raise Forbidden(
                f"the address {ip} of worker url {url!r} is in no allowed network; allow it with --worker-network",
                param="url",
            )
