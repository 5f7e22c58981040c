"""The report of a training: lines on the terminal, metrics.jsonl, and scalars for TensorBoard."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO, TypeAlias

from mpipipe import files
from mpipipe.errors import ConfigError
from mpipipe.job import write
from mpipipe.options import Values
from mpipipe.text import optional_library
from mpipipe.train.screen import JsonLines, SafeStream

Facts = Mapping[str, float]  # the numbers of a record by name; "step" is always among them
Measured: TypeAlias = "float | None"

LOG = "train.log"
# A bubble that takes less than this share of the time is not explained.
SMALL = 0.05


@dataclass(frozen=True)
class Record:
    """The state of a training after some steps.

    What was not measured is None, and left out of metrics.jsonl.

    Attributes
    ----------
    step : int
        Number of steps that are done.
    loss, validation : float, optional
        Mean loss over the batch of the last step and over the validation windows, in nats per
        token: a byte, where the data are no tokens.
    lr, grad_norm : float, optional
        Learning rate of the last step, and the norm of all its gradients before clipping, if they
        were finite.
    tokens_per_second : float, optional
        Tokens trained on per second since the last record, over all replicas.
    bubble, predicted : float, optional
        Idle share of the ranks' time, measured since the last record, and as a simulation with the
        measured durations of the stages gives it.
    loss_scale, skipped : float, optional
        Where the loss scale is dynamic: the factor on the gradients of the next step, and steps
        skipped so far.
    bits_per_byte, validation_bits_per_byte : float, optional
        The two losses in bits per byte of text, where it is known how many bytes the tokens stand
        for.
    samples_per_second : float, optional
        The same of samples, where a task is trained from a file.
    metrics : mapping of str to float
        Further numbers of the validation, by name, where the task has some.
    """

    step: int
    loss: Measured = None
    validation: Measured = None
    lr: Measured = None
    grad_norm: Measured = None
    tokens_per_second: Measured = None
    bubble: Measured = None
    predicted: Measured = None
    loss_scale: Measured = None
    skipped: Measured = None
    bits_per_byte: Measured = None
    validation_bits_per_byte: Measured = None
    samples_per_second: Measured = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, facts: Facts) -> Record:
        """Make the record that has these facts."""
        more = dict(facts)
        known: Values = {name: more.pop(name) for name in FIELDS if name in facts}
        return cls(**known, metrics=more)

    def facts(self) -> Facts:
        """Return what was measured, by name: fields in their order, and the metrics."""
        facts = {name: value for name, value in vars(self).items() if value is not None}
        metrics = facts.pop("metrics")
        return facts | metrics


def finite(facts: Facts) -> Facts:
    """Return the facts that are neither infinite nor NaN."""
    return {name: value for name, value in facts.items() if math.isfinite(value)}


FIELDS = tuple(Record.__annotations__)


# How a line of progress, and the last line, name and write the fields of a Record.
CELLS = {
    "loss": "loss {:.4f}",
    "bits_per_byte": "bits/byte {:.4f}",
    "lr": "lr {:.1e}",
    "grad_norm": "norm {:.3f}",
    "tokens_per_second": "{:.0f} {unit}/s",
    "samples_per_second": "{:.0f} {unit}/s",
    "loss_scale": "scale {:g}",
    "skipped": "skipped {}",
}
VALIDATION = {"validation": "validation {:.4f}", "validation_bits_per_byte": "bits/byte {:.4f}"}
LAST = {
    "loss": "loss={:.4f}",
    "validation": "validation={:.4f}",
    "tokens_per_second": "{unit}/s={:.0f}",
    "samples_per_second": "{unit}/s={:.0f}",
    "bubble": "bubble={:.4f}",
    "predicted": "predicted={:.4f}",
    "validation_bits_per_byte": "bits/byte={:.4f}",
}


def _cells(record: Record, forms: Mapping[str, str], unit: str) -> list[str]:
    facts = record.facts()
    return [form.format(facts[name], unit=unit) for name, form in forms.items() if name in facts]


def summary(record: Record, unit: str = "tokens") -> str:
    """Return what the last line of a training says of a record; bytes count as tokens."""
    if unit == "bytes":
        unit = "tokens"
        record = replace(record, validation_bits_per_byte=None)
    cells = _cells(record, LAST, unit)
    cells += [f"{name}={value:.4g}" for name, value in record.metrics.items()]
    return " ".join(["", *cells])


def lines_of(record: Record, steps: int, unit: str, timing: str) -> list[str]:
    """Return the lines of a record: of its step, and of its validation."""
    place = f"step {record.step:>{len(str(steps))}}/{steps}"
    lines = []
    if record.loss is not None:
        lines.append("  ".join([place, *_cells(record, CELLS, unit), timing]))
    if record.validation is not None:
        cells = [place, *_cells(record, VALIDATION, unit)]
        cells += [f"{name} {value:.4g}" for name, value in record.metrics.items()]
        lines.append("  ".join(cells))
    return lines


def bubble_explained(record: Record, oversubscribed: str | None) -> str:
    """Return a line about where the bubble of a record comes from; "" for a small one."""
    bubble = record.bubble or 0.0
    predicted = record.predicted or 0.0
    # A pipeline of one rank has no bubble.
    if bubble < SMALL or predicted == 0:
        return ""
    text = f"mpipipe: bubble {bubble:.0%} (ranks idle)"
    if bubble <= predicted + SMALL:
        return f"{text}, by schedule and stages; more micro-batches or evener stages help"
    why = "by waiting for messages or batches"
    if oversubscribed is not None:
        why = f"mostly since {oversubscribed}"
    return f"{text}: {predicted:.0%} by the schedule, {bubble - predicted:.0%} {why}"


@dataclass
class Reporter:
    """Shows progress on rank 0, as lines of text. A context manager.

    Metrics and the log are in `out`, lines go to `stream`, by default the standard output.
    `oversubscribed` is a sentence if ranks share cores. `done` counts the steps before this start;
    None is a new training, without metrics. With `tensorboard`, records go to the folder
    tensorboard/ as well, where those before that this start repeats are hidden; what the library
    raises ends no training: one warning says that no more is written.

    Raises OSError if a file cannot be made, and FileExistsError if there are metrics and `done` is
    None; later a failed write does not end the training.
    """

    steps: int
    out: Path
    stream: TextIO | None = None
    unit: str = "tokens"
    oversubscribed: str | None = None
    done: int | None = None
    tensorboard: bool = False

    def __post_init__(self) -> None:
        self.outlet = SafeStream(self.stream or sys.stdout)
        self.metrics = JsonLines(self.out / METRICS, goes_on=self.done is not None)
        self.log = JsonLines(self.out / LOG, goes_on=True)
        self.bubbles = 0
        # When this start and the last record were.
        self.start = self.last = time.monotonic()
        # Writes for TensorBoard, until it fails.
        self.writer: Any = None
        if self.tensorboard:
            with self._giving_up():
                from tensorboardX import SummaryWriter

                # File names have whole seconds: without a suffix two starts might share a file.
                self.writer = SummaryWriter(
                    str(self.out / "tensorboard"),
                    purge_step=self.done + 1 if self.done else None,
                    filename_suffix=f".{self.done or 0}",
                )

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        """Write nothing more for TensorBoard once its library raises."""
        try:
            yield
        except Exception as error:
            self.writer = None
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            self.warn(f"mpipipe: no more metrics go to TensorBoard: {reason}; the training goes on")

    def say(self, text: str) -> None:
        """Write one or more lines, to the log as well. What cannot be encoded is escaped."""
        self.outlet.write(f"{text}\n")
        self.log.append(text)

    def warn(self, text: str) -> None:
        """Write a line to standard error and to the log."""
        write(f"{text}\n")
        self.log.append(text)

    def record(self, record: Record) -> None:
        """Append a record to the metrics, and show it as a line or two.

        There it has the `time` in seconds since 1970, and the `seconds` since the last record.
        """
        seconds = time.monotonic() - self.last
        self.last += seconds
        facts = {**record.facts(), "time": round(time.time(), 3), "seconds": round(seconds, 6)}
        # JSON has no number for what is not finite, such as a metric of a validation without cases.
        known = {**dict.fromkeys(facts), **finite(facts)}
        self.metrics.append(json.dumps(known, allow_nan=False))
        if self.writer is not None:
            with self._giving_up():
                for name, value in facts.items():
                    if name not in ("step", "time"):
                        self.writer.add_scalar(name, value, record.step, walltime=facts["time"])
                self.writer.flush()
        lines = lines_of(record, self.steps, self.unit, self.timing(record.step))
        if record.predicted is not None:
            self.bubbles += 1
            # The first record includes the step that allocates memory.
            if self.bubbles == 2:
                lines.append(bubble_explained(record, self.oversubscribed))
        for line in filter(None, lines):
            self.say(line)

    def sync(self) -> None:
        """Force the metrics to the disk: they must reach as far as the checkpoint that follows."""
        self.metrics.sync()

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, *error: object) -> None:
        if self.writer is not None:
            with self._giving_up():
                self.writer.close()
        self.metrics.close()
        self.log.close()

    def timing(self, step: int) -> str:
        """Return the time since this start and the time left after a step, in words."""
        gone = int(time.monotonic() - self.start)
        made = step - (self.done or 0)
        left = self.steps - step
        text = str(timedelta(seconds=gone))
        if made and left:
            text += f", {timedelta(seconds=left * gone // made)} left"
        return text


class NullReporter(Reporter):
    """The reporter of all other ranks, which shows nothing."""

    def nothing(self, *_: object, **__: object) -> None:
        """Do nothing."""

    __init__ = say = record = sync = __exit__ = nothing


def check_tensorboard() -> None:
    """Raise BackendError where the library that writes for TensorBoard is not installed."""
    optional_library(
        "tensorboardX", "write for TensorBoard", "tensorboard", ", or leave out --tensorboard"
    )


# -- metrics.jsonl over a resume: records after the checkpoint are cut off, and none is repeated --


METRICS = "metrics.jsonl"
MOST_BYTES = 1 << 30


def records_until(out: Path, step: int) -> tuple[str, bool]:
    """Read the lines of the records up to `step`, none for 0, and whether there are others.

    A last line without an end is what a killed training leaves, and counts as another one. Raises
    ConfigError if the file cannot be read, or holds something else.
    """
    path = out / METRICS
    try:
        text = files.read_text(path, MOST_BYTES)
    except FileNotFoundError:
        return "", False
    except (OSError, UnicodeDecodeError) as error:
        raise _metrics_error(path, str(error)) from error
    records = ""
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        if line[0] == "{" and line[-1] != "\n":
            break
        try:
            if 0 < step >= json.loads(line)["step"]:
                records += line
        except (ValueError, RecursionError, TypeError, LookupError) as error:
            raise _metrics_error(path, f"line {number} is no record") from error
    return records, len(records) < len(text)


def cut(out: Path, step: int) -> None:
    """Cut off the records after a step, as a whole or not at all. Raises OSError."""
    records, others = records_until(out, step)
    if others:
        files.write_whole(out / METRICS, records.encode())


def _metrics_error(path: Path, text: str) -> ConfigError:
    return ConfigError(
        f"the metrics of a training to go on with cannot be used: {text}",
        found=str(path),
        expected="one JSON object a line, each with its step",
        remedy="move the file away; the training then goes on with a new one",
    )
