"""metrics.jsonl over a resume: records behind the checkpoint are cut off, so that none is repeated."""

from __future__ import annotations

import json
from pathlib import Path

from mpipipe import files
from mpipipe.errors import ConfigError

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
    """Cut off the records behind a step, all of them for 0; as a whole or not at all. Raises OSError.

    Returns the step of the last record that is left, -1 where none is.
    """
    kept, others = kept_records(out, step)
    if others:
        files.write_whole(out / NAME, kept.encode())
    return json.loads(kept.splitlines()[-1])["step"] if kept else -1


def _step_of(line: str, number: int, path: Path) -> int:
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise _wrong(path, f"line {number} is no record") from error
    if type(step) is not int:
        raise _wrong(path, f"line {number} is no record")
    return step


def _wrong(path: Path, text: str) -> ConfigError:
    return ConfigError(
        f"the metrics of a training to go on with cannot be used: {text}",
        found=str(path),
        expected="one JSON object a line, each with its step",
        remedy="move the file away; the training then goes on with a new one",
    )
