"""What starts an engine and answers for it: one life after another, from the command line to the last process.

Here live the guard that leaves no orphan, the log's rules (start-up phases and known failures, as data), the
supervisor that restarts, and `homing-worker run`.
Nothing here speaks to the proxy: joining is `workers.agent.join`'s part, and there is no second way to join.
`workers.cli` calls `run`.
"""
