"""The configuration of a training: one dataclass, filled from defaults, a TOML file and flags."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from signal import Signals
from typing import Self

from mpipipe import files
from mpipipe.errors import ArgumentError, ConfigError
from mpipipe.job import parse_duration, parse_signals
from mpipipe.options import Values
from mpipipe.schedules import full_name, is_path
from mpipipe.text import instead, near
from mpipipe.train.config_fields import document, key_of, option, read_fields

# What a plan decides.
PLANNED = ("schedule", "chunks", "microbatches", "partition", "recompute", "recompute_limit")
COUNT = re.compile(r"0*[1-9][0-9]{0,8}")
UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}  # powers of two


def parse_partition(text: str) -> tuple[int, ...]:
    """Read the numbers of layers of stages. Raises ArgumentError for anything else."""
    counts = list(map(str.strip, text.split(",")))
    if not all(map(COUNT.fullmatch, counts)):
        raise ArgumentError(
            "no partition",
            found=f"{text!r:.80}",
            expected="numbers of layers with commas between, such as 3,2,2,3",
        )
    return tuple(map(int, counts))


def parse_bytes(text: str) -> int:
    """Read a number of bytes of at least 0, with K, M, G, T or KiB, MiB, GiB, TiB.

    K is 2^10, M 2^20, G 2^30, T 2^40.

    Bytes are rounded down. Raises ArgumentError where the text is something else.

    Examples
    --------
    >>> from mpipipe.train.config import parse_bytes
    >>> parse_bytes("1.5K")
    1536
    """
    short = re.sub("(?<=[KMGT])IB$", "", str(text).strip().upper())
    unit = short[-1:]
    if unit not in UNITS:
        unit = ""
    try:
        count = float(short.removesuffix(unit))
    except ValueError:
        count = math.nan
    if not 0 <= count < math.inf:
        raise ArgumentError(
            "no number of bytes",
            found=repr(text),
            expected="a finite number of at least 0, such as 900M or 1.5G",
        )
    return int(count * 2 ** UNITS[unit])


def is_table(schedule: str) -> bool:
    """True for a schedule that is a table of actions, and no name or path of a file."""
    return not is_path(schedule) and ("," in schedule or "\n" in schedule)


def in_one_text(values: Iterable[object]) -> str:
    """Write several values with commas between them; none where there are none."""
    return ",".join(map(str, values)) or "none"


@dataclass(frozen=True)
class ParallelOptions:
    """Ranks, stages, schedule."""

    heading = "parallel"

    pipe: int | None = option(None, "ranks of one pipeline; default: all that seq leaves", least=1)
    seq: int = option(
        1,
        "ranks that share each sequence or field, as by ring attention; a replica has pipe x seq "
        "ranks",
        least=1,
    )
    schedule: str = option(
        "one_f_one_b",
        "schedule; others: gpipe, interleaved_1f1b, looped_bfs, zero_bubble_h1, zero_bubble_2p, "
        "interleaved_zero_bubble; with chunks 2: zero_bubble_v, dualpipe_v, v_half, v_min; or "
        "FILE.csv with an order, such as simulate --out writes",
        parse=full_name,
        show=full_name,
    )
    chunks: int = option(1, "stages on each rank", least=1)
    microbatches: int | None = option(
        None,
        "micro-batches of a step in each replica; default: 4 per rank, or those of FILE.csv",
        least=1,
    )
    slices: int = option(
        1,
        "parts of each sequence that go through the pipeline one after the other, for causal "
        "models",
        least=1,
    )
    partition: tuple[int, ...] | None = option(
        None,
        "layers of each stage, such as 3,2,2,3; default: stages with an even share of the "
        "operations",
        parse=parse_partition,
        show=in_one_text,
    )
    recompute: bool = option(
        False, "keep only stage inputs, and recompute each forward before its backward"
    )
    recompute_limit: int | None = option(
        None,
        "activations of stages that a rank may hold; as many forwards as needed are recomputed",
        least=1,
    )
    plan: str = option(
        "no",
        "auto: measure for a moment, and take the fastest schedule, chunks, micro-batches, "
        "partition and recomputation",
        choices=("no", "auto"),
    )
    memory_limit: int | None = option(
        None,
        "with a plan: bytes that a rank may need for parameters, optimizer and activations, such "
        "as 900M or 1.5G",
        parse=parse_bytes,
    )
    fixed: tuple[str, ...] = option(
        (),
        "option that a plan must not change, such as schedule; repeatable; given options never "
        "change",
    )
    mesh_order: str = option(
        "pipe,data,seq",
        "axes of the mesh; ranks that follow each other are neighbours on the last one, then on "
        "that before it: data,pipe,seq keeps the stages of a pipeline on a node",
        choices=("pipe,data,seq", "data,pipe,seq"),
    )
    device: str = option(
        "auto",
        "cpu, cuda, or auto: a GPU for each rank if all of them see one",
        choices=("auto", "cpu", "cuda"),
    )


@dataclass(frozen=True)
class TrainingOptions:
    """Steps, batches, optimizer."""

    heading = "training"

    dtype: str = option(
        "float32",
        "type of activations and products; bfloat16 and float16 keep parameters in float32",
        choices=("float32", "float64", "bfloat16", "float16"),
        decides=True,
    )
    steps: int = option(300, "optimizer steps", least=1)
    batch: int = option(32, "sequences of a step, over all replicas", least=1, decides=True)
    optimizer: str = option("adamw", "optimizer", choices=("adamw", "sgd"), decides=True)
    shard_optimizer: bool = option(
        False,
        "each replica keeps the optimizer state of only its share of the parameters; the "
        "results are the same",
    )
    lr: float = option(
        3e-3,
        "learning rate after warm-up; falls as a cosine to a tenth",
        above=0,
        below=math.inf,
        decides=True,
    )
    warmup: int = option(30, "steps of linear warm-up", least=0, decides=True)
    momentum: float = option(0.9, "momentum of sgd", least=0, below=1, decides=True)
    weight_decay: float = option(
        0.1, "decoupled weight decay of matrices", least=0, below=math.inf, decides=True
    )
    clip: float = option(
        1.0, "largest norm of all gradients; inf for no limit", above=0, decides=True
    )
    loss_scale: float | None = option(
        None,
        "factor on gradients inside a step, below 2^64; 0: as large as fits; default: 0 for "
        "float16, 1 otherwise",
        least=0,
        below=2.0**64,
        decides=True,
    )
    seed: int = option(
        0, "seed of parameters, batches, dropout and sample", least=0, below=2**63, decides=True
    )
    eval_every: int = option(
        100, "steps between two validations; there is one more at the end", least=1
    )
    eval_batches: int = option(4, "batches of a validation", least=1)


@dataclass(frozen=True)
class OutputOptions:
    """What is written and shown."""

    heading = "output"

    out: str | None = option(
        None,
        "new or empty folder for metrics, weights and checkpoints; default: runs/ and the time of "
        "the start",
        metavar="PATH",
    )
    resume: str = option(
        "no",
        "auto: resume from the newest checkpoint in out, or begin there; or resume from this "
        "checkpoint; no: begin",
        metavar="PATH",
    )
    save_every: int = option(
        0, "steps between two checkpoints, and one more at the end; 0: none", least=0
    )
    keep: int = option(2, "newest checkpoints that stay", least=1)
    log_every: int = option(10, "steps between two lines of progress", least=1)
    tensorboard: bool = option(
        False,
        "write the metrics for TensorBoard as well, into the folder tensorboard; needs the extra "
        "[tensorboard]",
    )
    trace: str | None = option(
        None,
        "new folder for a trace of the 2nd to the 17th step: where their time went",
        metavar="PATH",
    )


@dataclass(frozen=True)
class ClusterOptions:
    """What keeps a training safe on a cluster."""

    heading = "cluster"

    preempt_signals: tuple[Signals, ...] = option(
        "USR2,TERM",
        "signals at which a checkpoint is saved and all ranks leave with exit code 75; none: no "
        "such signal",
        parse=parse_signals,
        show=lambda signals: in_one_text(Signals(number).name[3:] for number in signals),
    )
    preempt_grace: float = option(
        600.0,
        "seconds from such a signal until the job ends at once, saved or not; inf for no limit",
        least=0,
    )
    time_limit: float | None = option(
        None,
        "seconds or HH:MM:SS that the job may last; it saves before and leaves with 75; 0: no "
        "limit; default: the time limit of the SLURM job",
        parse=parse_duration,
    )
    check_weights: int = option(
        0,
        "steps between two comparisons of parameters and optimizer state over replicas; 0: none",
        least=0,
    )
    watchdog: float | None = option(
        None,
        "seconds without progress until a hang is reported; 0: never; default: MPIPIPE_WATCHDOG "
        "or 600",
        least=0,
    )


# -- One configuration of all options --------------------------------------------------------------


@dataclass(frozen=True)
class TaskConfig(ClusterOptions, OutputOptions, TrainingOptions, ParallelOptions):
    """The configuration of the training of any task.

    Field names are the keys of a TOML file and, with dashes, the flags of a command. Texts with a
    meaning of their own, such as a partition, may be given as texts.

    Raises
    ------
    ConfigError
        For a value of the wrong type or out of its range.
    """

    def __post_init__(self) -> None:
        read_fields(self)
        # Values that contradict each other, or that no range tells.
        if self.watchdog is not None and 0 < self.watchdog < 1:
            raise ConfigError(
                "watchdog is too small", found=self.watchdog, expected="0, or at least 1"
            )
        if self.resume == "auto" and self.out is None:
            raise ConfigError(
                "resume = auto without out",
                expected="the folder in which to look",
                remedy="name it with --out",
            )
        init = getattr(self, "init", None)
        if self.resume not in ("auto", "no") and init is not None:
            raise _both_given(
                "resume and init",
                f"resume {self.resume}, init {init}",
                "a checkpoint that is resumed has weights",
            )
        if self.recompute and self.recompute_limit is not None:
            raise _both_given(
                "recompute and recompute_limit",
                f"recompute_limit {self.recompute_limit}",
                "recompute runs all forwards again, recompute_limit some",
            )
        if self.plan != "auto":
            for name in ("memory_limit", "fixed"):
                if getattr(self, name) not in (None, ()):
                    raise ConfigError(
                        f"{name} without plan = auto",
                        found=f"{name} {getattr(self, name)}",
                        expected="none: it says which plans may be chosen",
                        remedy="give plan = auto, too, or leave it out; recompute_limit limits the "
                        "memory of a given schedule",
                    )
            return
        for name in self.fixed:
            optional = name in ("microbatches", "partition")
            if name not in PLANNED or (optional and getattr(self, name) is None):
                raise ConfigError(
                    f"fixed names {name}, which no plan decides, or which has no value",
                    found=f"fixed {', '.join(self.fixed)}",
                    expected=" or ".join(PLANNED) + ", as the configuration has it",
                    remedy=f"give {name} a value, or leave it out of fixed",
                )
        if is_path(self.schedule) or is_table(self.schedule):
            raise _both_given(
                "plan = auto and an order of a schedule",
                f"schedule {self.schedule:.80}",
                "an order is made for its own ranks, chunks and micro-batches",
            )

    @classmethod
    def load(cls, path: str | None = None, **flags: object) -> Self:
        """Read a configuration: the keys of a file replace defaults, and flags replace keys.

        Raises ConfigError where the constructor does, for a file that cannot be read, and for an
        unknown key.

        Parameters
        ----------
        path : str, optional
            A TOML file whose keys are names of fields, at its top level.
        **flags
            Values of fields by name. None stands for a flag that was not given.

        Examples
        --------
        >>> from mpipipe.train import TrainConfig
        >>> TrainConfig.load(steps=100, lr=None).steps
        100
        """
        names = {key_of(entry): entry.name for entry in fields(cls)}
        values: Values = {}
        for source, part in ((path, read_keys(path)), ("the flags", flags)):
            for key, value in part.items():
                name = names.get(key, key)
                if value is None:
                    continue
                if name not in names.values():
                    raise ConfigError(
                        f"unknown key in {source}",
                        found=key,
                        expected=" or ".join(near(key, names)) or ", ".join(names),
                        remedy=instead(key) or "`mpipipe train --help` explains each",
                    )
                values[name] = value
        if values.get("plan") == "auto":
            decided = [name for name in PLANNED if name in values]
            values["fixed"] = (*values.get("fixed", ()), *decided)
        cls._check_given(values)
        return cls(**values)

    @classmethod
    def _check_given(cls, values: dict[str, object]) -> None:
        """Raise ConfigError for values that cannot be given together, whatever they are."""


document(TaskConfig)


def _both_given(names: str, values: str, why: str) -> ConfigError:
    return ConfigError(f"{names} are both given", found=values, expected=f"one of them: {why}")


# -- A configuration as a file in TOML: read, and written ------------------------------------------


# Of a file: the order of a schedule may be in it.
MOST_BYTES = 1 << 27


def read_keys(name: str | None) -> Values:
    """Return the keys of a TOML file. ConfigError where it cannot be read."""
    if name is None:
        return {}
    try:
        with files.reading(
            "the config file", name, ConfigError, remedy="name a TOML file with --config"
        ):
            keys = tomllib.loads(files.read_text(name, MOST_BYTES))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"the config file is not TOML: {error}", found=name) from error
    return keys


def toml_line(key: str, value: object) -> str:
    """Return one key of a configuration and its value as a line of TOML."""
    return f"{key} = {_toml(value)}\n"


def _toml(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, float) and not math.isfinite(value):
        # inf, nan
        return str(value)
    # Strings and numbers of JSON are TOML's, but for this character, which JSON takes as it is.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
