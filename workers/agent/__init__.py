"""What joins a running engine to the proxy: read it, name its hardware, register it, keep it registered.

Here live the membership in a fleet, the reader of an engine's facts, the hardware ledger and `join`.
Nothing here serves requests, starts an engine or imports `proxy`.
`workers.cli` calls `join`; `workers.sim` calls `membership`.
"""
