"""A training that has to leave saves at once, ends with 75, and goes on as if it had not; Ctrl-C says how far it is."""

import re
import signal
import sys
import time

import pytest
from mpi4py import MPI
from support.launch import ROOT, Job, mpiexec
from train.test_kills import outcome

from mpipipe import checkpoint

pytestmark = pytest.mark.jobs
TRAIN = """-m mpipipe train --steps 60 --log-every 5 --dim 16 --layers 2 --heads 2 --hidden 32 --seq-len 16 --batch 8
--microbatches 2 --dropout 0.1 --sample-bytes 0 --eval-batches 1 --eval-every 20 --device cpu --data""".split()
TRAIN += [str(ROOT / "README.md")]


def interrupted(folder, options, send, step=5):
    """A job that ends after `send(job)`, once it has shown this step."""
    job = Job([mpiexec(), "-n", "2", sys.executable, *TRAIN, *options], folder)
    try:
        stop = time.monotonic() + 60
        while not re.search(rf"^step +{step}/", job.stdout, re.MULTILINE):
            assert time.monotonic() < stop and job.returncode is None, job.stderr
            time.sleep(0.005)
        send(job)
        assert job.wait(30)
    finally:
        job.end()
    return job


def rank_of(job, rank):
    """The process of this rank."""
    for pid, env in job.processes().items():
        if str(rank) == env.get("PMI_RANK", env.get("OMPI_COMM_WORLD_RANK")):
            return pid
    raise AssertionError(job.stderr)


@pytest.mark.long
def test_a_signal_to_one_rank_saves_and_the_end_is_bit_by_bit_that_of_a_training_without(tmp_path, launch):
    """No checkpoint is configured, and each of two replicas writes a share."""
    whole = launch(2, [*TRAIN, "--pipe", "1", "--save-every", "60", "--out", str(tmp_path / "whole")])
    assert whole.returncode == 0, whole.stderr
    options = ["--pipe", "1", "--out", "parts"]
    job = interrupted(tmp_path, options, lambda job: job.send(signal.SIGUSR2, rank_of(job, 1)))
    assert job.returncode == 75, job.stderr
    left = re.search(r"^mpipipe: SIGUSR2 on rank 1: left after step (\d+) of 60\n"
                     r"mpipipe: --resume auto --out \S+/parts goes on from step-000000(\d+)$",
                     job.stdout, re.MULTILINE)  # fmt: skip
    assert left and left[1].zfill(2) == left[2] and 5 <= int(left[1]) < 60
    assert checkpoint.newest(tmp_path / "parts").name == f"step-000000{left[2]}"
    assert not (tmp_path / "parts" / "weights").exists() and "Traceback" not in job.stderr
    again = launch(
        2, [*TRAIN, "--pipe", "1", "--save-every", "60", "--resume", "auto", "--out", str(tmp_path / "parts")]
    )
    assert again.returncode == 0 and f"goes on after step {left[1]}" in again.stdout, again.stderr
    assert outcome(tmp_path / "parts") == outcome(tmp_path / "whole")


@pytest.mark.long
def test_a_training_whose_time_is_over_makes_a_step_and_leaves(launch, tmp_path):
    again = [*TRAIN, "--time-limit", "0.5", "--resume", "auto", "--out", str(tmp_path / "run")]
    for step in (1, 2):
        job = launch(2, again)
        assert job.returncode == 75, job.stderr
        assert f"mpipipe: the time limit, 0 s ahead: left after step {step} of 60\nmpipipe: --resume auto" in job.stdout


def test_without_signals_a_training_dies_of_them(launch, tmp_path):
    """And time has no end, even where SLURM names one."""
    script = f"""
import os, signal, sys, threading
sys.argv = {["mpipipe", *TRAIN[2:], "--preempt-signals", "none", "--time-limit", "0", "--out", str(tmp_path / "run")]!r}
from mpipipe.train.trainer import Trainer
step = Trainer.step
def killed(self, number):
    if number == 4: os.kill(os.getpid(), signal.SIGUSR2)
    return step(self, number)
Trainer.step = killed
from mpipipe.cli import main
main()
"""
    job = launch(1, script, env={"SLURM_JOB_END_TIME": "1"})
    assert job.returncode not in (0, 75)
    assert "step  1/60" in job.stdout and checkpoint.newest(tmp_path / "run") is None


