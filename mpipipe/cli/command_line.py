"""Which command a command line names, and how the ranks of a job agree on it.

ALL lists the commands. Each one is a function, whose parameters are its flags (flags.py). A
`Parser` reads them.
"""

from __future__ import annotations

import argparse
import inspect
import logging
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from mpipipe import __version__
from mpipipe.cli.flags import REQUIRED, Argument, Operand, parameters_of
from mpipipe.cli.output import WRONG_USAGE, show
from mpipipe.errors import BackendError
from mpipipe.job import INTERRUPTED, Stop, group_of, run_or_abort, runtime, settings, write
from mpipipe.options import Option, Values
from mpipipe.text import instead, near

# Of the longest name of a command, and two spaces.
WIDTH = 12


def run() -> int:
    """Run the command that sys.argv names; return its exit code: 2 for wrong usage."""
    if _is_job():
        return run_or_abort(_command_of_job)
    try:
        code = execute(sys.argv[1:])
        # What was written without it is flushed.
        show("")
    except Stop as stop:
        write(stop.text)
        code = stop.code
    except KeyboardInterrupt:
        write("mpipipe: interrupted\n")
        code = INTERRUPTED
    return code


def execute(words: list[str]) -> int:
    """Run a command in this process. Raises Stop for what is refused, SystemExit after a help."""
    return _chosen(words)()


def _is_job() -> bool:
    """True for one rank of several, which nothing may end alone, not even wrong usage."""
    try:
        return settings.launcher_size(os.environ) is not None and runtime.mpi().COMM_WORLD.size > 1
    except BackendError:
        return False


def _command_of_job() -> None:
    """Read the command line on rank 0, and run it on all ranks; other words are read there."""
    words = sys.argv[1:]
    group = group_of()
    outcome = None
    if group.rank == 0:
        outcome = (words, _outcome(words))
    read, command = group.broadcast("reading the command line", outcome)
    if read != words:
        command = _outcome(words)
    code = command()
    if code:
        sys.exit(code)


def _outcome(words: list[str]) -> partial[int]:
    """Return what every rank is to call: a command, or the error that refuses it."""
    try:
        return _chosen(words)
    except Stop as stop:
        return partial(_refuse, stop.text, stop.code)
    except SystemExit:
        # The help has been shown.
        return partial(int)


def _refuse(text: str, code: int) -> int:
    raise Stop(text, code)


def _chosen(words: list[str]) -> partial[int]:
    """Read the command line. Raises Stop for wrong usage, SystemExit after help or version."""
    prog = program()
    command = ALL
    while command.commands:
        if not words:
            raise Stop(_listing(prog, command), WRONG_USAGE)
        name, *words = words
        if name in ("-h", "--help"):
            show(_listing(prog, command))
            raise SystemExit(0)
        if name == "--version" and command is ALL:
            show(f"mpipipe {__version__}\n")
            raise SystemExit(0)
        if name not in command.commands:
            known = [*command.commands, "--help"]
            if command is ALL:
                known.append("--version")
            raise wrong_usage(prog, f"there is no command {name}", name, known)
        prog = f"{prog} {name}"
        command = command.commands[name]
    return partial(_run, command, parser_of(prog, command.load()).parse(words))


def _listing(prog: str, group: Command) -> str:
    """Return the help of a group of commands: their names and what they do."""
    lines = [f"usage: {prog} COMMAND [options]", "", group.summary, ""]
    lines += [f"  {name:<{WIDTH}}{command.summary}" for name, command in group.commands.items()]
    lines += ["", f"`{prog} COMMAND --help` explains one."]
    if group is ALL:
        lines += [
            "Start it with mpiexec or srun: mpiexec -n 4 python -m mpipipe train",
            "--version shows the version.",
        ]
    return "\n".join(lines) + "\n"


def _run(command: Command, arguments: Values) -> int:
    level = arguments.pop("log_level", None)
    if level is not None:
        logging.basicConfig(format="%(name)s: %(levelname)s: %(message)s")
        logging.getLogger("mpipipe").setLevel(level.upper())
    return int(command.load()(**arguments) or 0)


# -- The list of all commands, and where each one is. Only the chosen one is imported --------------


@dataclass(frozen=True)
class Command:
    """A command, or several under one name; `place` is that of a function, `module:function`."""

    summary: str
    place: str = ""
    commands: Mapping[str, Command] = field(default_factory=dict)

    def load(self) -> Callable[..., int | None]:
        module, _, function = self.place.partition(":")
        return getattr(import_module(f"mpipipe.{module}"), function)


