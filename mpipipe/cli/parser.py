"""The parser of a command: argparse with our own error messages and layout of the help."""

from __future__ import annotations

import argparse
import inspect
import math
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from mpipipe.cli.flags import REQUIRED, Flag, Operand, Parameter, parameters_of
from mpipipe.cli.refusal import WRONG_USAGE
from mpipipe.cli.stdout import show
from mpipipe.comm.abort import Stop
from mpipipe.wording import as_word, near

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
        self.behind_dashes: str | None = None  # the parameter that takes what stands behind --
        self.other_names: Mapping[str, str] = {}  # what others call a flag: from their name to ours, without --
        self.instead: Mapping[str, str] = {}  # what has no flag here, and what to do instead

    def under(self, heading: str) -> Any:
        """Return argparse's group of the flags that the help lists under `heading`."""
        if heading not in self.headings:
            self.headings[heading] = self.add_argument_group(heading)
        return self.headings[heading]

    def parse(self, words: list[str]) -> dict[str, Any]:
        """Return the arguments that were given, by parameter name."""
        behind: dict[str, Any] = {}
        if self.behind_dashes is not None and "--" in words:
            cut = words.index("--")
            words, behind = words[:cut], {self.behind_dashes: words[cut + 1 :]}
        given, unknown = self.parse_known_args(words)
        if unknown:
            name = unknown[0].partition("=")[0]
            if not name.startswith("-"):
                file = [f"--config {name}"] if name.endswith(".toml") and self.near("--config") == ["--config"] else []
                raise wrong_usage(self.prog, f"there is no place for {name}", file)
            place = "" if self.behind_dashes is None else " before --"
            problem, instead = f"there is no option {name}{place}", self.instead.get(as_word(name.lstrip("-")))
            raise wrong_usage(self.prog, problem, self.near(name) if instead is None else (), instead)
        return vars(given) | behind

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
            if entry.flag.behind_dashes:
                parser.behind_dashes = entry.name
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


def _operand(entry: Parameter, operand: Operand) -> dict[str, Any]:
    options: dict[str, Any] = {"help": _escaped(operand.text), "metavar": _name(entry), "type": _converter(entry)}
    if operand.behind_dashes:
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


def _flag(entry: Parameter, flag: Flag) -> dict[str, Any]:
    options: dict[str, Any] = {"help": _help(entry, flag), "dest": entry.name, "default": argparse.SUPPRESS}
    if entry.default is REQUIRED:
        options["required"] = True
    if entry.kind is bool:
        return options | {"action": "store_true" if entry.default is False else argparse.BooleanOptionalAction}
    if entry.many:
        options["action"] = "append"
    if flag.choices:
        options["choices"] = flag.choices
    else:
        noun = "path" if entry.kind is Path else NOUNS.get(entry.kind, "text").split()[-1]
        options["metavar"] = flag.metavar or noun.upper()
    return options | {"type": _converter(entry)}


def _help(entry: Parameter, flag: Flag) -> str:
    parts = [flag.text] if flag.text else []
    if flag.least is not None and flag.most is None:
        parts.append(f"at least {flag.least:g}")
    elif flag.least is not None and flag.most is not None:
        parts.append(f"{flag.least:g} to {flag.most:g}")
    if entry.default is not REQUIRED and entry.default is not None and not isinstance(entry.default, (bool, list)):
        parts.append(f"default: {entry.default}")
    return _escaped("; ".join(parts))


def _converter(entry: Parameter) -> Callable[[str], Any]:
    """Return a function that reads a value, and refuses it in plain words."""
    flag = entry.flag
    empty = flag.empty if isinstance(flag, Flag) else flag.rest  # the words for a script are its own

    def read(text: str) -> Any:
        if not text and not empty and entry.kind not in NOUNS:
            raise argparse.ArgumentTypeError("it is empty")
        try:
            value = entry.kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {NOUNS.get(entry.kind, 'usable')}") from None
        if isinstance(entry.flag, Flag):
            low = -math.inf if entry.flag.least is None else entry.flag.least
            high = math.inf if entry.flag.most is None else entry.flag.most
            if entry.kind in NOUNS and (low, high) != (-math.inf, math.inf) and not low <= value <= high:
                words = f"at least {low:g}" if high == math.inf else f"{low:g} to {high:g}"
                raise argparse.ArgumentTypeError(f"{text} is out of range: expected {words}")
        return value

    return read


def _before_dashes(text: str) -> NoReturn:
    raise argparse.ArgumentTypeError(f"{text!r} does not stand behind --")


def _operand_usage(entry: Parameter) -> str:
    name = _name(entry).replace("%", "%%")
    if entry.many:
        name += " ..."
    if isinstance(entry.flag, Operand) and entry.flag.behind_dashes:
        name = f"-- {name}"
    return name if entry.default is REQUIRED else f"[{name}]"


def _name(entry: Parameter) -> str:
    metavar = entry.flag.metavar
    return entry.name.upper().replace("_", "-") if metavar is None else metavar


def _escaped(text: str) -> str:
    return text.replace("%", "%%")
