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
    from mpipipe.language import TrainConfig, train
    from mpipipe.train.config import TaskConfig as TaskConfig
    from mpipipe.train.config import read_keys as read_keys
    from mpipipe.train.config import toml_line as toml_line
    from mpipipe.train.options import INSTEAD as INSTEAD
    from mpipipe.train.options import PLANNED as PLANNED
    from mpipipe.train.output_folder import shared_path as shared_path
    from mpipipe.train.planned import MemoryEstimate as MemoryEstimate
    from mpipipe.train.planned import estimate_memory as estimate_memory
    from mpipipe.train.planned import measured_ranks as measured_ranks
    from mpipipe.train.planned import mesh_of as mesh_of
    from mpipipe.train.planned import plans_on_paper as plans_on_paper
    from mpipipe.train.planned import predicted as predicted
    from mpipipe.train.planned import problem_of as problem_of
    from mpipipe.train.provenance import absolute as absolute
    from mpipipe.train.screen import SafeStream as SafeStream
    from mpipipe.train.screen import folded as folded
    from mpipipe.train.screen import warn as warn
    from mpipipe.train.setup import check_same_config as check_same_config
    from mpipipe.train.setup import run as run
    from mpipipe.train.sinks import MOST_BYTES as MOST_BYTES
    from mpipipe.train.sinks import NAME as NAME
    from mpipipe.train.task import Pair as Pair
    from mpipipe.train.task import Task as Task
    from mpipipe.train.task import too_few_pieces as too_few_pieces
    from mpipipe.train.training_plan import check_actions as check_actions
    from mpipipe.train.training_plan import pipe_of as pipe_of

__all__ = ["Record", "TrainConfig", "train"]
_LATER = {
    "pipe_of": "mpipipe.train.training_plan",
    "check_actions": "mpipipe.train.training_plan",
    "too_few_pieces": "mpipipe.train.task",
    "Pair": "mpipipe.train.task",
    "NAME": "mpipipe.train.sinks",
    "MOST_BYTES": "mpipipe.train.sinks",
    "check_same_config": "mpipipe.train.setup",
    "warn": "mpipipe.train.screen",
    "folded": "mpipipe.train.screen",
    "SafeStream": "mpipipe.train.screen",
    "absolute": "mpipipe.train.provenance",
    "problem_of": "mpipipe.train.planned",
    "predicted": "mpipipe.train.planned",
    "plans_on_paper": "mpipipe.train.planned",
    "mesh_of": "mpipipe.train.planned",
    "measured_ranks": "mpipipe.train.planned",
    "estimate_memory": "mpipipe.train.planned",
    "MemoryEstimate": "mpipipe.train.planned",
    "shared_path": "mpipipe.train.output_folder",
    "PLANNED": "mpipipe.train.options",
    "INSTEAD": "mpipipe.train.options",
    "toml_line": "mpipipe.train.config",
    "read_keys": "mpipipe.train.config",
    "Task": "mpipipe.train.task",
    "TaskConfig": "mpipipe.train.config",
    "TrainConfig": "mpipipe.language",
    "run": "mpipipe.train.setup",
    "train": "mpipipe.language",
}


def __getattr__(name: str) -> object:
    """Import when it is first used what needs much, and what is for text: that lies above this room."""
    from importlib import import_module

    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
