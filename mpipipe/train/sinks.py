"""Where metrics go besides metrics.jsonl (--metrics-to): a table in CSV, TensorBoard, Weights & Biases, or several.

A sink takes the facts of each record, by `write`, until `close`. If either raises anything, it gets no further records,
and one warning says so: no training ends because its metrics cannot be shown.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpipipe import files
from mpipipe.errors import ArgumentError, ConfigError
from mpipipe.text import optional_library

Facts = Mapping[str, float]  # the numbers of a record by name; "step" is always among them


@dataclass(frozen=True)
class SinkContext:
    """What a sink learns of a training when it is opened."""

    out: Path
    done: int  # steps before this start, whose records are in metrics.jsonl; 0 if the training begins
    columns: tuple[str, ...]  # all names that facts can have
    configuration: Mapping[str, Any]


class Csv:
    """metrics.csv: a row for each record, also of earlier starts; a cell is empty if its number was not measured."""

    def __init__(self, run: SinkContext) -> None:
        self.columns, path = run.columns, run.out / "metrics.csv"
        kept, _ = kept_records(run.out, run.done)
        rows = [dict(zip(run.columns, run.columns)), *map(json.loads, kept.splitlines())]
        files.write_whole(path, "".join(map(self._row, rows)).encode())
        self.descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def _row(self, facts: Mapping[str, Any]) -> str:
        text = io.StringIO()
        csv.DictWriter(text, self.columns, extrasaction="ignore", lineterminator="\n").writerow(facts)
        return text.getvalue()

    def write(self, facts: Facts) -> None:
        row = self._row(facts).encode()
        if os.write(self.descriptor, row) < len(row):
            raise OSError("the disk is full")

    def close(self) -> None:
        os.close(self.descriptor)


class TensorBoard:
    """tensorboard/: scalars for TensorBoard. It hides records of earlier starts for steps that this start repeats."""

    def __init__(self, run: SinkContext) -> None:
        from tensorboardX import SummaryWriter

        # file names have whole seconds: without a suffix two starts might share a file
        later = dict(purge_step=run.done + 1, filename_suffix=f".{run.done}") if run.done else {}
        self.writer = SummaryWriter(str(run.out / "tensorboard"), **later)

    def write(self, facts: Facts) -> None:
        step, time = int(facts["step"]), facts["time"]
        for name, value in facts.items():
            if name not in ("step", "time"):
                self.writer.add_scalar(name, value, step, walltime=time)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """wandb/: a run for Weights & Biases, which is only sent when somebody calls `wandb sync`.

    Neither the network nor an account is asked for. Each start of a training is a run of its own, in one group.
    """

    def __init__(self, run: SinkContext) -> None:
        import wandb

        settings = wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True, x_disable_stats=True)
        self.run = wandb.init(
            project="mpipipe",
            dir=str(run.out),
            mode="offline",
            group=run.out.name,
            config=dict(run.configuration),
            settings=settings,
        )

    def write(self, facts: Facts) -> None:
        self.run.log({name: value for name, value in facts.items() if name != "step"}, step=int(facts["step"]))

    def close(self) -> None:
        self.run.finish()


KINDS: dict[str, Any] = {"csv": Csv, "tensorboard": TensorBoard, "wandb": WeightsAndBiases}
LIBRARIES = {"tensorboard": "tensorboardX", "wandb": "wandb"}  # library of a sink; its extra has the name of the sink


def parse_names(text: str) -> tuple[str, ...]:
    """Return the sinks that `--metrics-to` names. Raises ArgumentError for a name that is unknown or comes twice."""
    names = tuple(name.strip() for name in text.split(",")) if text != "none" else ()
    for name in names:
        if name not in KINDS or names.count(name) > 1:
            raise ArgumentError(
                "no such sink of metrics" if name not in KINDS else "a sink of metrics is named twice",
                found=repr(text),
                expected=f"some of {', '.join(KINDS)} with commas between them, or none",
            )
    return names


def check_installed(names: Sequence[str]) -> None:
    """Raise BackendError for a sink whose library is not installed."""
    for name in LIBRARIES.keys() & {*names}:
        optional_library(LIBRARIES[name], f"send metrics to {name}", name, f", or leave {name} out of metrics_to")


class Sinks:
    """Several sinks that cannot end the training: `warn` is called with a warning if one fails."""

    def __init__(self, names: Sequence[str], run: SinkContext, warn: Callable[[str], None]) -> None:
        self.open: dict[str, Any] = {}
        self.warn = warn
        for name in names:
            with self._trying(name):
                self.open[name] = KINDS[name](run)

    def write(self, facts: Facts) -> None:
        """Hand a record to every sink that has not failed."""
        for name, sink in list(self.open.items()):
            with self._trying(name):
                sink.write(facts)

    def close(self) -> None:
        """Close all sinks that have not failed. May be called twice."""
        for name, sink in list(self.open.items()):
            with self._trying(name):
                sink.close()
        self.open.clear()

    @contextmanager
    def _trying(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a library raises what it likes
            self.open.pop(name, None)
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            self.warn(f"mpipipe: no more metrics go to {name}: {reason}; the training goes on")


# -- metrics.jsonl over a resume: records after the checkpoint are cut off, so that none is repeated -----------------


NAME = "metrics.jsonl"
MOST_BYTES = 1 << 30


def kept_records(out: Path, step: int) -> tuple[str, bool]:
    """Read the lines of the records up to `step`, none for 0, and whether there are others.

    A last line without an end is what a killed training leaves, and counts as another one. Raises ConfigError if the
    file cannot be read, or holds something else.
    """
    path = out / NAME
    try:
        text = files.read_text(path, MOST_BYTES)
    except FileNotFoundError:
        return "", False
    except (OSError, UnicodeDecodeError) as error:
        raise _wrong(path, str(error)) from error
    lines = text.splitlines(keepends=True)
    torn = bool(lines) and not lines[-1].endswith("\n")
    if torn and not lines[-1].startswith('{"step"'[: len(lines[-1])]):
        raise _wrong(path, f"line {len(lines)} is no record")
    steps = [_step_of(line, number, path) for number, line in enumerate(lines[: len(lines) - torn], 1)]
    kept = "".join(line for line, number in zip(lines, steps) if 0 < step >= number)
    return kept, len(kept) < len(text)


def cut(out: Path, step: int) -> int:
    """Cut off the records after a step, as a whole or not at all; return the last step left, or -1. Raises OSError."""
    kept, others = kept_records(out, step)
    if others:
        files.write_whole(out / NAME, kept.encode())
    return json.loads(kept.splitlines()[-1])["step"] if kept else -1


def _step_of(line: str, number: int, path: Path) -> int:
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        step = json.loads(line)["step"]
        if type(step) is int:
            return step
    raise _wrong(path, f"line {number} is no record")


def _wrong(path: Path, text: str) -> ConfigError:
    return ConfigError(
        f"the metrics of a training to go on with cannot be used: {text}",
        found=str(path),
        expected="one JSON object a line, each with its step",
        remedy="move the file away; the training then goes on with a new one",
    )
