"""What people and programs see of a training: lines on the terminal, and a file with one JSON object a line."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, TextIO, cast

from mpipipe.train.outlet import Lines, Outlet

if TYPE_CHECKING:
    from rich.progress import Progress  # imported where a bar is made: it takes time


@dataclass(frozen=True)
class Record:
    """The state of a training after some steps.

    What was not measured is None, and left out of metrics.jsonl.

    Attributes
    ----------
    step : int
        Number of steps that are done.
    loss : float, optional
        Mean loss over the batch of the last step, in nats per token: a byte, where the data are no tokens.
    validation : float, optional
        Mean loss over the validation windows, in nats per token.
    lr : float, optional
        Learning rate of the last step.
    grad_norm : float, optional
        Norm of all gradients of the last step, before clipping. None where they were not finite.
    tokens_per_second : float, optional
        Tokens trained on per second since the last record, over all replicas.
    bubble : float, optional
        Idle share of the ranks' time, measured since the last record.
    predicted : float, optional
        Idle share that a simulation with the measured durations of the stages gives.
    loss_scale : float, optional
        Factor on the gradients of the next step, where it is dynamic.
    skipped : int, optional
        Steps skipped so far because the loss scale was too large, where it is dynamic.
    bits_per_byte, validation_bits_per_byte : float, optional
        The two losses in bits per byte of text, where it is known how many bytes the tokens stand for.

    Examples
    --------
    >>> from mpipipe.train import Record
    >>> Record(10, loss=2.5).facts()
    {'step': 10, 'loss': 2.5}
    """

    step: int
    loss: float | None = None
    validation: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    tokens_per_second: float | None = None
    bubble: float | None = None
    predicted: float | None = None
    loss_scale: float | None = None
    skipped: int | None = None
    bits_per_byte: float | None = None
    validation_bits_per_byte: float | None = None

    def facts(self) -> dict[str, float]:
        """Return what was measured, by name.

        Returns
        -------
        dict
            The fields that are not None, in their order.
        """
        return {name: value for name, value in vars(self).items() if value is not None}


# How a line of progress names and writes each field of a Record.
COLUMNS = {
    "loss": ("loss", "{:.4f}"),
    "validation": ("validation", "{:.4f}"),
    "lr": ("lr", "{:.2e}"),
    "grad_norm": ("norm", "{:.3f}"),
    "tokens_per_second": ("tokens/s", "{:.0f}"),
    "bubble": ("bubble", "{:.3f}"),
    "predicted": ("predicted", "{:.3f}"),
    "loss_scale": ("scale", "{:g}"),
    "skipped": ("skipped", "{}"),
    "bits_per_byte": ("bits/byte", "{:.4f}"),
    "validation_bits_per_byte": ("validation bits/byte", "{:.4f}"),
}


# How the last line of a training writes them.
LAST = {"loss": "loss={:.4f}", "validation": "validation={:.4f}", "tokens_per_second": "tokens/s={:.0f}",
        "bubble": "bubble={:.4f}", "predicted": "predicted={:.4f}"}  # fmt: skip


def summary(record: Record) -> str:
    """Return what the last line of a training says of a record."""
    facts = record.facts()
    return "".join(f" {form.format(facts[name])}" for name, form in LAST.items() if name in facts)


class Reporter:
    """Shows progress on one rank: a bar and lines on a terminal, plain lines elsewhere. A context manager.

    Once it is made, it can write or not, but the training goes on: see `outlet`.

    Parameters
    ----------
    steps : of the whole training
    metrics : file to append one JSON object for each record to; made anew
    stream : where lines go; standard output by default
    terminal : whether a person watches `stream`
    done : steps before this start; where it is not None, the metrics may be there and are gone on with

    Raises OSError where the file cannot be made, FileExistsError where there is one and `done` is None.
    """

    def __init__(
        self, steps: int, metrics: Path, stream: TextIO | None = None, terminal: bool = False, done: int | None = None
    ) -> None:
        self.steps, self.stream = steps, Outlet(stream or sys.stdout)
        self.metrics = Lines(metrics, goes_on=done is not None)
        self.bar = _bar(steps, self.stream, done or 0) if terminal else None

    def say(self, text: str) -> None:
        """Write one or more lines, neither wrapped nor coloured. Characters that cannot be encoded are escaped."""
        if self.bar is not None:
            self.bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            self.stream.write(text + "\n")

    def advance(self) -> None:
        """Count one more step."""
        if self.bar is not None:
            self.bar.advance(self.bar.task_ids[0])

    def record(self, record: Record) -> None:
        """Append a record to the metrics, and show it as a line."""
        facts = record.facts()
        self.metrics.append(json.dumps(facts))
        cells = [f"{title} {form.format(facts[name])}" for name, (title, form) in COLUMNS.items() if name in facts]
        self.say(f"step {record.step:>{len(str(self.steps))}}/{self.steps}  " + "  ".join(cells))

    def sync(self) -> None:
        """Force the metrics to the disk: they must not end before a checkpoint does."""
        self.metrics.sync()

    def __enter__(self) -> Reporter:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.stop()
        self.metrics.close()


class NullReporter:
    """The reporter of all other ranks, which shows nothing."""

    def say(self, text: str) -> None:
        """Do nothing."""

    def advance(self) -> None:
        """Do nothing."""

    def record(self, record: Record) -> None:
        """Do nothing."""

    def sync(self) -> None:
        """Do nothing."""

    def __enter__(self) -> NullReporter:
        return self

    def __exit__(self, *error: object) -> None:
        return None


def on_terminal() -> bool:
    """Whether standard output and standard error are both terminals.

    Standard output alone tells nothing: Open MPI gives each rank a terminal of its own, and passes its text on to
    where mpiexec writes.
    """
    return all(stream is not None and stream.isatty() for stream in (sys.stdout, sys.stderr))


def _bar(steps: int, stream: Outlet, done: int) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(file=cast("IO[str]", stream), force_terminal=True), transient=True)
    bar.add_task("training", total=steps, completed=done)
    return bar
