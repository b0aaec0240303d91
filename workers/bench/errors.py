"""The one error of this package: a message for people, to be shown on one line."""


class BenchError(Exception):
    """The run cannot go on: says what happened, which value, and what to do next."""
