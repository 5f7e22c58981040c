"""An option, described once: field, key in a TOML file and flag, or flag of a command."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

# Values by name, as a configuration has them, or a file of TOML or JSON.
Values: TypeAlias = dict[str, Any]

NOUNS = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    tuple: "a list of strings",
}
# NaN fails each of these comparisons.
LIMITS = {
    "least": ("at least", operator.ge),
    "above": ("above", operator.gt),
    "below": ("below", operator.lt),
    "most": ("at most", operator.le),
}


@dataclass(frozen=True)
class Option:
    """A value that is given by name: `--seq-len 8`.

    A bool whose default is False is one flag, `--quick`. Any other bool is a pair, `--tied` and
    `--no-tied`. A list is a flag that may be repeated.
    """

    text: str = ""  # its meaning, for the help
    # The flag's; by default one, made of the parameter's name: `seq_len` is `--seq-len`.
    names: tuple[str, ...] = ()
    least: float | None = None  # for numbers; `least` and `most` are in the range
    above: float | None = None
    below: float | None = None
    most: float | None = None
    choices: tuple[str, ...] | None = None  # all values that it can have
    metavar: str | None = None  # stands for the value in the help
    group: str = "options"  # heading under which the help lists it
    # Whether an empty text means something; else it is refused, as a variable that is not set.
    empty: bool = False
    # Whether it is a key of a configuration, which checks its range and can undo a bool of its
    # file.
    key: bool = False
    # Reads a text with a meaning of its own as a typed value.
    parse: Callable[[str], Any] | None = None
    show: Callable[[Any], str] = str  # writes such a value as text again
    # Whether it decides which numbers a training gives: then it cannot change in a resumed one.
    decides: bool = False

    @property
    def range_words(self) -> str:
        """The range in words, such as "at least 0 and below 1" or "1 to 8"; "" for none."""
        limits = {}
        for name in LIMITS:
            if getattr(self, name) is not None:
                limits[name] = getattr(self, name)
        if limits.keys() == {"least", "most"}:
            return f"{self.least:g} to {self.most:g}"
        words = []
        for name, limit in limits.items():
            words.append("finite" if limit == math.inf else f"{LIMITS[name][0]} {_shown(limit)}")
        return " and ".join(words)

    def has(self, value: float) -> bool:
        for name, (_, holds) in LIMITS.items():
            limit = getattr(self, name)
            if limit is not None and not holds(value, limit):
                return False
        return True


def _shown(limit: float) -> str:
    """Show a limit; one that is a large power of two as that."""
    power = 0
    if limit >= 2**32:
        power = round(math.log2(limit))
    if power and limit == 2**power:
        return f"2^{power}"
    return f"{limit:g}"
