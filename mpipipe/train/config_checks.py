"""What a value of a configuration may be: its type, its range, and texts with a meaning of their own."""

from __future__ import annotations

import dataclasses
import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from mpipipe.errors import ArgumentError, ConfigError
from mpipipe.job.preemption import parse_duration
from mpipipe.job.stop_signals import parse_signals
from mpipipe.planning import parse_bytes
from mpipipe.schedules.csv_text import is_path
from mpipipe.train.sinks import parse_names

# what a plan decides
PLANNED = ("schedule", "chunks", "microbatches", "partition", "recompute", "recompute_limit")
PARTITION = re.compile(r"0*[1-9][0-9]{0,8}")  # a number of layers
NOUNS = {int: "an integer", float: "a number", bool: "true or false", str: "a string", tuple: "a list of strings"}


def typed(entry: dataclasses.Field, value: Any, kind: type) -> Any:
    """Return `value` in the field's type, which is `kind`. Only a list becomes a tuple, and an integer a float."""
    if value is None and entry.default is None:
        return None
    if value == "" or (kind is tuple and isinstance(value, (list, tuple)) and "" in value):
        raise ConfigError(
            f"{_key(entry)} is empty",
            found=repr(value),
            expected="a text, or no such key",
            remedy="a variable of the shell may have no value",
        )
    if any("\0" in item for item in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(item, str)):
        raise ConfigError(f"{_key(entry)} has a zero byte", found=f"{value!r:.80}", expected="a text without one")
    if kind is tuple and isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
        return tuple(value)
    if kind is float and type(value) is int:
        return float(value)
    if kind is not tuple and type(value) is kind:
        return value
    raise ConfigError(f"the type of {_key(entry)} is wrong", found=repr(value), expected=NOUNS[kind])


def check_parsed(name: str, value: Any, parse: Callable[[Any], object]) -> None:
    """Raise ConfigError for a text that `parse` refuses."""
    try:
        parse("0" if value is None else value)
    except ArgumentError as error:
        raise ConfigError(f"{name}: {error.message}", found=error.found, expected=error.expected) from None


def parse_partition(text: str) -> tuple[int, ...]:
    """Read the numbers of layers of stages. Raises ArgumentError for anything else; "0" stands for no partition."""
    counts = [part.strip() for part in str(text).split(",")]
    if not all(PARTITION.fullmatch(count) for count in counts) and text != "0":
        raise ArgumentError(
            "no partition", found=f"{text!r:.80}", expected="numbers of layers with commas between, such as 3,2,2,3"
        )
    return tuple(map(int, counts))


def is_table(schedule: str) -> bool:
    """Whether a schedule is a table of actions, and neither a name nor the path of a file."""
    return not is_path(schedule) and ("," in schedule or "\n" in schedule)


PARSED = {  # texts with a meaning of their own
    "preempt_signals": parse_signals,
    "time_limit": parse_duration,
    "memory_limit": parse_bytes,
    "partition": parse_partition,
    "metrics_to": parse_names,
}


def check_range(entry: dataclasses.Field, value: Any, kind: type) -> None:
    """Raise ConfigError for a value that is none of the field's choices, or out of its range."""
    limits, text = dict(entry.metadata), entry.metadata["help"]
    if None not in (value, limits["choices"]) and value not in limits["choices"]:
        raise ConfigError(f"{_key(entry)} ({text})", found=repr(value), expected=" or ".join(limits["choices"]))
    if kind is int and limits["below"] is None:
        limits["below"] = 2**63  # what numpy and MPI can count
    bounds = [(limits[name], holds) for name, (_, holds) in LIMITS.items() if limits[name] is not None]
    if value is not None and not all(holds(value, limit) for limit, holds in bounds):
        raise ConfigError(f"{_key(entry)} ({text}) is out of range", found=repr(value), expected=range_words(limits))


def range_words(limits: Mapping[str, Any]) -> str:
    """Return a range in words, such as "at least 0 and below 1"; empty if there is none."""
    return " and ".join(
        "finite" if limits[name] == math.inf else f"{sign} {_shown(limits[name])}"
        for name, (sign, _) in LIMITS.items()
        if limits[name] is not None
    )