DRAW = {
    "timeline": Command("Who computes what at which time", "cli.draw:timeline"),
    "memory": Command("How many activations each rank holds at which time", "cli.draw:memory"),
}
BENCH = {
    "all": Command("Most of these, as a page of results", "bench.results:every"),
    "pipeline": Command("Cost of the machinery on tiny stages", "bench.pipeline:pipeline"),
    "transport": Command("Mailbox against bare Isend and Irecv", "bench.pipeline:transport"),
    "train": Command("A GPT's step against its simulation", "bench.train:step"),
    "attention": Command(
        "Attention kernels next to PyTorch, a ring next to one rank", "bench.attention:run"
    ),
    "threads": Command(
        "Threads in a rank next to one thread, and next to ranks", "bench.threads:run"
    ),
    "peers": Command("A pipeline of modules next to PyTorch's over gloo", "bench.peers:peers"),
    "gpu": Command("Kernels, executor and a GPT's step on a GPU", "bench.gpu.run:gpu"),
}
COMMANDS = {
    "train": Command("Train a GPT on text or tokens", "cli.train:train"),
    "plan": Command("Measure, and find the fastest way to train a model", "cli.plan:plan"),
    "tokenize": Command("Turn text into a file of tokens", "cli.tokenize:tokenize"),
    "generate": Command("Let a model continue prompts", "cli.generate:generate"),
    "evaluate": Command("Compute the loss of a model", "cli.evaluate:evaluate"),
    "convert": Command("Turn a trained model into a folder of Hugging Face", "cli.convert:convert"),
    "simulate": Command("Run a schedule on paper", "cli.simulate:simulate"),
    "draw": Command("Pictures of schedules, as PNG or SVG", commands=DRAW),
    "bench": Command("Measure; every number next to its reference", commands=BENCH),
    "info": Command("Show what a run finds on this machine", "cli.info:info"),
    "run": Command("Run a script on every rank; an error ends the whole job", "cli.run:run"),
}
ALL = Command("Pipeline parallelism and ring attention over MPI.", commands=COMMANDS)


# -- The parser of a command: argparse with our own error messages and layout of the help ----------


# Columns of the help.
WIDEST = 100
NOUNS: dict[type, str] = {int: "an integer", float: "a number"}


def program() -> str:
    """Return how this program was started, for messages: `mpipipe` or `python -m mpipipe`."""
    if Path(sys.argv[0]).name == "mpipipe":
        return "mpipipe"
    return "python -m mpipipe"


def wrong_usage(prog: str, problem: str, name: str = "", known: Iterable[str] = ()) -> Stop:
    """Return the error that ends a program whose arguments cannot be understood.

    `name` is the unknown one, and `known` are those that there are.
    """
    hint = ""
    remedy = instead(name)
    if remedy is None:
        remedy = f"`{prog} --help` explains what there is"
        likely = near(name, known)
        if likely:
            hint = f"  did you mean: {' or '.join(likely)}\n"
    return Stop(f"{prog}: {problem}\n{hint}  remedy: {remedy}\n", WRONG_USAGE)


class Parser(argparse.ArgumentParser):
    """A parser that raises Stop for wrong usage, and knows what the user may have meant."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(
            prog=prog, formatter_class=_Help, allow_abbrev=False, add_help=False, **options
        )
        self.headings: Values = {}

    def under(self, heading: str) -> Any:
        """Return argparse's group of the flags that the help lists under `heading`."""
        if heading not in self.headings:
            self.headings[heading] = self.add_argument_group(heading)
        return self.headings[heading]

    def parse(self, words: list[str]) -> Values:
        """Return the arguments of these words, by parameter name."""
        arguments, unknown = self.parse_known_args(words)
        if not unknown:
            return vars(arguments)
        name = unknown[0].partition("=")[0]
        if not name.startswith("-"):
            raise wrong_usage(self.prog, f"there is no place for {name}")
        known = self._option_string_actions
        raise wrong_usage(self.prog, f"there is no option {name}", name, known)

    def print_help(self, file: object = None) -> None:
        """Show the help. An error where it cannot be written ends the program."""
        show(self.format_help())

    def error(self, message: str) -> NoReturn:
        words = r"it takes no value, but \1 is given"
        message = re.sub("ignored explicit argument (.*)", words, message)
        raise wrong_usage(self.prog, message.removeprefix("argument "))


