"""The proxy: a conversation goes home, to the vLLM worker that holds its prefix.

Rooms, from the street inwards: `edge` (bytes in and out), `fleet` (who is alive, how busy),
`index` (who holds which prefix), `telemetry` (what is told about it), `core` (pure decisions).
`app` wires them; nobody else knows them all. `workers` is another house: only the wire is shared.
"""

__version__ = "0.1.0"
