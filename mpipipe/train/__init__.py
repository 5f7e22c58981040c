"""Training a model: configuration, the loop, and what it reports.

The room trains any model, and knows nothing of tokens:

    task            what is trained: layers, a loss, batches (language/task.py: text)
    shard           a rank's share of each sample
    task_file       a task from a file
    task_calls      how a task is called: errors, reading of batches, the loss and its metrics
    rehearsal       one batch before the first step, or for `--check`
    config          what a user sets; config_fields: what its fields mean
    setup           from a task and a configuration to a trainer that runs
    trainer         the state of a training, and the loop
    report          what people and programs see; screen: where it is written
    output_folder   the run folder, and where a training in it begins
    training_plan   layers of each rank; plans and memory, with mpipipe.planning
"""

from importlib import import_module

from mpipipe.train.config import PLANNED, TaskConfig, read_keys, toml_line
from mpipipe.train.config_fields import document, key_of, kinds_of, option, option_of
from mpipipe.train.output_folder import absolute, shared_path
from mpipipe.train.rehearsal import check_task
from mpipipe.train.report import Record
from mpipipe.train.screen import SafeStream, folded
from mpipipe.train.setup import check_same_config, export, load, run
from mpipipe.train.shard import Shard
from mpipipe.train.task import Pair, Task
from mpipipe.train.task_file import TaskFileConfig, load_task
from mpipipe.train.training_plan import MemoryEstimate, estimate_task, measured_ranks, pipe_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from mpipipe.language import TrainConfig, train

__all__ = ["Shard", "Task", "TaskConfig", "TrainConfig", "load", "run", "train"]
__dir__ = __all__.copy

if not TYPE_CHECKING:  # a checker of types would take each wrong name for an object

    def __getattr__(name: str) -> object:
        if name in ("TrainConfig", "train"):
            return getattr(import_module("mpipipe.language"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
