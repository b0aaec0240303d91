"""Bytes in, bytes out.

`guard` opens every request, `api` is the inference door (raw ASGI), `admin` the control plane (FastAPI),
`director` walks a request along its one-way path, `upstream` talks to workers, `relay` pumps.
Never here: a choice of worker (that is `core.placement`) or knowledge of Redis.
"""
