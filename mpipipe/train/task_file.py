"""A task from a file, `weather.py` or `weather.py:Weather`, the same on all ranks; and its copy in
the run folder.
"""

from __future__ import annotations

import dataclasses
import importlib
import linecache
import os
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import Any, ClassVar

from mpipipe import files
from mpipipe.errors import ConfigError
from mpipipe.job import Communicator, group_of
from mpipipe.options import option
from mpipipe.text import near
from mpipipe.train.config import TaskConfig
from mpipipe.train.task import ASKED, Task, TaskSource
from mpipipe.train.task_calls import line_of

MOST_BYTES = 1 << 24
IMPORTING = Lock()  # ranks that are threads have the same modules
STANDARD = sysconfig.get_path("stdlib") + os.sep
REMEDY = (
    "`python -m mpipipe train FILE.py` takes a file with one class that is derived from "
    "mpipipe.train.Task"
)


@dataclass(frozen=True)
class TaskFileConfig(TaskConfig):
    """The configuration of the training of a task that is in a file."""

    heading: ClassVar[str] = "task"

    task: str | None = option(
        None, "file of the task, and the name of its class where it has several: FILE.py:CLASS"
    )
    set: tuple[str, ...] = option(
        (),
        "NAME=VALUE for an attribute of the task, such as width=64; repeatable",
        decides=True,
        metavar="NAME=VALUE",
    )
    init: str | None = option(
        None, "checkpoint, or output folder, whose weights to begin with", metavar="PATH"
    )
    changed_task: bool = option(
        False, "resume, although the file of the task is not what it was at the checkpoint"
    )

    @classmethod
    def load(cls, path: str | None = None, **flags: Any) -> TaskFileConfig:
        """Read a configuration, as `TaskConfig.load` does. A file names its task from its own
        folder.
        """
        config = super().load(path, **flags)
        if path is None or config.task is None or flags.get("task") is not None:
            return config
        return dataclasses.replace(config, task=os.path.join(os.path.dirname(path), config.task))


def load_task(text: str, values: Sequence[str], comm: Communicator) -> Task:
    """Load a task, with its `file`, on all ranks from the file as rank 0 has it; collective.

    `text` is FILE.py or FILE.py:CLASS, from the working folder of rank 0, `values` are NAME=VALUE
    for attributes. Raises ConfigError where the file is missing or does not import, has no task or
    several, or the task lacks a method.
    """
    group, (path, colon, wanted) = group_of(comm), text.rpartition(":")
    name = path if colon and wanted.isidentifier() else text

    def content() -> tuple[Path, bytes]:
        with files.reading("the file of the task", Path(name), ConfigError, remedy=REMEDY):
            return Path(os.path.abspath(name)), files.read_bytes(Path(name), MOST_BYTES)

    place, code = group.from_one("train: the file of the task", content)
    with group.raise_together("train: loading the task"):
        with IMPORTING:
            module = imported(place, code)
            modules = neighbours(place.parent)
        kind = task_class(module, place, None if name == text else wanted)
        lacking = [method for method in ASKED if getattr(kind, method) is getattr(Task, method)]
        if lacking:
            raise ConfigError(
                f"{kind.__name__} in {place.name} lacks {' and '.join(lacking)}",
                found=str(place),
                expected=f"a task with {', '.join(ASKED)}",
            )
        task = made(kind, place, values)
        task.file = TaskSource(place, kind.__name__, code, modules)
    group.agree(
        "train: the modules of the task",
        (("SHA-256", task.file.checksum),),
        message=f"the ranks import different modules from the folder of {place.name}",
        remedy="put them on a file system that all hosts share, or copy them to each host",
    )
    return task


def imported(path: Path, code: bytes) -> ModuleType:
    """Return the module that a file is. Its folder is where it finds others. Raises ConfigError
    where it raises.
    """
    module = ModuleType(f"task_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    sys.path[:] = [str(path.parent), *(entry for entry in sys.path if entry != str(path.parent))]
    importlib.invalidate_caches()
    forget_others(path.parent)
    linecache.checkcache(str(path))
    try:
        exec(compile(code, str(path), "exec"), vars(module))
    except (Exception, SystemExit) as error:
        own = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == str(path)
        ]
        line = error.lineno if isinstance(error, SyntaxError) else own[-1].lineno if own else None
        raise ConfigError(
            f"the file of the task does not import: {type(error).__name__}: {error}",
            found=str(path) if line is None else f"line {line} of {path}",
            remedy=f"`python {path.name}` shows the same; modules next to it are found, if it was "
            "not copied away"
            if isinstance(error, ImportError)
            else f"`python {path.name}` shows the same",
        ) from error
    return module


