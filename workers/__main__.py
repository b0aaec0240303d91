"""Lets `python -m workers` be `homing-worker`."""

from workers.cli import main

if __name__ == "__main__":
    main()
