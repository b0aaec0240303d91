"""The quiet room: values in, values out.

Here live the decisions: what a prompt is, how it is hashed, which worker gets it, what a stream says.
Never here: I/O, a clock, randomness, logging, asyncio, a framework; time and chance are arguments.
Every other room may call in; this one calls `errors` only.
"""