def neighbours(folder: Path) -> dict[str, bytes]:
    """Return the modules that were imported from a folder itself, with their content, by their
    paths in there.
    """
    content = {}
    for name, file in not_installed():
        for inside in places_of(name):
            if os.path.realpath(file) == os.path.realpath(folder / inside):
                content[inside] = Path(file).read_bytes()
    return content


def forget_others(folder: Path) -> None:
    """Forget modules that were imported elsewhere and are in this folder, too: a copy imports its
    own copies.
    """
    for name, file in not_installed():
        there = [folder / inside for inside in places_of(name) if (folder / inside).is_file()]
        if there and os.path.realpath(there[0]) != os.path.realpath(file):
            sys.modules.pop(name, None)


def not_installed() -> list[tuple[str, str]]:
    """Return names and files of imported modules, but for those of Python, of this package, and
    installed ones.
    """
    named = [
        (name, getattr(module, "__file__", None) or "")
        for name, module in list(sys.modules.items())
    ]
    return [
        (name, file)
        for name, file in named
        if file and name.partition(".")[0] not in ("mpipipe", "__main__")
        if not file.startswith(STANDARD)
        and not {"site-packages", "dist-packages"}.intersection(Path(file).parts)
    ]


def places_of(name: str) -> tuple[str, str]:
    """Return where in a folder a module of this name may be."""
    path = name.replace(".", "/")
    return f"{path}.py", f"{path}/__init__.py"


def task_class(module: ModuleType, path: Path, wanted: str | None) -> type[Task]:
    """Return the class of the task in a module: the one that is wanted, or the only one."""
    kinds = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, Task)
        and value.__module__ == module.__name__
    }
    if wanted is None and len(kinds) == 1:
        return next(iter(kinds.values()))
    if wanted in kinds:
        return kinds[wanted]
    raise ConfigError(
        f"no task {wanted} in {path.name}"
        if wanted
        else f"{'several tasks' if kinds else 'no task'} in {path.name}",
        found=", ".join(kinds) or f"no class derived from mpipipe.train.Task in {path}",
        expected="one class derived from mpipipe.train.Task",
        remedy=f"name it: {path.name}:{next(iter(kinds))}" if kinds else REMEDY,
    )


# -- Attributes from the command line --------------------------------------------------------------


def made(kind: type[Task], path: Path, values: Sequence[str]) -> Task:
    """Return the task with attributes as NAME=VALUE sets them, which keep their types."""
    names = {name for name in dir(kind) if not name.startswith("_") and name not in vars(Task)}
    is_record = dataclasses.is_dataclass(kind)
    if is_record:
        names |= {entry.name for entry in dataclasses.fields(kind)}  # type: ignore[arg-type]
    given = dict(each.partition("=")[::2] for each in values)
    strange = [name for name in given if name not in names]
    if strange:
        raise ConfigError(
            f"{kind.__name__} in {path.name} has no attribute {strange[0]} to set",
            found=f"--set {strange[0]}={given[strange[0]]}",
            expected=" or ".join(near(strange[0], sorted(names), {}))
            or ", ".join(sorted(names))
            or "none",
        )
    try:
        task = kind()
        parsed = {name: _parsed(name, text, getattr(task, name)) for name, text in given.items()}
        if is_record:
            return kind(**parsed)
        for name, value in parsed.items():
            setattr(task, name, value)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{kind.__name__}() in {path.name} raised {type(error).__name__}: {error}",
            found=line_of(error, str(path)) or str(path),
            expected="a class that is made without arguments",
        ) from error
    return task


def _parsed(name: str, text: str, now: Any) -> Any:
    """Return a text in the type that the attribute has now."""
    words = {"true": True, "false": False}
    with_type = type(now)
    try:
        if with_type is bool:
            return words[text.lower()]
        if with_type in (int, float, str):
            return with_type(text)
    except (ValueError, KeyError):
        pass
    raise ConfigError(
        f"--set {name}",
        found=repr(text),
        expected={bool: "true or false", int: "an integer", float: "a number"}.get(
            with_type, "an attribute that is a number, a text, true or false"
        ),
    )
