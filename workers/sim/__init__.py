"""An honest stand-in for one vLLM worker: its wire, its paged prefix cache, its batching and its speed.

Here live the cache, the scheduler, the speed curves of known GPUs, the text they emit and the HTTP surface.
Nothing here imports `proxy`: hashing and tokenization are the simulator's own, so that it cannot agree with the
proxy's mistakes.
No answer is faked: a hit is reported because the cache holds the blocks, and time passes because work was done.
`workers.cli` calls `serve.run`; tests and the bench may embed `app.create_app`.
"""
