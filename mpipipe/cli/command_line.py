"""Which command a command line names, and how the ranks of a job agree on it.

ALL lists the commands. Each one is a function, whose parameters are its flags (flags.py). A `Parser` reads them.
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
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from mpipipe import __version__
from mpipipe.cli.flags import REQUIRED, Argument, Operand, parameters_of
from mpipipe.cli.output import WRONG_USAGE, refusing, show
from mpipipe.errors import BackendError
from mpipipe.job import INTERRUPTED, Stop, ended, group_of, run_or_abort, runtime, settings, write
from mpipipe.options import Option
from mpipipe.text import as_word, near

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
        if settings.launcher_size(os.environ) is None:
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
    if settings.launcher_size(os.environ) is None:
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


# -- The list of all commands, and where each one is. Only the chosen one is imported ---------------------------------


@dataclass(frozen=True)
class Command:
    """One command."""

    name: str
    place: str  # module and function, `module:function`
    summary: str

    def load(self) -> Callable[..., Any]:
        """Import and return the function."""
        module, _, function = self.place.partition(":")
        return getattr(import_module(module), function)


@dataclass(frozen=True)
class Commands:
    """Several commands under one name."""

    name: str
    summary: str
    commands: tuple[Command | Commands, ...]

    def find(self, name: str) -> Command | Commands | None:
        """Return the command with this name."""
        return next((command for command in self.commands if command.name == name), None)


def _of(module: str, **summaries: str) -> tuple[Command, ...]:
    """Commands that are functions of the same name in one module."""
    return tuple(
        Command(function.replace("_", "-"), f"{module}:{function}", text) for function, text in summaries.items()
    )


DRAW = Commands(
    "draw",
    "Pictures of schedules and traces, as PNG or SVG",
    _of(
        "mpipipe.cli.draw",
        timeline="Who computes what at which time",
        memory="How many activations each rank holds at which time",
        compare="Bubble and memory of schedules beside each other",
        split="Where the time of each rank went in a training",
        trace="A step of a training below what its schedule predicts",
    ),
)
BENCH = Commands(
    "bench",
    "Measure; every number beside what it can be compared with",
    _of(
        "mpipipe.bench.commands",
        pipeline="Cost of the machinery on tiny stages",
        steps="Launched steps against one after the other",
        transport="Mailbox against bare Isend and Irecv",
        schedules="Building, checking and simulating large schedules",
        gaps="How far searched schedules are from the best",
        train="A GPT's step against its simulation",
        plan="Predicted steps of plans against real ones",
        dry_run="Memory that a dry run foresees against a training",
        checkpoint="Saving and loading against dd",
        tokenize="Tokenizing against the library alone",
        attention="Attention kernels beside PyTorch, a ring beside one rank",
        gpu="Kernels, ring, executor and a GPT's step on a GPU",
    ),
)
ALL = Commands(
    "",
    "Pipeline parallelism and ring attention over MPI.",
    (
        Command("train", "mpipipe.cli.train:train", "Train a GPT on text or tokens"),
        Command("plan", "mpipipe.cli.plan:plan", "Measure, and find the fastest way to train a model"),
        Command("tokenize", "mpipipe.cli.tokenize:tokenize", "Turn text into a file of tokens"),
        Command("generate", "mpipipe.cli.generate:generate", "Let a model continue prompts"),
        Command("evaluate", "mpipipe.cli.evaluate:evaluate", "Compute the loss of a model"),
        Command("convert", "mpipipe.cli.convert:convert", "Turn a model folder of Hugging Face into ours, or back"),
        Command("simulate", "mpipipe.cli.simulate:simulate", "Run a schedule on paper"),
        DRAW,
        BENCH,
        Command("info", "mpipipe.cli.info:info", "Show what a run finds on this machine"),
        Command("jobscript", "mpipipe.cli.jobscript:jobscript", "Print a job script for SLURM, PBS, LSF or Flux"),
        Command("run", "mpipipe.cli.jobscript:run", "Run a script on every rank; an error ends the whole job"),
        Command(
            "launch", "mpipipe.cli.jobscript:launch", "Start a job, and believe its exit code 0 with a proof alone"
        ),
        Command("completion", "mpipipe.cli.completion:completion", "Print what completes commands in a shell"),
    ),
)


# -- The parser of a command: argparse with our own error messages and layout of the help -----------------------------


LOG_LEVELS = ("debug", "info", "warning", "error")
WIDEST = 100  # columns of the help
NOUNS: dict[type, str] = {int: "an integer", float: "a number"}


def program() -> str:
    """Return how this program was started, for messages: `mpipipe` or `python -m mpipipe`."""
    return "mpipipe" if Path(sys.argv[0]).name == "mpipipe" else "python -m mpipipe"


def wrong_usage(prog: str, problem: str, near: Iterable[str] = (), remedy: str | None = None) -> Stop:
    """Return the error that ends a program whose arguments cannot be understood."""
    found = list(near)
    hint = f"  did you mean: {' or '.join(found)}\n" if found else ""
    remedy = f"`{prog} --help` explains what there is" if remedy is None else remedy
    return Stop(f"{prog}: {problem}\n{hint}  remedy: {remedy}\n", WRONG_USAGE)


class Parser(argparse.ArgumentParser):
    """A parser that raises Stop for wrong usage, and knows what the user may have meant."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog=prog, formatter_class=_Help, allow_abbrev=False, add_help=False, **options)
        self.headings: dict[str, Any] = {}
        self.after_dashes: str | None = None  # the parameter that takes what follows --
        self.other_names: Mapping[str, str] = {}  # what others call a flag: from their name to ours, without --
        self.instead: Mapping[str, str] = {}  # what has no flag here, and what to do instead

    def under(self, heading: str) -> Any:
        """Return argparse's group of the flags that the help lists under `heading`."""
        if heading not in self.headings:
            self.headings[heading] = self.add_argument_group(heading)
        return self.headings[heading]

    def parse(self, words: list[str]) -> dict[str, Any]:
        """Return the arguments that were given, by parameter name."""
        rest: dict[str, Any] = {}
        if self.after_dashes is not None and "--" in words:
            cut = words.index("--")
            words, rest = words[:cut], {self.after_dashes: words[cut + 1 :]}
        given, unknown = self.parse_known_args(words)
        if unknown:
            name = unknown[0].partition("=")[0]
            if not name.startswith("-"):
                file = [f"--config {name}"] if name.endswith(".toml") and self.near("--config") == ["--config"] else []
                raise wrong_usage(self.prog, f"there is no place for {name}", file)
            place = "" if self.after_dashes is None else " before --"
            problem, instead = f"there is no option {name}{place}", self.instead.get(as_word(name.lstrip("-")))
            raise wrong_usage(self.prog, problem, self.near(name) if instead is None else (), instead)
        return vars(given) | rest

    def near(self, name: str) -> list[str]:
        """Return the flags that the user may have meant with `name`."""
        options = [option for action in self._actions for option in action.option_strings]
        known = [option.removeprefix("--") for option in options if option.startswith("--")]
        return [f"--{each}" for each in near(name.lstrip("-"), known, self.other_names)]

    def print_help(self, file: Any = None) -> None:
        """Show the help, and end with an error where it cannot be written, which argparse passes over."""
        show(self.format_help())

    def error(self, message: str) -> NoReturn:
        """Raise Stop with what argparse says."""
        text = message.removeprefix("argument ")
        raise wrong_usage(
            self.prog, re.sub("ignored explicit argument (.*)", r"it takes no value, but \1 is given", text)
        )


