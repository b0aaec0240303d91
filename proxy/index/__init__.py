"""Who holds which prefix.

`tree` knows every served prompt (how long, which turn), `memory` who holds which part of it, `shared` is the same with
a copy in Redis, written as `records`. Never here: liveness, load, HTTP. Called by the director through `edge.ports`.
"""
