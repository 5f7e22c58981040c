"""The command line as users start it: exit codes, one report, and what a program can read off the output."""

import dataclasses
import re

import pytest
from support.command_line import invoke
from support.launch import ROOT

from mpipipe import __version__
from mpipipe.cli.flags import parameters_of
from mpipipe.cli.train import train
from mpipipe.train import TrainConfig

WITHOUT_MPI = {"MPI4PY_LIBMPI": "/nonexistent/libmpi.so"}
WITHOUT_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def test_every_field_of_the_configuration_is_a_flag():
    fields = [entry.name for entry in dataclasses.fields(TrainConfig)]
    first, of_tasks = ["config", "task", "dry_run", "ranks", "check"], ["init", "set", "changed_task"]
    first += ["nics_per_node", "nic", "flops"]
    assert sorted(entry.name for entry in parameters_of(train)) == sorted([*first, *fields, *of_tasks])


def test_info_reports_once(mpipipe):
    job = mpipipe(2, "info", env=WITHOUT_GPU)
    assert job.returncode == 0, job.stderr
    facts = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in job.stdout.splitlines())
    assert facts["ranks"] == "2"
    assert facts["devices"] == "cpu" and facts["GPU-aware MPI"] == "no GPU"
    assert {"MPI", "mpi4py", "python", "numpy", "BLAS", "cores", "launcher", "thread level"} <= set(facts)
    assert {"CuPy", "GPU toolkit", "attention by"} <= set(facts)


def test_the_version_is_that_of_the_package(capsys):
    assert invoke("--version").code == 0 and capsys.readouterr().out == f"mpipipe {__version__}\n"


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        (["info"], 0, ("cannot be loaded", "pip install '.[mpich]'")),
        (["train"], 1, ("cannot be loaded", "pip install '.[mpich]'")),
        (["train", "--help"], 0, ("usage: ", "--weight-decay")),
    ],
)
def test_without_mpi_a_command_gives_help_or_says_how_to_install_it(mpipipe, command, code, words):
    job = mpipipe(0, *command, env=WITHOUT_MPI)
    text = job.stdout + job.stderr
    assert job.returncode == code and "Traceback" not in text
    assert all(part in text for part in words)


def test_info_tells_processes_that_do_not_see_each_other(mpipipe):
    job = mpipipe(0, "info", env={"SLURM_STEP_NUM_TASKS": "4"})
    assert job.returncode == 0, job.stderr
    assert "alone in COMM_WORLD" in job.stdout


SCRIPT = """
import sys
import helper
from mpipipe.job import runtime
comm = runtime.world()
comm.Barrier()
if comm.rank == comm.size - 1:
    print(__name__, sys.argv[1:], helper.WORD, __file__ == sys.argv[0], sys.modules["__main__"].SCRIPT_IS_MAIN)
"""


@pytest.mark.parametrize("by", ["path", "module"])
def test_run_gives_a_script_the_surroundings_that_python_gives_it(mpipipe, tmp_path, by):
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "helper.py").write_text("WORD = 'found'")
    (folder / "script.py").write_text("SCRIPT_IS_MAIN = True" + SCRIPT)
    target = [str(folder / "script.py")] if by == "path" else ["-m", "script"]
    job = mpipipe(2, "run", *target, "--steps", "-m", "3", env={"PYTHONPATH": f"{ROOT}:{folder}"})
    assert job.returncode == 0, job.stderr
    assert job.stdout == "__main__ ['--steps', '-m', '3'] found True True\n"


def test_run_ends_the_job_when_the_script_is_missing(mpipipe):
    for words in (["absent.py"], ["-m", "absent.part"]):
        job = mpipipe(2, "run", *words)
        assert job.returncode == 2
        assert job.stderr.splitlines()[0] == f"mpipipe: cannot run {words[-1]}: it is not there"
        assert "Traceback" not in job.stderr
