"""What is told about the traffic: `metrics` (one table of series) and `logs` (one line per request).

Reads outcomes, never influences one. Called by the director's settle and by the admin door.
"""