@pytest.mark.long
def test_ctrl_c_leaves_at_most_six_lines_below_the_last_loss(tmp_path):
    options = ["--steps", "100000", "--save-every", "4", "--out", "run"]
    job = interrupted(tmp_path, options, lambda job: job.send(signal.SIGINT, "group"), step=20)
    assert job.returncode not in (0, None)
    below = job.stdout.splitlines()[::-1]
    below = below[: next(number for number, line in enumerate(below) if line.startswith("step "))]
    said = [*below, *job.stderr.splitlines()]
    assert len(said) <= 6 and "Traceback" not in job.stderr
    word = "SIGTERM" if MPI.get_vendor()[0] == "Open MPI" else "KeyboardInterrupt:"  # what the launcher sends
    place = rf"{word} after step \d+ of 100000\n(mpipipe:)? +--resume auto --out \S+/run goes on from step-0"
    assert re.search(place, job.stderr)


# -- A signal at every moment of a training: what comes out is what was done -------------------------------------------


AT = """
import os, signal, sys
sys.argv = ["mpipipe", *{words!r}]
rank = os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
times = [{times}]
def send(*_):
    if rank == {rank!r} and times[0]:
        times[0] -= 1
        os.kill(os.getpid(), signal.{name})
def before(owner, function):
    original = getattr(owner, function)
    setattr(owner, function, lambda *a, **k: (send(), original(*a, **k))[1])
{place}
from mpipipe.cli import main
main()
"""
MPI_IS_MADE = "from mpipipe.job import runtime; before(runtime, 'mpi')"
PLACES = {
    "the command line is read": ("import mpipipe.cli.command_line as here; before(here, 'run')", 75),
    "the data are found": ("from mpipipe.language import task; before(task, 'find_data')", 75),
    "the last step": (
        "from mpipipe.train.trainer import Trainer\n"
        "step = Trainer.step\n"
        "Trainer.step = lambda self, number: (send() if number == 2 else None, step(self, number))[1]",
        0,
    ),
    "the model is left": ("from mpipipe.language import task; before(task.TextTask, 'save')", 0),
    "the interpreter ends": ("import atexit; atexit.register(send)", 0),
}


@pytest.mark.long
@pytest.mark.parametrize("place", PLACES)
def test_a_signal_just_before(launch, tmp_path, place):
    (text, code), number = PLACES[place], list(PLACES).index(place)
    words = [*TRAIN[2:], "--steps", "3", "--out", str(tmp_path / "run")]
    rank, name = str(number % 2), ("SIGTERM", "SIGUSR2")[number // 2 % 2]
    job = launch(2, AT.format(words=words, rank=rank, name=name, place=text, times=1))
    assert job.returncode == code, job.stderr
    if code == 0:
        assert "mpipipe: ok steps=3 " in job.stdout and (tmp_path / "run/weights/step-00000003/manifest.json").exists()
    else:
        said = f"mpipipe: {name} on rank {rank}: left before step 1 of 3; there is nothing to save\n"
        assert said in job.stdout and checkpoint.newest(tmp_path / "run") is None


@pytest.mark.long
@pytest.mark.parametrize("given", ["option", "file"])
def test_a_signal_that_is_not_among_those_configured_ends_the_job(launch, tmp_path, given):
    """Also where it comes before the file with the configuration is read."""
    (tmp_path / "job.toml").write_text('preempt_signals = "USR1"\n')
    more = ["--preempt-signals", "USR1"] if given == "option" else ["--config", str(tmp_path / "job.toml")]
    words = [*TRAIN[2:], *more, "--out", str(tmp_path / "run")]
    for name, dies in (("SIGUSR2", True), ("SIGUSR1", given == "file")):  # of those, only USR2 and TERM are held early
        job = launch(2, AT.format(words=words, rank="1", name=name, place=MPI_IS_MADE, times=1))
        assert (job.returncode not in (0, 75)) == dies, (name, job.stderr)
        assert ("left before step 1" in job.stdout) != dies


@pytest.mark.long
def test_a_second_signal_ends_a_training_that_cannot_be_set_up(launch, tmp_path):
    place = "import time\nfrom mpipipe.job import runtime\n"
    place += "runtime.mpi = lambda: (send(), time.sleep(2.5), send(), time.sleep(30))"
    words = [*TRAIN[2:], "--out", str(tmp_path / "run")]
    job = launch(0, AT.format(words=words, rank="0", name="SIGTERM", place=place, times=2))
    assert job.returncode == 143 and job.stderr == "mpipipe: SIGTERM: a second signal ends the job at once\n"
