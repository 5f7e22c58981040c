"""Ranks are killed at any moment, and the others go on without a restart, where MPI has ULFM (Open MPI 5)."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from mpi4py import MPI
from support import harness
from support.small_training import training_job

from mpipipe import checkpoint
from mpipipe.train import TrainConfig
from mpipipe.train.survival import Assignment, SurvivorReport

has_ulfm = pytest.mark.skipif(
    not MPI.Get_library_version().startswith("Open MPI v5"), reason="ULFM is in Open MPI 5 alone"
)
FT = ("--with-ft", "ulfm")
# each victim dies at its n-th event behind a step: an agreement, a poll, a step of the optimizer, before or after it
TRAINING = """
from mpipipe.job.consensus import Exchange
from mpipipe.comm.mailbox import Mailbox
from mpipipe.optim import AdamW
from mpipipe.train.progress import StepBarrier

mine = {step: number for victim, step, number in json.loads(words[0]) if victim == rank}
left = [None]

def say(what):
    os.write(2, f"@{time.time():.4f} {what}\\n".encode())

def event():
    if left[0] is not None:
        left[0] -= 1
        if left[0] < 0:
            say("killed")
            die()

def watched(function):
    def call(*arguments, **keys):
        event()
        found = function(*arguments, **keys)
        event()
        return found
    return call

for owner, name in ((Exchange, "result"), (Mailbox, "poll"), (AdamW, "step"), (Trainer, "validate")):
    setattr(owner, name, watched(getattr(owner, name)))
whole, written = Trainer.step, survival.write

def step(self, number):
    left[0] = mine.get(number, left[0])
    found = whole(self, number)
    if self.mesh.rank == 0:
        say(f"made {number + 1}")
    return found

if "--blind" in words:  # rank 0 does not see the end of an agreement behind which rank 3 dies
    agreed = StepBarrier._commit

    def commit(self, make):
        if self.made != 5:
            return agreed(self, make)
        self.pending = make
        self.group.agree("train: all ranks have the sums of gradients and their norm")
        if rank == 3:
            say("killed")
            die()
        while rank == 0:
            self.group.wait(runtime.mpi().COMM_SELF.Irecv(bytearray(8)))
        self.make()

    StepBarrier._commit = commit

Trainer.step, survival.write = step, lambda message: (say("named"), written(message))
options = {**dict(steps=10, eval_every=4, dropout=0.1, save_every=3, keep=1000, pipe=2), **json.loads(words[1])}
if "--task" in words:
    task = str(Path(__file__).with_name("fields.py"))
    del options["dropout"]
