"""The command line `python -m mpipipe`: what has to come before anything is imported."""

from __future__ import annotations

import sys

from mpipipe.cli.output import on_ranks, refusing, share_of_cores, show


def main() -> None:
    """Run the command that sys.argv names, and exit with its code: 2 for wrong usage."""
    name, *words = sys.argv[1:] or [""]
    if name == "train" and "--dry-run" not in words:
        from mpipipe.job import stop_signals

        stop_signals.hold(_last("--preempt-signals", words) or stop_signals.DEFAULT)
    from mpipipe.cli.command_line import run

    sys.exit(run())


def _last(option: str, words: list[str]) -> str:
    """Return the value of the last such option, "" where there is none."""
    value = ""
    for word, after in zip(words, [*words[1:], ""]):
        name, equals, text = word.partition("=")
        if name == option:
            value = text if equals else after
    return value
