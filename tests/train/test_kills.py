"""A rank is killed again and again, at any moment, and the training goes on each time as if it had not been."""

from types import SimpleNamespace

import numpy as np
import pytest
from support import harness
from support.small_training import TASK, records

from mpipipe import checkpoint

# a training of which one rank is killed: at its n-th call of something that changes a file or makes a step, or so many
# milliseconds after its first step has begun, wherever it is then
TRAINING = """
import os, signal, sys, threading
from pathlib import Path
from mpipipe.job import runtime
from mpipipe.job.exit import run_or_abort
from mpipipe.language.models import GPT
from mpipipe.train import TaskFileConfig, TrainConfig, load_task, run, train
from mpipipe.train.trainer import Trainer

comm = runtime.world()
text, out, victim, how, moment, pipe, steps, sharded, task = sys.argv[1:]
left = [int(moment) if how == "call" else 0]

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def watched(function):
    def call(*arguments, **keys):
        left[0] -= 1
        if comm.rank == int(victim) and left[0] == 0:
            die()
        return function(*arguments, **keys)
    return call

for name in ("replace", "fsync", "write", "rename", "mkdir", "unlink"):
    setattr(os, name, watched(getattr(os, name)))
Path.unlink, Path.mkdir = watched(Path.unlink), watched(Path.mkdir)
timer = threading.Timer(int(moment) / 1000, die)
timer.daemon = True

def step(self, number, original=watched(Trainer.step)):
    if how == "time" and comm.rank == int(victim) and timer.ident is None:
        timer.start()
    return original(self, number)

Trainer.step = step
keys = dict(out=out, batch=8, microbatches=2, log_every=1, eval_batches=1, device="cpu", steps=int(steps), eval_every=4,
            save_every=1, keep=2, resume="auto", pipe=int(pipe), shard_optimizer=sharded == "True")
if task:  # the file of a task; "" for text
    config = TaskFileConfig(task=task, **keys)
    sys.exit(run_or_abort(lambda: run(load_task(task, (), comm), config, comm)))
sizes = dict(dim=16, layers=2, heads=2, hidden=32, seq_len=16, sample_bytes=8, dropout=0.1)
sys.exit(run_or_abort(lambda: train(TrainConfig(data=[text], **sizes, **keys), GPT)))
"""
CALLS, MILLISECONDS = 40, 60  # within which a rank is killed
STEPS = 12  # for each kill: more than a life makes that is so short


@pytest.fixture
def train(launch, tmp_path, request):
    """train(name, ranks, pipe, steps, victim, how, moment): a job in the folder `name`, of text or of a task.

    A job whose optimizer is sharded, but for the whole one, is to end as that does.
    """
    script, text, task = tmp_path / "script.py", tmp_path / "text.txt", tmp_path / "fields.py"
    script.write_text(TRAINING)
    text.write_text("one two three four\n" * 200)
    task.write_text(TASK)

    def start(name, ranks, pipe, steps, victim=0, how="call", moment=10**9):
        sharded = request.param == "sharded" and name != "whole"
        file = task if request.param == "task" else ""
        words = script, text, tmp_path / name, victim, how, moment, pipe, steps, sharded, file
        return launch(ranks, list(map(str, words)), timeout=60 + steps)

    return start


def outcome(run):
    """All that a training leaves, but for what was measured by the clock; and its sample."""
    lines = records(SimpleNamespace(out=run))
    newest = checkpoint.newest(run)
    weights = [path for path in (run / "weights").rglob("*") if path.is_file() and path.name != "manifest.json"]
    files = {str(path.relative_to(run)): path.read_bytes() for path in [*newest.glob("part-*"), *weights]}
    return lines, newest.name, files


def sample(job):
    return job.stdout[job.stdout.index("--- sample") : job.stdout.rindex("---")]


@pytest.mark.long
@pytest.mark.parametrize(
    ("train", "ranks", "pipe"),
    [("sharded", 2, 1), ("text", 4, 2) if harness.AT_LENGTH else ("task", 2, 2)],
    indirect=["train"],
)
def test_kills_change_nothing(train, tmp_path, ranks, pipe):
    """Kills in turn at a call, which may be one of the writer's, and at a time."""
    folder, kills = tmp_path, 50 if harness.AT_LENGTH else 3
    steps = STEPS * kills
    right = train("whole", ranks, pipe, steps)
    assert right.returncode == 0, right.stderr
    random, killed = np.random.default_rng([kills, ranks, pipe]), 0
    for kill in range(kills):
        how, most = ("time", MILLISECONDS) if kill % 2 else ("call", CALLS)
        job = train("killed", ranks, pipe, steps, random.integers(ranks), how, random.integers(1, most))
        killed += job.returncode != 0
        newest = checkpoint.newest(folder / "killed")
        if newest is not None:
            checkpoint.read(newest)  # a manifest that is there is whole
    job = train("killed", ranks, pipe, steps)
    assert job.returncode == 0, job.stderr
    assert killed == kills
    assert outcome(folder / "killed") == outcome(folder / "whole")
    assert sample(job) == sample(right)
    left = [path.name for path in (folder / "killed").rglob("*") if "partial" in path.name or "marker" in path.name]
    assert left == []
