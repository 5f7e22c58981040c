"""mpipipe completion: what a shell needs to complete commands, flags and choices."""

from __future__ import annotations

from typing import Annotated

from mpipipe.cli.command_line import ALL, Command, Parser, add_parameters
from mpipipe.cli.flags import Operand
from mpipipe.cli.output import refusing, show
from mpipipe.errors import ConfigError
from mpipipe.text import optional_library

SHELLS = ("bash", "zsh", "tcsh")


def completion(shell: Annotated[str, Operand("bash, zsh or tcsh")]) -> int:
    """Print a script that completes commands, flags and choices (eval "$(mpipipe completion bash)").

    It completes the program `mpipipe`, which installing the package makes. It needs the extra [completion].
    """
    with refusing("completion"):
        if shell not in SHELLS:
            raise ConfigError("no completion for this shell", found=shell, expected=", ".join(SHELLS))
        shtab = optional_library("shtab", "complete commands", "completion")
        parser = Parser("mpipipe")
        _add(parser, ALL)
        script = shtab.complete(parser, shell)
    show(f"{script}\n")
    return 0


def _add(parser: Parser, group: Command) -> None:
    below = parser.add_subparsers(parser_class=Parser)
    for name, command in group.commands.items():
        child = below.add_parser(name, help=command.summary, prog=f"{parser.prog} {name}")
        if command.commands:
            _add(child, command)
        else:
            add_parameters(child, command.load())
