"""The built-in agent load, its report, and the demo that runs both.

Here live the synthetic coding-agent conversations, the client that drives them and measures
time to first token, the table and the bar file, and the demo's own child processes.
The proxy is only ever a process at the other end of a socket: nothing here imports it, and nothing
here knows how it hashes or places.
``workers.cli`` may call ``demo.run``; measuring targets may call the rest.
"""
