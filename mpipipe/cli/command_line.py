"""Which command a command line names, and how the ranks of a job agree on it.

commands.py lists the commands. Each one is a function, whose parameters are its flags (flags.py). parser.py reads them.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any, NamedTuple

from mpipipe import __version__, ended
from mpipipe.cli.commands import ALL, Command, Commands
from mpipipe.cli.refusal import WRONG_USAGE, refusing
from mpipipe.cli.stdout import show
from mpipipe.comm import launcher, runtime
from mpipipe.comm.abort import Stop, run_or_abort
from mpipipe.comm.group import group_of
from mpipipe.comm.report import INTERRUPTED, write
from mpipipe.errors import BackendError
from mpipipe.wording import near

WIDTH = 12  # of the longest name of a command, and two spaces


class Chosen(NamedTuple):
    """A command by its names, such as draw timeline, and the arguments that it was given."""

    names: tuple[str, ...]
    given: dict[str, Any]


class Refused(NamedTuple):
    """What is shown in place of running a command, and the exit code."""

    text: str
    code: int


def run() -> int:
    """Run the command that sys.argv names; return its exit code.

    Wrong usage is 2, and one rank reports it.
    """
    if _is_job():
        return run_or_abort(_command_of_job)
    try:
        if launcher.launcher_size(os.environ) is None:
            with refusing():
                ended.begin(True, "1 rank")
        else:  # one of several that do not see each other: none can prove that all have ended
            os.environ.pop(ended.VARIABLE, None)
        code = execute(sys.argv[1:])
        show("")  # what was written without it is flushed
        if code == 0:
            ended.end()
    except Stop as stop:
        write(stop.text)
        code = stop.code
    except KeyboardInterrupt:
        write("mpipipe: interrupted\n")
        code = INTERRUPTED
    return code


def execute(words: list[str]) -> int:
    """Run the command that `words` name, in this process alone; return its exit code.

    Raises Stop for wrong usage and for what a command refuses, and SystemExit where the help was asked for.
    """
    return _run(_chosen(words))


def _is_job() -> bool:
    """Whether this process is one rank of several: then nothing may end it alone, not even wrong usage."""
    if launcher.launcher_size(os.environ) is None:
        return False
    try:
        return runtime.mpi().COMM_WORLD.size > 1
    except BackendError:
        return False


def _command_of_job() -> None:
    """Read the command line on rank 0, and run the command on all ranks. A rank with other words reads its own."""
    words, group = sys.argv[1:], group_of()
    outcome = (words, _outcome(words)) if group.rank == 0 else None
    read, found = group.broadcast("reading the command line", outcome)
    if read != words:
        found = _outcome(words)
    if isinstance(found, Refused):
        raise Stop(found.text, found.code)
    code = 0 if found is None else _run(found)
    if code:
        sys.exit(code)


def _outcome(words: list[str]) -> Chosen | Refused | None:
    """Return the command that a command line names, or why it is refused; None if it asked for help, now shown."""
    try:
        return _chosen(words)
    except Stop as stop:
        return Refused(stop.text, stop.code)
    except SystemExit:  # the help has been shown
        return None


def _chosen(words: list[str]) -> Chosen:
    """Read the command line. Raises Stop for wrong usage, and SystemExit where help or version were asked for."""
    from mpipipe.cli.parser import parser_of, program, wrong_usage  # on the rank that reads alone

    names: tuple[str, ...] = ()
    commands = ALL
    while True:
        prog = " ".join([program(), *names])
        if not words:
            raise Stop(_listing(prog, commands), WRONG_USAGE)
        name, *words = words
        if name in ("-h", "--help"):
            show(_listing(prog, commands))
            raise SystemExit(0)
        if name == "--version" and not names:
            show(f"mpipipe {__version__}\n")
            raise SystemExit(0)
        found = commands.find(name)
        if found is None:
            known = [*(command.name for command in commands.commands), "--help", *([] if names else ["--version"])]
            raise wrong_usage(prog, f"there is no command {name}", near(name, known))
        names = (*names, name)
        if isinstance(found, Command):
            return Chosen(names, parser_of(f"{prog} {name}", found.load()).parse(words))
        commands = found


def _listing(prog: str, commands: Commands) -> str:
    """Return the help of a group of commands: their names and what they do."""
    lines = [f"usage: {prog} COMMAND [options]", "", commands.summary, ""]
    lines += [f"  {command.name:<{WIDTH}}{command.summary}" for command in commands.commands]
    lines += ["", f"`{prog} COMMAND --help` explains one."]
    if not commands.name:
        lines += ["Start it with mpiexec or srun: mpiexec -n 4 python -m mpipipe train", "--version shows the version."]
    return "\n".join(lines) + "\n"


def _run(chosen: Chosen) -> int:
    """Run a command; return its exit code."""
    names, given = chosen.names, dict(chosen.given)
    found: Command | Commands | None = ALL
    for name in names:
        assert isinstance(found, Commands)
        found = found.find(name)
    assert isinstance(found, Command)
    level = given.pop("log_level", None)
    if level is not None:
        logging.basicConfig(format="%(name)s: %(levelname)s: %(message)s")
        logging.getLogger("mpipipe").setLevel(level.upper())
    return int(found.load()(**given) or 0)
