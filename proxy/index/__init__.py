"""Who holds which prefix.

`memory` answers on the hot path, `shared` is the same index with a copy in Redis, `history` knows how long
served prompts were. Never here: liveness, load, HTTP. Called by the director through `edge.ports`.
"""