class _Help(argparse.HelpFormatter):
    """Help that keeps paragraphs, in lines of at most WIDEST columns."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=min(WIDEST, shutil.get_terminal_size().columns - 2))

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(textwrap.fill(" ".join(part.split()), width) for part in text.split("\n\n"))


def parser_of(prog: str, command: Callable[..., Any]) -> Parser:
    """Return the parser of a command."""
    parser = Parser(prog, description=inspect.getdoc(command))
    add_parameters(parser, command)
    return parser


def add_parameters(parser: Parser, command: Callable[..., Any]) -> None:
    """Give a parser the parameters of a command, and the flags that every command has."""
    parameters = parameters_of(command)
    parser.other_names, parser.instead = getattr(command, "other_names", {}), getattr(command, "instead", {})
    operands = [entry for entry in parameters if isinstance(entry.flag, Operand)]
    parser.usage = " ".join([parser.prog.replace("%", "%%"), "[options]", *map(_operand_usage, operands)])
    for entry in parameters:
        if isinstance(entry.flag, Operand):
            if entry.flag.after_dashes:
                parser.after_dashes = entry.name
            operand = parser.under("arguments").add_argument(entry.name, **_operand(entry, entry.flag))
            operand.required = entry.default is REQUIRED  # as Python < 3.12 does not say of argparse.REMAINDER
        else:
            names = entry.flag.names or (f"--{entry.name.rstrip('_').replace('_', '-')}",)
            parser.under(entry.flag.group).add_argument(*names, **_flag(entry, entry.flag))
    general = parser.under("general")
    general.add_argument("-h", "--help", action="help", help="show this and exit")
    general.add_argument(
        "--log-level", choices=LOG_LEVELS, default=argparse.SUPPRESS, help="least severe messages to show"
    )


def _operand(entry: Argument, operand: Operand) -> dict[str, Any]:
    options: dict[str, Any] = {"help": _escaped(operand.text), "metavar": _name(entry), "type": _converter(entry)}
    if operand.after_dashes:
        options |= {"nargs": "*", "metavar": f"-- {_name(entry)} ...", "type": _before_dashes}
    elif operand.rest:
        options["nargs"] = argparse.REMAINDER
    elif entry.many:
        options["nargs"] = "+" if entry.default is REQUIRED else "*"
    elif entry.default is not REQUIRED:
        options["nargs"] = "?"
    if entry.default is not REQUIRED:
        options["default"] = argparse.SUPPRESS
    return options


def _flag(entry: Argument, flag: Option) -> dict[str, Any]:
    options: dict[str, Any] = {"help": _help(entry, flag), "dest": entry.name, "default": argparse.SUPPRESS}
    if entry.default is REQUIRED:
        options["required"] = True
    if entry.kind is bool:
        alone = entry.default is False and not flag.key
        return options | {"action": "store_true" if alone else argparse.BooleanOptionalAction}
    if entry.many:
        options["action"] = "append"
    if flag.choices:
        options["choices"] = flag.choices
    else:
        noun = "path" if entry.kind is Path else NOUNS.get(entry.kind, "text").split()[-1]
        options["metavar"] = flag.metavar or noun.upper()
    return options | {"type": _converter(entry)}


def _help(entry: Argument, flag: Option) -> str:
    parts = [flag.text] if flag.text else []
    if flag.range_words:
        parts.append(flag.range_words)
    if (
        entry.default is not REQUIRED
        and entry.default is not None
        and not isinstance(entry.default, (bool, list, tuple))
    ):
        parts.append(f"default: {entry.default}")
    return _escaped("; ".join(parts))


def _converter(entry: Argument) -> Callable[[str], Any]:
    """Return a function that reads a value, and refuses it in plain words."""
    flag = entry.flag
    empty = flag.empty if isinstance(flag, Option) else flag.rest  # the words for a script are its own

    def read(text: str) -> Any:
        if not text and not empty and entry.kind not in NOUNS:
            raise argparse.ArgumentTypeError("it is empty")
        try:
            value = entry.kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {NOUNS.get(entry.kind, 'usable')}") from None
        if isinstance(flag, Option) and not flag.key and entry.kind in NOUNS and not flag.has(value):
            raise argparse.ArgumentTypeError(f"{text} is out of range: expected {flag.range_words}")
        return value

    return read


def _before_dashes(text: str) -> NoReturn:
    raise argparse.ArgumentTypeError(f"{text!r} does not stand behind --")


def _operand_usage(entry: Argument) -> str:
    name = _name(entry).replace("%", "%%")
    if entry.many:
        name += " ..."
    if isinstance(entry.flag, Operand) and entry.flag.after_dashes:
        name = f"-- {name}"
    return name if entry.default is REQUIRED else f"[{name}]"


def _name(entry: Argument) -> str:
    metavar = entry.flag.metavar
    return entry.name.upper().replace("_", "-") if metavar is None else metavar


def _escaped(text: str) -> str:
    return text.replace("%", "%%")
