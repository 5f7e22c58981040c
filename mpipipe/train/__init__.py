"""Training a model: configuration, the loop, and what it reports."""

from mpipipe.train.config import TaskConfig
from mpipipe.train.report import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from mpipipe.language.config import TrainConfig
    from mpipipe.language.task import train
    from mpipipe.train.setup import run
    from mpipipe.train.task import Task

__all__ = ["Record", "Task", "TaskConfig", "TrainConfig", "run", "train"]
_LATER = {
    "Task": "mpipipe.train.task",
    "TrainConfig": "mpipipe.language.config",
    "run": "mpipipe.train.setup",
    "train": "mpipipe.language.task",
}


def __getattr__(name: str) -> object:
    """Import when it is first used what needs much, and what is for text: that lies above this room."""
    from importlib import import_module

    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
