"""The metrics of a training: metrics.jsonl over a resume, and scalars for TensorBoard."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mpipipe import files
from mpipipe.errors import ConfigError
from mpipipe.text import optional_library

Facts = Mapping[str, float]  # the numbers of a record by name; "step" is always among them


def check_tensorboard() -> None:
    """Raise BackendError where the library that writes for TensorBoard is not installed."""
    optional_library(
        "tensorboardX", "write for TensorBoard", "tensorboard", ", or leave out --tensorboard"
    )


class TensorBoard:
    """The folder tensorboard/. Steps that this start repeats are hidden in those before it.

    `done` counts the steps before this start. What the library raises ends no training: one warning
    says that no more is written.
    """

    def __init__(self, out: Path, done: int, warn: Callable[[str], None]) -> None:
        self.warn = warn
        self.writer: Any = None
        with self._giving_up():
            from tensorboardX import SummaryWriter

            # File names have whole seconds: without a suffix two starts might share a file.
            self.writer = SummaryWriter(
                str(out / "tensorboard"),
                purge_step=done + 1 if done else None,
                filename_suffix=f".{done}" if done else "",
            )

    def write(self, facts: Facts) -> None:
        """Write the numbers of a record."""
        if self.writer is None:
            return
        with self._giving_up():
            for name, value in facts.items():
                if name not in ("step", "time"):
                    self.writer.add_scalar(name, value, int(facts["step"]), walltime=facts["time"])
            self.writer.flush()

    def close(self) -> None:
        """Close the file. May be called twice."""
        if self.writer is not None:
            with self._giving_up():
                self.writer.close()
        self.writer = None

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        """Write nothing more once the library raises."""
        try:
            yield
        except Exception as error:
            self.writer = None
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            self.warn(f"mpipipe: no more metrics go to TensorBoard: {reason}; the training goes on")


# -- metrics.jsonl over a resume: records after the checkpoint are cut off, and none is repeated --


NAME = "metrics.jsonl"
MOST_BYTES = 1 << 30


def records_until(out: Path, step: int) -> tuple[str, bool]:
    """Read the lines of the records up to `step`, none for 0, and whether there are others.

    A last line without an end is what a killed training leaves, and counts as another one. Raises
    ConfigError if the file cannot be read, or holds something else.
    """
    path = out / NAME
    try:
        text = files.read_text(path, MOST_BYTES)
    except FileNotFoundError:
        return "", False
    except (OSError, UnicodeDecodeError) as error:
        raise _metrics_error(path, str(error)) from error
    *lines, torn = text.split("\n")
    if not torn.startswith('{"step"'[: len(torn)]):
        raise _metrics_error(path, f"line {len(lines) + 1} is no record")
    records = ""
    for number, line in enumerate(lines, 1):
        done = None
        with suppress(ValueError, RecursionError, TypeError, KeyError):
            done = json.loads(line)["step"]
        if type(done) is not int:
            raise _metrics_error(path, f"line {number} is no record")
        if 0 < step >= done:
            records += f"{line}\n"
    return records, len(records) < len(text)


def cut(out: Path, step: int) -> None:
    """Cut off the records after a step, as a whole or not at all. Raises OSError."""
    records, others = records_until(out, step)
    if others:
        files.write_whole(out / NAME, records.encode())


def _metrics_error(path: Path, text: str) -> ConfigError:
    return ConfigError(
        f"the metrics of a training to go on with cannot be used: {text}",
        found=str(path),
        expected="one JSON object a line, each with its step",
        remedy="move the file away; the training then goes on with a new one",
    )
