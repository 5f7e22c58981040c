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