def _shown(limit: float) -> str:
    """Show a limit; one that is a large power of two as that."""
    power = round(math.log2(limit)) if limit >= 2**32 else 0
    return f"2^{power}" if power and limit == 2**power else str(limit)


# NaN fails each of these comparisons.
LIMITS = {"least": ("at least", operator.ge), "above": ("above", operator.gt), "below": ("below", operator.lt)}


def check_together(config: Any) -> None:
    """Raise ConfigError for values of a TrainConfig that contradict each other, or that no range tells."""
    if config.watchdog is not None and 0 < config.watchdog < 1:
        raise ConfigError("watchdog is too short", found=config.watchdog, expected="0, or at least 1")
    if config.loss_scale is not None and 0 < config.loss_scale < 1:
        raise ConfigError("loss_scale shrinks gradients", found=config.loss_scale, expected="0, or at least 1")
    if config.resume == "auto" and config.out is None:
        raise ConfigError(
            "resume = auto without out", expected="the folder in which to look", remedy="name it with --out"
        )
    if config.from_ is not None and config.init is not None:
        raise ConfigError(
            "from and init are both given",
            found=f"from {config.from_}, init {config.init}",
            expected="one of them: a folder that a training begins from has weights",
        )
    if config.save_dtype is not None and config.save_as == "mpipipe":
        raise ConfigError(
            "save_dtype without save_as = huggingface",
            found=f"save_dtype {config.save_dtype}",
            expected="none: mpipipe saves parameters as they are",
        )
    if config.recompute and config.recompute_limit is not None:
        raise ConfigError(
            "recompute and recompute_limit are both given",
            found=f"recompute_limit {config.recompute_limit}",
            expected="one of them: recompute runs all forwards again, recompute_limit some",
        )
    _check_plan(config)
    if config.resume not in ("auto", "no") and config.init is not None:
        raise ConfigError(
            "resume and init are both given",
            found=f"resume {config.resume}, init {config.init}",
            expected="one of them: a checkpoint that is resumed has weights",
        )


def _check_plan(config: Any) -> None:
    """Raise ConfigError if options of a plan have no effect, or leave it nothing to decide."""
    strange = [name for name in config.fixed if name not in PLANNED]
    if strange:
        raise ConfigError("fixed names what no plan decides", found=strange[0], expected=" or ".join(PLANNED))
    if config.plan != "auto":
        alone = [name for name in ("memory_limit", "fixed") if getattr(config, name)]
        if alone:
            raise ConfigError(
                f"{alone[0]} without plan = auto",
                found=f"{alone[0]} {getattr(config, alone[0])}",
                expected="none: it says which plans may be chosen",
                remedy="give plan = auto, too, or leave it out; recompute_limit limits the memory of a given schedule",
            )
        return
    open_ = [name for name in ("microbatches", "partition") if name in config.fixed and getattr(config, name) is None]
    if open_:
        raise ConfigError(
            f"fixed names {open_[0]}, which has no value",
            found=f"fixed {', '.join(config.fixed)}",
            expected="options with a value, which a plan leaves as it is",
            remedy=f"give {open_[0]} a value, or leave it out of fixed",
        )
    if is_path(config.schedule) or is_table(config.schedule):
        raise ConfigError(
            "plan = auto and an order of a schedule are both given",
            found=f"schedule {config.schedule}" if is_path(config.schedule) else "a table of actions as schedule",
            expected="one of them: an order is made for its own ranks, chunks and micro-batches",
            remedy="leave out plan, or name a schedule that the package makes",
        )
    if config.survive:
        raise ConfigError(
            "plan = auto and survive are both given",
            expected="one of them: a plan is made for a number of ranks, and survive changes that",
            remedy="make a plan with `mpipipe plan`, and give its file to the training",
        )


def _key(entry: dataclasses.Field) -> str:
    """Return a field's name as users write it: a word of Python such as `from` ends with an underscore here."""
    return entry.name.rstrip("_")
