"""Training a model: configuration, the loop, and what it reports.

The room trains any model, and knows nothing of tokens:

    task.py          what is trained: layers, a loss, batches (language/task.py: text)
    options, config  what a user sets; one description of an option in mpipipe/options.py
    setup, trainer   from a task and a configuration to a trainer that runs; the loop
    progress, resume, survival       the state of a training; checkpoints; going on when ranks die
    report, screen, sinks, tracing   what people and programs see
    output_folder, provenance        the run folder
    training_plan, planned           layers of each rank; plans and memory, with mpipipe.planning
"""

from mpipipe.train.report import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from mpipipe.language.config import TrainConfig
    from mpipipe.language.task import train
    from mpipipe.train.config import TaskConfig as TaskConfig
    from mpipipe.train.setup import run as run
    from mpipipe.train.task import Task as Task

__all__ = ["Record", "TrainConfig", "train"]
_LATER = {
    "Task": "mpipipe.train.task",
    "TaskConfig": "mpipipe.train.config",
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
