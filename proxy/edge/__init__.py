"""Bytes in, bytes out.

`guard` opens every request; the inference routes have two doors, `door` (a uvicorn protocol class) and `api` (raw
ASGI, any server), and one director behind both, whose `journey` is the one-way path of a request; `upstream` talks to
workers; `admin` is the control plane (FastAPI).
Never here: a choice of worker (that is `core.placement`) or knowledge of Redis.
"""
