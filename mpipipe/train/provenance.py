"""Where the numbers of a training come from: config.toml and environment.json in its output folder.

config.toml is the configuration with every open option filled in, so `train --config` makes the same numbers again.
environment.json is what else the numbers and their times depend on. Both files describe the newest start. If an earlier
start of the same training was different, its file is kept as config.1.toml, environment.1.json and so on.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from mpipipe import files
from mpipipe.options import written
from mpipipe.planning import LayerPlan
from mpipipe.train.config import TaskConfig, toml_line
from mpipipe.train.task import Task, TaskSource

CONFIG, ENVIRONMENT = "config.toml", "environment.json"
# every file that a training may write before its first checkpoint, except metrics.jsonl
OURS = re.compile(
    r"(config(\.\d+)?\.toml|environment(\.\d+)?\.json|metrics\.csv|loss\.png|train\.log)(\.partial)?|tensorboard|wandb"
)
MOST_BYTES = 1 << 24
# facts that differ from start to start even if nothing has changed
PASSING = ("time", "command", "job", "hosts")


def is_ours(name: str) -> bool:
    """Whether a file or folder of this name in an output folder describes a training."""
    return OURS.fullmatch(name) is not None


def resolved(config: TaskConfig, task: Task, plan: LayerPlan, device: str, pipe: int) -> dict[str, Any]:
    """Return the configuration as keys of a file, in which open options have the values of this training.

    Paths are absolute, so that the file works in any working folder, but that of the task, which is next to the file: a
    run folder can be moved. A training with these keys begins anew: `out` and `resume = "auto"` are left out.
    """
    given = {"device": device, "pipe": pipe, "microbatches": plan.schedule.microbatches}
    values = task.resolve(written(config) | given)
    if task.file is not None:
        values["task"] = f"{task.file.path.name}:{task.file.name}"
        values["init"] = values.get("init") and absolute(values["init"])
        values.pop("changed_task", None)
    values["resume"] = None if values["resume"] in ("auto", "no") else absolute(values["resume"])
    return {name.rstrip("_"): value for name, value in values.items() if value is not None and name != "out"}


def absolute(path: str) -> str:
    """Return the path of what is there as an absolute one, and any other text as it is."""
    return os.path.abspath(path) if os.path.exists(path) else path


def write(
    out: Path,
    keys: Mapping[str, Any],
    environment: Mapping[str, Any],
    given: str | None = None,
    source: TaskSource | None = None,
) -> None:
    """Write both files on rank 0, and copies of the file of the task and of its modules.

    `given` is the fingerprint of data without a key.

    Raises OSError.
    """
    command = f"mpiexec -n {environment['ranks']} python -m mpipipe train --config {shlex.quote(str(out / CONFIG))}"
    content = f"# This training as it was resolved. Train it again:\n#   {command} --out NEW\n"
    if given is not None:
        content += f"# but for the data, which the caller of train handed over: fingerprint {given}\n"
    content += "".join(toml_line(*key) for key in keys.items())
    _replace(out / CONFIG, content, lambda content: content)
    if source is not None:
        facts = {"file": str(source.path), "class": source.name, "sha256": source.checksum}
        environment = {**environment, "task": facts | {"modules": sorted(source.modules)}}
        for name, code in source.copies.items():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            _replace(out / name, code.decode(errors="surrogateescape"), lambda content: content)
    _replace(out / ENVIRONMENT, json.dumps(environment, indent=1) + "\n", _lasting)


def _replace(path: Path, text: str, lasting: Any) -> None:
    """Write a file. One that is there and has other facts, of those that are `lasting`, gets the first free number."""
    before = None
    with suppress(OSError, UnicodeDecodeError):
        before = files.read_text(path, MOST_BYTES)
    if before is not None and lasting(before) != lasting(text):
        former = (path.with_suffix(f".{number}{path.suffix}") for number in count(1))
        os.replace(path, next(name for name in former if not name.exists()))
    files.write_whole(path, text.encode(errors="surrogateescape"))  # a path may be no text


def _lasting(text: str) -> Any:
    try:
        facts = json.loads(text)
    except ValueError:
        return text
    return {name: value for name, value in facts.items() if name not in PASSING} if isinstance(facts, dict) else text