"""
STEPS, RANKS = 10, 4


@pytest.fixture
def train(launch, tmp_path, request):
    """train(name, ranks, kills, **options): a job in the folder `name`, with kills as (rank, step, event)."""
    which = ["--task"] if getattr(request, "param", "text") == "task" else []
    script = training_job(tmp_path, TRAINING)

    def start(name, ranks, kills=(), flags=FT, blind=False, **options):
        words = [str(tmp_path / name), json.dumps(kills), json.dumps(options), *["--blind"] * blind, *which]
        return launch(ranks, [*script, *words], timeout=60, options=flags)

    return start


def state(run):
    """Parameters and the state of the optimizer at the end, as bytes."""
    newest = checkpoint.newest(run)
    assert newest.name.endswith(f"{STEPS:08d}")
    return {path.name: path.read_bytes() for path in newest.glob("part-*")}


def times(job):
    """(seconds until the death was named, seconds until the step that was lost was made)."""
    marks = [(float(time), what) for time, what in re.findall(r"@([\d.]+) (.*)", job.stderr)]
    killed = next(time for time, what in marks if what == "killed")
    named = next(time for time, what in marks if what == "named")
    made = next(time for time, what in marks if time > named and what.startswith("made"))
    return named - killed, made - killed


def check_one_kill(train, folder, name, random):
    """Kill one rank at a random moment; all that is left is that of a run with the same sequence of meshes."""
    kill = [int(random.integers(RANKS)), int(random.integers(1, STEPS - 1)), int(random.integers(60))]
    job = train(name, RANKS, [kill], survive=True)
    assert job.returncode == 0, (kill, job.stderr)
    assert f"rank {kill[0]} on " in job.stderr, job.stderr
    behind = int(re.search(r"go on after step (\d+)", job.stderr)[1])
    assert kill[1] <= behind, kill  # no more than the step under way is lost
    source = next((folder / "whole" / "checkpoints").glob(f"step-*{behind:08d}"))
    again = train(f"{name}-planned", 2, flags=(), resume=str(source))
    assert again.returncode == 0, again.stderr
    assert state(folder / name) == state(folder / f"{name}-planned"), (kill, behind)
    steps = [int(step) for step in re.findall(r'"step": (\d+)', (folder / name / "metrics.jsonl").read_text())]
    assert steps == list(range(STEPS + 1))
    assert not (folder / name / "owner.json").exists()  # whoever had made it: the folder is the job's
    named, made = times(job)
    print(
        f"rank {kill[0]} killed in step {kill[1]}: named after {named:.2f} s, went on behind {behind} in {made:.2f} s"
    )


@pytest.mark.long
@has_ulfm
@pytest.mark.parametrize("train", ["text", "task"], indirect=True)
def test_kills_lose_a_step_each_and_nothing_else(train, tmp_path):
    count = 20 if harness.AT_LENGTH else 2
    whole = train("whole", RANKS, flags=(), save_every=1)
    assert whole.returncode == 0, whole.stderr
    random = np.random.default_rng(count)
    for number in range(count):
        check_one_kill(train, tmp_path, f"killed-{number}", random)


@has_ulfm
def test_a_rank_that_missed_the_end_of_an_agreement_makes_the_step_too(train, tmp_path):
    whole = train("whole", RANKS, flags=(), save_every=1)
    assert whole.returncode == 0, whole.stderr
    job = train("killed", RANKS, blind=True, survive=True)
    assert job.returncode == 0, job.stderr
    assert "go on after step 6" in job.stderr  # rank 1 has made it, and rank 0 has all that it needs for it
    again = train("planned", 2, flags=(), resume=str(tmp_path / "whole" / "checkpoints" / "step-00000006"))
    assert again.returncode == 0, again.stderr
    assert state(tmp_path / "killed") == state(tmp_path / "planned")


@has_ulfm
def test_where_nobody_has_a_stage_all_leave_to_be_requeued(train, tmp_path):
    job = train("lost", 2, [[1, 9, 7]], survive=True)  # six steps after a checkpoint that is written meanwhile
    assert job.returncode == 75, job.stderr
    assert job.stderr.count("the newest checkpoint is") == 1
    assert re.search("step-0000000[369]", job.stderr)


@has_ulfm
def test_without_survive_a_death_ends_the_job_with_its_name(train, tmp_path):
    job = train("ended", RANKS, [[2, 3, 5]])
    assert job.returncode not in (0, 75)
    assert "rank 2 on " in job.stderr


def test_survive_is_refused_where_ranks_cannot_outlive_each_other(train, tmp_path):
    job = train("refused", 2, flags=(), survive=True)
    assert job.returncode == 2
    assert job.stderr.count("cannot outlive a rank") == 1
    assert not (tmp_path / "refused").exists()


# -- places, without any job ------------------------------------------------------------------------------------------


def told(*ranks):
    """Of each rank (place, steps, can follow) or None."""
    return [None if each is None else SurvivorReport(*each, {"from": number}) for number, each in enumerate(ranks)]


def places(*ranks, pipe=2, **options):
    return Assignment.of(told(*ranks), pipe, TrainConfig(**{"batch": 8, **options}))


@pytest.mark.parametrize(
    ("ranks", "step", "order"),
    [
        ([(0, 5, False), (0, 5, False), (1, 5, False)], 5, (0, 2)),  # ranks keep their places, and the rest are spares
        ([(0, 5, False), (0, 5, False), (0, 5, False), (1, 5, False)], 5, (0, 1, 3, 2)),  # a spare takes another place
        ([(0, 6, False), (1, 5, True), (0, 5, True)], 6, (0, 1)),  # a step that one has made is made by those that can
        ([(0, 5, True), (1, 5, True)], 5, (0, 1)),  # one that no rank has made is made again
    ],
)
def test_the_largest_mesh_is_found_in_which_every_stage_has_its_state(ranks, step, order):
    found = places(*ranks)
    assert (found.step, found.order, found.problem) == (step, order, "")
    assert found.facts["from"] == next(number for number, rank in enumerate(ranks) if rank[1] == step)


def test_the_batch_must_divide_among_the_replicas():
    ranks = [(place, 5, False) for place in (0, 0, 0, 1, 1, 1)]
    assert len(places(*ranks, batch=8).order) == 4
    assert len(places(*ranks, batch=9).order) == 6


def test_where_no_mesh_is_left_the_reason_is_said():
    assert "place 1 of 2" in places((0, 6, False), (1, 4, False), (1, 3, False)).problem  # an old state is no state
    assert "too few" in places((0, 5, False), (1, 5, False), None, pipe=2, seq=2).problem
    assert "no step" in places(None, None).problem
