"""A small training on text that is easy to learn, and what is compared of two of them."""

import json
from pathlib import Path

import numpy as np
import pytest

from mpipipe.language import TextTask
from mpipipe.language.models import GPT
from mpipipe.train import TrainConfig, estimate_task

MODEL = GPT(dim=16, layers=2, heads=2, hidden=32, seq_len=16)  # what it trains, with batches of 8
SMALL = dict(
    dim=16, layers=2, heads=2, hidden=32, seq_len=16, batch=8, microbatches=2, warmup=2, lr=1e-2, log_every=1,
    eval_batches=1, sample_bytes=0, device="cpu",
)  # fmt: skip
CLOCKED = ("tokens_per_second", "samples_per_second", "bubble", "predicted", "time", "seconds")


def config_in(folder, comm=None, **always):
    """config(name, **keys): a small training in the folder `name`; collective where the ranks of `comm` share it."""
    if comm is None or comm.rank == 0:
        words = np.random.default_rng(0).choice(["one ", "two ", "three ", "four\n"], 1500)
        (folder / "text.txt").write_text("".join(words))
    if comm is not None:
        comm.Barrier()

    def make(name="run", **keys):
        small = {**SMALL, "data": [str(folder / "text.txt")], "out": str(folder / name), **always}
        return TrainConfig(**{**small, **keys})

    return make


def config_fixture(in_pipe=False, **always):
    """A fixture: config_in for a small training of all ranks of a test, in one pipeline if so asked."""

    @pytest.fixture
    def config(comm, mpi_tmp_path):
        if comm is None:
            return None
        return config_in(mpi_tmp_path, comm, **always, **({"pipe": comm.size} if in_pipe else {}))

    return config


def estimate(config, architecture, ranks):
    """What a training of text would be on so many ranks."""

    def make(comm):
        task = TextTask.of(config, architecture, comm)
        return task.config, task

    return estimate_task(make, ranks)


def metrics(run):
    """What is in metrics.jsonl of a configuration or a folder, a dict for each line."""
    path = Path(getattr(run, "out", run), "metrics.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def records(config):
    """The same without what was measured by the clock."""
    return [{key: value for key, value in line.items() if key not in CLOCKED} for line in metrics(config)]


JOB = """
import os, signal, sys, threading
from pathlib import Path
from mpipipe.job import runtime
from mpipipe.job.exit import run_or_abort
from mpipipe.language.models import GPT
from mpipipe.train import TaskFileConfig, TrainConfig, load_task, run, train
from mpipipe.train.trainer import Trainer

comm, (text, out, *words) = runtime.world(), sys.argv[1:]
rank, options, task = comm.rank, {}, ""  # the file of a task; "" for text

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def before(name, what):
    original = getattr(Trainer, name)
    def call(self, *arguments):
        what(*arguments)
        return original(self, *arguments)
    setattr(Trainer, name, call)
BODY
if task:
    small = dict(batch=8, microbatches=2, log_every=1, eval_batches=1, device="cpu")
    config = TaskFileConfig(task=task, out=out, **small, **options)
    sys.exit(run_or_abort(lambda: run(load_task(task, (), comm), config, comm)))
config = TrainConfig(**{**dict(
    data=[text], out=out, dim=16, layers=2, heads=2, hidden=32, seq_len=16, batch=8, microbatches=2, log_every=1,
    eval_batches=1, sample_bytes=0, device="cpu",
), **options})
sys.exit(run_or_abort(lambda: train(config, GPT)))
"""


TASK = """
import numpy as np
from mpipipe import nn, train

class Fields(train.Task):
    def layers(self, shard):
        return [nn.Linear(4, 16), nn.Gelu(), nn.Residual(nn.Linear(16, 16)), lambda: nn.Linear(16, 4)]

    def loss(self, output, target):
        return (*nn.mean_squared_error(output, target), target.size)

    def batch(self, step, rows, shard):
        fields = np.random.default_rng(step).normal(size=(8, 4))[rows]
        return fields, np.roll(fields, 1, axis=1)

    def validation(self, index, rows, shard):
        return self.batch(10_000 + index, rows, shard)

    def show(self, output, target, shard):
        return f"--- sample\\n{output[0]}\\n---"
"""


def training_job(folder, body):
    """[script, text] of a job that trains; `body` sees its ranks and its `words`, and may set `options`."""
    script, text = folder / "script.py", folder / "text.txt"
    script.write_text(JOB.replace("BODY", body))
    (folder / "fields.py").write_text(TASK)
    text.write_text("one two three four\n" * 200)
    return [str(script), str(text)]
