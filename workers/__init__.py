"""The house beside the GPU: what joins an engine to the proxy, stands in for one, and measures both.

Here live the agent that joins a running vLLM (`agent`), the stand-in for vLLM (`sim`), the bench (`bench`)
and the command `homing-worker` (`cli`).
Nothing here imports `proxy`: the two share only the wire in `docs/reference/registration.md`.
"""
