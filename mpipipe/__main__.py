"""Starts the command line: python -m mpipipe."""

from mpipipe.cli import main

if __name__ == "__main__":
    main()
