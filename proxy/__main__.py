"""`python -m proxy`: the same as the command `homing`."""

from .cli import main

if __name__ == "__main__":
    main()
