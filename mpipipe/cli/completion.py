"""mpipipe completion: what a shell needs to complete commands, flags and choices."""

from __future__ import annotations

from typing import Annotated

from mpipipe.cli.commands import ALL, Command, Commands
from mpipipe.cli.flags import Operand
from mpipipe.cli.parser import Parser, add_parameters
from mpipipe.cli.refusal import WRONG_USAGE
from mpipipe.comm.abort import Stop

SHELLS = ("bash", "zsh", "tcsh")


def completion(shell: Annotated[str, Operand("bash, zsh or tcsh")]) -> int:
    """Print a script that completes commands, flags and choices (eval "$(mpipipe completion bash)").

    It completes the program `mpipipe`, which installing the package makes. It needs the extra [completion].
    """
    try:
        import shtab
    except ImportError:
        raise Stop(
            "mpipipe: completion needs shtab\n  remedy: pip install 'mpipipe[completion]'\n", WRONG_USAGE
        ) from None
    if shell not in SHELLS:
        raise Stop(f"mpipipe: no completion for {shell!r}\n  expected: {', '.join(SHELLS)}\n", WRONG_USAGE)
    parser = Parser("mpipipe")
    _add(parser, ALL)
    print(shtab.complete(parser, shell))
    return 0


def _add(parser: Parser, commands: Commands) -> None:
    below = parser.add_subparsers(parser_class=Parser)
    for command in commands.commands:
        child = below.add_parser(command.name, help=command.summary, prog=f"{parser.prog} {command.name}")
        if isinstance(command, Command):
            add_parameters(child, command.load())
        else:
            _add(child, command)
