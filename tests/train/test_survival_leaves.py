"""Deaths of ranks beside all else that happens to a training: signals, checkpoints in flight, the very beginning."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest
from support.small_training import training_job
from train.test_survival import FT, has_ulfm

from mpipipe import checkpoint
from mpipipe.errors import LostRankError
from mpipipe.job.preemption import Preemption
from mpipipe.train.progress import StepBarrier
from mpipipe.train.survival import RetainedState

STEPS = 6


@pytest.fixture
def train(launch, tmp_path):
    """train(body, **options): a job of two replicas on one rank each, which the body prepares."""

    def start(body, **options):
        options = {"steps": STEPS, "eval_every": 4, "pipe": 1, "survive": True, **options}
        job = training_job(tmp_path, f"{body}\noptions = {options!r}")
        return launch(2, [*job, str(tmp_path / "out")], timeout=60, options=FT)

    return start


def steps_of(folder):
    return [json.loads(line)["step"] for line in (folder / "out/metrics.jsonl").read_text().splitlines()]


@has_ulfm
@pytest.mark.parametrize("where", ["validate", "step"])
def test_a_death_before_the_first_step_leaves_one_record_of_each_step(train, tmp_path, where):
    job = train(f"if rank == 1: before({where!r}, lambda *_: die())")
    assert job.returncode == 0 and "go on after step 0" in job.stderr, job.stderr
    assert steps_of(tmp_path) == list(range(STEPS + 1))
    assert all("validation" in line for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()[:1])


@has_ulfm
def test_a_signal_is_not_forgotten_where_a_rank_dies_before_the_others_leave(train, tmp_path):
    body = """
sent = []
def trouble(number):
    if number == 4 and rank == 0 and not sent:
        sent.append(os.kill(os.getpid(), signal.SIGUSR2))
    if number == 4 and rank == 1:
        time.sleep(1.5)  # so long that rank 0 has told of it, and looked for ranks that have ended
        die()
before("step", trouble)
"""
    job = train(body)
    assert job.returncode == 75, job.stderr
    assert re.search(
        r"SIGUSR2 on rank 0: left after step 5 of 6\nmpipipe: --resume auto .* goes on from step-00000005", job.stdout
    )
    assert steps_of(tmp_path) == list(range(STEPS))


@has_ulfm
def test_a_rank_that_waits_for_a_place_leaves_with_the_others(train, tmp_path):
    body = """
make = survival.ElasticRun.__init__
def one_takes_part(self, config, comm, pipe, out):
    make(self, config, comm, pipe, out)
    self.takes_part, self.active = rank == 0, comm.Split(rank)
survival.ElasticRun.__init__ = one_takes_part
def trouble(number):
    if number == 4:
        for host, pid in current_rank().lifeline.places:
            os.kill(pid, signal.SIGUSR2)
before("step", trouble)
"""
    job = train(body)
    assert job.returncode == 75, job.stderr
    assert "left after step 5 of 6" in job.stdout
    assert "job ended" not in job.stderr and "died" not in job.stderr, job.stderr


@has_ulfm
def test_a_checkpoint_that_was_in_flight_when_a_rank_died_is_saved_anew(train, tmp_path):
    """Also behind the last step, where nothing else would save it."""
    body = """
if rank == 1:
    tensor_files.write_tensors = lambda *_: time.sleep(100)
    before("_end", lambda *_: die())
"""
    job = train(body, save_every=STEPS)
    assert job.returncode == 0 and "go on after step 6" in job.stderr, job.stderr
    assert checkpoint.newest(tmp_path / "out").name == "step-00000006"
    assert steps_of(tmp_path) == list(range(STEPS + 1))


# -- without any job --------------------------------------------------------------------------------------------------


def committed(*functions):
    """A barrier behind step 5, and a list of the steps that its optimizer makes."""
    made = []
    optimizer = SimpleNamespace(stages=(), steps=5, before_write=list(functions), step=lambda **_: made.append(1))
    progress = SimpleNamespace(optimizer=optimizer, scaler=SimpleNamespace(), scalars=(1.0, 0, 0, 5), step=5)
    return StepBarrier(progress, SimpleNamespace(), together=False), made


def test_a_step_can_still_be_made_where_a_rank_dies_while_this_one_waits_for_its_checkpoint():
    dead = [LostRankError("rank 1 died")]

    def wait_until_read():
        if dead:
            raise dead.pop()

    barrier, made = committed(wait_until_read)
    with pytest.raises(LostRankError):
        barrier.step(lr=1.0)
    retained = RetainedState(0, barrier, {}, [], barrier.optimizer)
    assert retained.report().can_follow and retained.step == 5 and made == []
    retained.catch_up(6)
    assert retained.step == 6 and made == [1]


def test_a_step_that_nobody_has_made_is_forgotten_by_ranks_that_wait_for_a_place():
    """The others make it again with fewer replicas: it would be another one here."""
    barrier, made = committed()
    barrier.pending = lambda: made.append(1)
    retained = RetainedState(0, barrier, {}, [], barrier.optimizer)
    retained.catch_up(5)
    assert not retained.report().can_follow and made == []


def test_where_mpi_tells_of_deaths_a_dead_neighbour_does_not_end_a_job_that_leaves():
    def asked(lifeline):
        watchdog = SimpleNamespace(ended_neighbours=lambda: {1})
        process = SimpleNamespace(watchdog=watchdog, lifeline=lifeline)
        return Preemption._hopeless(SimpleNamespace(group=SimpleNamespace(context=process), reason="", _closed=False))

    assert asked(None) and not asked("a lifeline")
