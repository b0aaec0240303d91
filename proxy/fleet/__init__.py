"""Who is alive, how busy, how fast.

`registry` is the live set and gives out snapshots and leases, `probes` asks the engines, `store` keeps the
set in Redis, `embedded` runs a Valkey of our own. Never here: prefixes, placement, client traffic.
"""
