"""What a person and a program see of a training: lines on the terminal, and one JSON object a line in a file."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from mpipipe.train.outlet import Lines, Outlet


@dataclass(frozen=True)
class Record:
    """The state of a training after `step` steps; what was not measured then is None, and left out of the file.

    Attributes
    ----------
    loss, validation : nats per byte, of the last step's batch and of the validation windows
    lr, grad_norm : of the last step; the norm is that before clipping, and none where gradients were not finite
    tokens_per_second : bytes trained on per second since the last record, over all replicas
    bubble, predicted : idle part of the ranks' time, measured since the last record and simulated from the measured
        durations of the stages
    loss_scale, skipped : factor on the gradients of the next step, and steps skipped so far because it was too large,
        where it is dynamic
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

    def facts(self) -> dict:
        """The fields that are there, in order."""
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
}


class Reporter:
    """Progress on one rank: a bar and lines on a terminal, plain lines elsewhere; a context manager.

    Once it is made, nothing that it writes to can fail the training: see `outlet`.

    Parameters
    ----------
    steps : of the whole training
    metrics : file to append one JSON object for each record to; made anew
    stream : where lines go; standard output by default
    terminal : whether a person watches `stream`

    Raises OSError where the file cannot be made, FileExistsError where there is one.
    """

    def __init__(self, steps: int, metrics: Path, stream=None, terminal: bool = False):
        self.steps, self.stream = steps, Outlet(stream or sys.stdout)
        self.metrics = Lines(metrics)
        self.bar = _bar(steps, self.stream) if terminal else None

    def say(self, text: str):
        """One or more lines, neither wrapped nor coloured; what the stream cannot show is escaped."""
        if self.bar is not None:
            self.bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            self.stream.write(text + "\n")

    def advance(self):
        """One more step is done."""
        if self.bar is not None:
            self.bar.advance(self.bar.task_ids[0])

    def record(self, record: Record):
        """Append to metrics and show a line."""
        facts = record.facts()
        self.metrics.append(json.dumps(facts))
        cells = [f"{title} {form.format(facts[name])}" for name, (title, form) in COLUMNS.items() if name in facts]
        self.say(f"step {record.step:>{len(str(self.steps))}}/{self.steps}  " + "  ".join(cells))

    def __enter__(self):
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, kind, error, trace):
        if self.bar is not None:
            self.bar.stop()
        self.metrics.close()


class NullReporter:
    """The reporter of all other ranks."""

    def say(self, text: str):
        """Nothing."""

    def advance(self):
        """Nothing."""

    def record(self, record: Record):
        """Nothing."""

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        return None


def on_terminal() -> bool:
    """Whether standard output and standard error are terminals.

    Standard output alone says nothing: Open MPI gives each rank a terminal of its own there, whose text it then passes
    on to wherever mpiexec writes.
    """
    return all(stream is not None and stream.isatty() for stream in (sys.stdout, sys.stderr))


def _bar(steps, stream):
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(file=stream, force_terminal=True), transient=True)
    bar.add_task("training", total=steps)
    return bar
