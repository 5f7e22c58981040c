"""Training a model: configuration, the loop, and what it reports.

The room trains any model, and knows nothing of tokens:

    task.py          what is trained: layers, a loss, batches (language/task.py: text)
    options, config  what a user sets; one description of an option in mpipipe/options.py
    setup, trainer   from a task and a configuration to a trainer that runs; the loop
    progress, resume, survival       the state of a training; checkpoints; going on when ranks die
    report, screen, sinks, tracing   what people and programs see
    output_folder, provenance        the run folder
    training_plan                    layers of each rank; plans and memory, with mpipipe.planning
"""

from importlib import import_module

from mpipipe.train.config import TaskConfig, read_keys, toml_line
from mpipipe.train.options import INSTEAD, PLANNED
from mpipipe.train.output_folder import shared_path
from mpipipe.train.provenance import absolute
from mpipipe.train.report import Record
from mpipipe.train.screen import SafeStream, folded, warn
from mpipipe.train.setup import check_same_config, run
from mpipipe.train.sinks import MOST_BYTES, NAME
from mpipipe.train.task import Pair, Task, too_few_pieces
from mpipipe.train.training_plan import (
    MemoryEstimate,
    check_actions,
    estimate_memory,
    measured_ranks,
    mesh_of,
    pipe_of,
    plans_on_paper,
    predicted,
    problem_of,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from mpipipe.language import TrainConfig, train

__all__ = ["Record", "TrainConfig", "train"]


def __getattr__(name: str) -> object:
    """Import what is for text when it is first used: that lies above this room."""
    if name in ("TrainConfig", "train"):
        return getattr(import_module("mpipipe.language"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
