"""A task from a file, `weather.py` or `weather.py:Weather`, the same on all ranks."""

from __future__ import annotations

import dataclasses
import importlib
import linecache
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from types import ModuleType

from mpipipe import files
from mpipipe.errors import ConfigError
from mpipipe.job import Communicator, group_of, is_users
from mpipipe.options import NOUNS
from mpipipe.text import near
from mpipipe.train.config import TaskConfig
from mpipipe.train.config_fields import option
from mpipipe.train.task import Task, TaskSource
from mpipipe.train.task_calls import line_of

MOST_BYTES = 1 << 24
# Ranks that are threads have the same modules.
IMPORTING = Lock()
REMEDY = (
    "`python -m mpipipe train FILE.py` takes a file with one class that is derived from "
    "mpipipe.train.Task"
)


@dataclasses.dataclass(frozen=True)
class TaskFileConfig(TaskConfig):
    """The configuration of the training of a task that is in a file."""

    heading = "task"

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
        False, "resume, although the file of the task has changed since the checkpoint"
    )

    @classmethod
    def load(cls, path: str | None = None, **flags: object) -> TaskFileConfig:
        """Read a configuration as `TaskConfig.load` does; a file names its task from its folder."""
        config = super().load(path, **flags)
        if path is None or config.task is None or flags.get("task") is not None:
            return config
        return dataclasses.replace(config, task=os.path.join(os.path.dirname(path), config.task))


def load_task(text: str, values: Sequence[str], comm: Communicator) -> Task:
    """Load a task, with its `file`, on all ranks from the file as rank 0 has it; collective.

    `text` is FILE.py or FILE.py:CLASS, from the working folder of rank 0, `values` are NAME=VALUE
    for attributes. Raises ConfigError where the file is missing or does not import, has no task or
    several.
    """
    group = group_of(comm)
    name, colon, chosen = text.rpartition(":")
    if not (colon and chosen.isidentifier()):
        name = text
        chosen = ""

    def read() -> tuple[Path, bytes]:
        with files.reading("the file of the task", name, ConfigError, remedy=REMEDY):
            return Path(os.path.abspath(name)), files.read_bytes(name, MOST_BYTES)

    place, code = group.from_one("train: the file of the task", read)
    with group.raise_together("train: loading the task"):
        with IMPORTING:
            module = imported(place, code)
            # Those next to the file, their content by paths in its folder.
            modules = {}
            for _, file, inside in not_installed():
                if os.path.realpath(file) == os.path.realpath(place.parent / inside):
                    modules[inside] = Path(file).read_bytes()
        kind = task_class(module, place, chosen)
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
    """Import a file, whose folder is where it finds others. ConfigError where it raises."""
    module = ModuleType(f"task_{path.stem}")
    file_name = str(path)
    module.__file__ = file_name
    sys.modules[module.__name__] = module
    folder = str(path.parent)
    while folder in sys.path:
        sys.path.remove(folder)
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    # A copy imports its own copies, and not modules from elsewhere that are in this folder, too.
    for name, file, inside in not_installed():
        place = path.parent / inside
        if place.is_file() and os.path.realpath(place) != os.path.realpath(file):
            sys.modules.pop(name, None)
    linecache.checkcache(file_name)
    try:
        exec(compile(code, file_name, "exec"), vars(module))
    except (Exception, SystemExit) as error:
        remedy = f"`python {path.name}` shows the same"
        if isinstance(error, ImportError):
            remedy += "; modules next to it are found, if it was not copied away"
        raise ConfigError(
            f"the file of the task does not import: {type(error).__name__}: {error}",
            found=line_of(error) or file_name,
            remedy=remedy,
        ) from error
    return module


def not_installed() -> Iterator[tuple[str, str, str]]:
    """Yield imported modules that no installation and no package here has.

    Each has its name, its file, and both places in a folder where a module of this name may be.
    """
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if file and is_users(file) and name != "__main__":
            path = name.replace(".", "/")
            yield name, file, f"{path}.py"
            yield name, file, f"{path}/__init__.py"


def task_class(module: ModuleType, path: Path, name: str) -> type[Task]:
    """Return the class of the task in a module: the one of this name, or the only one."""
    kinds = {}
    for key, value in vars(module).items():
        is_task = isinstance(value, type) and issubclass(value, Task)
        if is_task and value.__module__ == module.__name__:
            kinds[key] = value
    if not name and len(kinds) == 1:
        (name,) = kinds
    if name in kinds:
        return kinds[name]
    what = f"no task {name}".rstrip()
    if kinds and not name:
        what = "several tasks"
    raise ConfigError(
        f"{what} in {path.name}",
        found=", ".join(kinds) or f"no class derived from mpipipe.train.Task in {path}",
        expected="one class derived from mpipipe.train.Task",
        remedy=f"name it: {path.name}:{next(iter(kinds))}" if kinds else REMEDY,
    )


# -- Attributes from the command line --------------------------------------------------------------


def made(kind: type[Task], path: Path, values: Sequence[str]) -> Task:
    """Make the task with attributes as NAME=VALUE sets them, which keep their types."""
    public = {name for name in dir(kind) if not name.startswith("_")}
    names = public.difference(vars(Task)).union(getattr(kind, "__dataclass_fields__", ()))
    texts = dict(value.partition("=")[::2] for value in values)
    for name, text in texts.items():
        if name not in names:
            expected = near(name, sorted(names)) or sorted(names) or ["none"]
            raise ConfigError(
                f"{kind.__name__} in {path.name} has no attribute {name} to set",
                found=f"--set {name}={text}",
                expected=" or ".join(expected),
            )
    try:
        task = kind()
        parsed = {name: _parsed(name, text, getattr(task, name)) for name, text in texts.items()}
        if dataclasses.is_dataclass(kind):
            return kind(**parsed)
        for name, value in parsed.items():
            setattr(task, name, value)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{kind.__name__}() in {path.name} raised {type(error).__name__}: {error}",
            found=line_of(error) or str(path),
            expected="a class that is made without arguments",
        ) from error
    return task


def _parsed(name: str, text: str, now: object) -> object:
    """Return a text in the type that the attribute has now."""
    kind = type(now)
    expected = "an attribute that is a number, a text, true or false"
    if kind in (bool, int, float, str):
        expected = NOUNS[kind]
        with suppress(ValueError, KeyError):
            if kind is bool:
                return {"true": True, "false": False}[text.lower()]
            return kind(text)
    raise ConfigError(f"--set {name}", found=repr(text), expected=expected)
