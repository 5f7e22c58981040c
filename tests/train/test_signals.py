"""A signal that asks to leave, at every moment of a training: what comes out is what was done."""

import pytest
from train.test_leaving import TRAIN

from mpipipe import checkpoint

pytestmark = pytest.mark.jobs
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