class _Help(argparse.HelpFormatter):
    """Help that keeps paragraphs, in lines of at most WIDEST columns."""

    def __init__(self, prog: str) -> None:
        width = min(WIDEST, shutil.get_terminal_size().columns - 2)
        super().__init__(prog, max_help_position=28, width=width)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = [" ".join(part.split()) for part in text.split("\n\n")]
        return "\n\n".join(textwrap.fill(part, width) for part in parts)


def parser_of(prog: str, command: Callable[..., object]) -> Parser:
    """Return the parser of a command: of its parameters, and the flags that every command has."""
    parser = Parser(prog, description=inspect.getdoc(command))
    usage = [_escaped(prog), "[options]"]
    for entry in parameters_of(command):
        if isinstance(entry.flag, Operand):
            usage.append(_operand_usage(entry))
            group = parser.under("arguments")
            operand = group.add_argument(entry.name, **_operand(entry, entry.flag))
            # Python < 3.12 does not say so of argparse.REMAINDER.
            operand.required = entry.default is REQUIRED
        else:
            names = entry.flag.names or (f"--{entry.name.rstrip('_').replace('_', '-')}",)
            parser.under(entry.flag.group).add_argument(*names, **_flag(entry, entry.flag))
    parser.usage = " ".join(usage)
    general = parser.under("general")
    general.add_argument("-h", "--help", action="help", help="show this and exit")
    general.add_argument(
        "--log-level",
        help="least severe messages to show",
        choices=("debug", "info", "warning", "error"),
        default=argparse.SUPPRESS,
    )
    return parser


def _operand(entry: Argument, operand: Operand) -> Values:
    options: Values = {
        "help": _escaped(operand.text),
        "metavar": _name(entry),
        "type": _converter(entry),
    }
    if operand.rest:
        options["nargs"] = argparse.REMAINDER
    elif entry.many:
        options["nargs"] = "+" if entry.default is REQUIRED else "*"
    elif entry.default is not REQUIRED:
        options["nargs"] = "?"
    if entry.default is not REQUIRED:
        options["default"] = argparse.SUPPRESS
    return options


def _flag(entry: Argument, flag: Option) -> Values:
    parts = [flag.text, flag.range_words]
    default = entry.default
    if type(default) in (str, int, float):
        parts.append(f"default: {default}")
    text = _escaped("; ".join(filter(None, parts)))
    options: Values = {"help": text, "dest": entry.name, "default": argparse.SUPPRESS}
    if default is REQUIRED:
        options["required"] = True
    if entry.kind is bool:
        alone = default is False and not flag.key
        return options | {"action": "store_true" if alone else argparse.BooleanOptionalAction}
    if entry.many:
        options["action"] = "append"
    if flag.choices:
        options["choices"] = flag.choices
    else:
        noun = "path"
        if entry.kind is not Path:
            noun = NOUNS.get(entry.kind, "text").split()[-1]
        options["metavar"] = flag.metavar or noun.upper()
    return options | {"type": _converter(entry)}


def _converter(entry: Argument) -> Callable[[str], object]:
    """Return a function that reads a value, and refuses it in plain words."""
    flag = entry.flag
    # The words for a script are its own.
    if isinstance(flag, Option):
        empty = flag.empty
    else:
        empty = flag.rest

    def read(text: str) -> object:
        if not text and not empty and entry.kind not in NOUNS:
            raise argparse.ArgumentTypeError("it is empty")
        try:
            value = entry.kind(text)
        except ValueError:
            noun = NOUNS.get(entry.kind, "usable")
            raise argparse.ArgumentTypeError(f"{text!r} is not {noun}") from None
        # A configuration checks its keys itself.
        if isinstance(flag, Option) and not flag.key and not flag.has(value):
            raise argparse.ArgumentTypeError(f"{text} is out of range: expected {flag.range_words}")
        return value

    return read


def _operand_usage(entry: Argument) -> str:
    name = _escaped(_name(entry)) + " ..." * entry.many
    if entry.default is REQUIRED:
        return name
    return f"[{name}]"


def _name(entry: Argument) -> str:
    return entry.flag.metavar or entry.name.upper().replace("_", "-")


def _escaped(text: str) -> str:
    return text.replace("%", "%%")
