"""Transports to workers, behind one protocol of two methods (`edge.ports.Transport`).

`wire` is the fast one: HTTP/1.1 on asyncio and httptools. `reference` is httpx: slower, with proxies and unix
sockets, and what the contract tests hold the fast one against. Never here: a choice of worker, a retry.
"""
