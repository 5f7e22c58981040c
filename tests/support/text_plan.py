"""The plan of a text training, without data and ranks."""

from mpipipe.job import inprocess
from mpipipe.language.models import GPT
from mpipipe.language.task import TextTask
from mpipipe.train.task_calls import outline
from mpipipe.train.training_plan import plan_layers, problem_of


def text_plan(config, pipe=1, replicas=1, architecture=GPT, **of_task):
    """Plan a training of text on `replicas` pipelines of `pipe` ranks; return (task, plan)."""
    task = TextTask(config, architecture, **of_task)
    inprocess.run(1, lambda comm: outline(task, task.shard(comm, config.seq)))
    return task, plan_layers(config, task, problem_of(config, task, pipe, replicas))
