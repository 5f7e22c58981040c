"""The job scripts: they parse, name no site, hand on options and exit status. Stand-ins run in place of programs."""

import json
import os
import re
import runpy
import shutil
import subprocess
from fnmatch import fnmatch

import pytest
from support.launch import ROOT, job_environment

from mpipipe.language.config import TrainConfig
from mpipipe.train.config import tomllib

BATCH = sorted(ROOT.glob("jobs/*.sbatch"))
SCRIPTS = sorted([*ROOT.glob("jobs/*.sh"), *BATCH, ROOT / "jobs" / "train.pbs", ROOT / ".ci" / "run"])
SITE_OPTIONS = r"account|partition|qos|constraint|mail-user|mail-type|nodelist|exclude|reservation|clusters|gres"


def executable(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def run(command, cwd, **variables):
    env = {name: value for name, value in job_environment().items() if name not in ("MPI", "RANKS", "PYTHON")}
    return subprocess.run(command, cwd=cwd, env={**env, **variables}, capture_output=True, text=True, timeout=60)


@pytest.fixture
def checkout(tmp_path):
    """A copy of the job scripts whose environments hold stand-ins: python that does nothing, mpiexec that echoes."""
    shutil.copytree(ROOT / "jobs", tmp_path / "jobs")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for venv in (".venv", ".venv-openmpi"):
        executable(tmp_path / venv / "bin" / "python", 'echo "python $*" >> calls.txt')
        executable(tmp_path / venv / "bin" / "pip", "")
        executable(tmp_path / venv / "bin" / "mpiexec", 'echo "$(dirname "$0") $*"; exit "${STATUS:-0}"')
    return tmp_path


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_parses(script):
    result = subprocess.run(["bash", "-n", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_holds_no_path_of_one_machine(script):
    text = re.sub(r"#!\S+.*|/dev/null", "", script.read_text())
    assert re.findall(r"(?<![\w.}\"*)/-])/\w[\w/.-]*", text) == []


@pytest.mark.parametrize("script", BATCH, ids=lambda path: path.name)
def test_batch_header_asks_for_tasks_and_names_no_site(script):
    text = script.read_text()
    header = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", text, re.MULTILINE))
    assert len(header) == text.count("\n#SBATCH"), "every option reads --name or --name=value"
    assert {"nodes", "time", "cpus-per-task", "output"} <= set(header)
    assert {"ntasks", "ntasks-per-node"} & set(header)
    assert not [name for name in header if re.fullmatch(SITE_OPTIONS, name)]
    assert "gpus-per-task" not in header, "ranks that see only their own GPU cannot copy to each other's directly"
    assert ("no-requeue" in header) == ("requeue" not in header), "a second start must be meant"
    assert text.rindex("\n#SBATCH") < text.index("\nset -euo pipefail"), "sbatch reads no option below a command"


@pytest.fixture
def submit(checkout):
    """submit(script, *options, status=, finishes=, **variables): run a batch script with stand-ins for launchers."""
    folder = 'out=${*##*--out}; out=${out#[ =]}; out=${out%% *}; mkdir -p "$out"; touch "$out/finished"'
    text = f'printf "%s\\n" "$@"; set -- "$*"; [ -z "$FINISHES" ] || {{ {folder}; }}; exit "$STATUS"'
    for launcher in ("srun", "mpiexec"):
        executable(checkout / "bin" / launcher, text)
    (checkout / "nodes").write_text("node1\nnode2\n")
    slurm = {"SLURM_SUBMIT_DIR": str(checkout), "SLURM_NTASKS": "6", "SLURM_CPUS_PER_TASK": "2", "SLURM_JOB_ID": "17",
             "MPIPIPE_PYTHON": "our-python",
             "PATH": os.pathsep.join([str(checkout / "bin"), os.environ["PATH"]])}  # fmt: skip

    def start(script, *options, status=0, finishes=True, scheduler=slurm, **variables):
        settings = {"STATUS": str(status), "FINISHES": "yes" if finishes and not status else "", "PATH": slurm["PATH"]}
        return run(["bash", ROOT / "jobs" / script, *options], checkout, **{**scheduler, **settings, **variables})

    return start


@pytest.mark.parametrize("status", [0, 3])
def test_batch_job_starts_one_rank_for_each_task_and_hands_on_the_status(submit, checkout, status):
    result = submit("train.sbatch", "--steps", "5", status=status, MPIPIPE_SRUN_FLAGS="--mpi=pmi2 -v")
    assert result.returncode == status, result
    lines = result.stdout.splitlines()
    assert lines[0].startswith("job 17: 6 tasks on this node, 2 threads each, our-python")
    assert lines[1:-1] == [
        "--kill-on-bad-exit=1", "--wait=30", "--cpus-per-task=2", "--cpu-bind=cores", "--mpi=pmi2", "-v", "our-python",
        "-m", "mpipipe", "train", "--out", "runs/slurm-17", "--pipe", "6", "--steps", "5",
    ]  # fmt: skip
    verdict = "failed exit=3" if status else "finished"
    assert lines[-1] == f"mpipipe: job 17 {verdict} out=runs/slurm-17"
    assert (checkout / "runs" / "slurm-17" / "finished").exists() == (status == 0)


@pytest.mark.parametrize(("status", "seen", "said"), [(0, 1, "not all ranks"), (2, 2, "")])
@pytest.mark.parametrize("script", ["train.sbatch", "train_preemptable.sbatch"])
def test_batch_job_without_a_new_file_of_its_end_has_failed(submit, checkout, script, status, seen, said):
    """That of an earlier training counts for nothing, and stays where the command is refused."""
    finished = checkout / "runs" / "slurm-17" / "finished"
    finished.parent.mkdir(parents=True)
    finished.touch()
    result = submit(script, status=status, finishes=False, MPIPIPE_RESTARTS="1")
    assert result.returncode == seen and said in result.stderr, result
    assert result.stdout.splitlines()[-1] == f"mpipipe: job 17 failed exit={seen} out=runs/slurm-17"
    assert finished.exists()
    assert submit(script).returncode == 0


@pytest.mark.parametrize("options", [["--out", "runs/own"], ["--out=runs/own"]])
def test_batch_job_is_finished_where_the_options_say(submit, checkout, options):
    result = submit("train.sbatch", *options)
    assert result.returncode == 0 and result.stdout.endswith("finished out=runs/own\n"), result
    assert (checkout / "runs" / "own" / "finished").exists()


def test_gpu_batch_job_binds_no_gpu_to_a_task(submit):
    result = submit("train_gpu.sbatch", "--steps", "5", MPIPIPE_SRUN_FLAGS="--mpi=pmix")
    words = " ".join(result.stdout.splitlines()[1:-1])
    assert (
        "--cpus-per-task=2 --cpu-bind=cores --gpu-bind=none --mpi=pmix our-python -m mpipipe train --out runs/slurm-17 "
        in words
    )
    assert words.endswith(" --config jobs/gpt2_small.toml --pipe 6 --steps 5")


def test_array_job_trains_each_seed_in_a_folder_of_its_own(submit):
    array = {"SLURM_ARRAY_JOB_ID": "16", "SLURM_ARRAY_TASK_ID": "4"}
    result = submit("train.sbatch", **array)
    assert result.stdout.splitlines()[-1] == "mpipipe: job 16_4 finished out=runs/slurm-16_4"
    assert "--out runs/slurm-16_4 --pipe 6 --seed 4" in " ".join(result.stdout.splitlines())


def test_a_job_of_pbs_takes_its_ranks_from_the_nodes_and_its_options_from_a_variable(submit, checkout):
    pbs = {"PBS_JOBID": "5.server", "PBS_O_WORKDIR": str(checkout), "PBS_NODEFILE": "nodes"}
    result = submit("train.pbs", scheduler={**pbs, "MPIPIPE_PYTHON": "our-python"}, OPTIONS="--steps 5")
    lines = result.stdout.splitlines()
    assert lines[-1] == "mpipipe: job 5 finished out=runs/pbs-5" and result.returncode == 0, result
    assert " ".join(lines[1:-1]) == (
        "-n 2 our-python -m mpipipe train --out runs/pbs-5 --pipe 2 --save-every 100 --resume auto "
        "--time-limit 00:28:00 --steps 5"
    )


def test_configuration_of_the_gpu_jobs_is_one():
    config = TrainConfig.load(str(ROOT / "jobs" / "gpt2_small.toml"))
    assert (config.device, config.dtype, config.layers, config.dim) == ("cuda", "bfloat16", 12, 768)


@pytest.mark.parametrize(
    ("name", "mpi", "venv", "status", "verdict"),
    [
        ("tests", "mpich", ".venv", 0, "ok"),
        ("tests", "openmpi", ".venv-openmpi", 3, "failed"),
        ("judges", "mpich", ".venv-judges", 3, "failed"),
        ("models", "openmpi", ".venv-openmpi-models", 0, "ok"),
    ],
)
def test_test_job_ends_with_its_verdict_and_the_status_of_pytest(checkout, name, mpi, venv, status, verdict):
    executables = checkout / (".venv-openmpi" if mpi == "openmpi" else ".venv")
    if name != "tests":
        executables.rename(checkout / venv)
    script = "test.sh" if name == "tests" else f"test_{name}.sh"
    result = run(["bash", f"jobs/{script}", "-k", "one"], checkout, MPI=mpi, RANKS="2", STATUS=str(status))
    assert result.returncode == status, result
    lines = result.stdout.splitlines()
    mark = "not long" if name == "tests" else name
    assert f"{venv}/bin -n 2 {venv}/bin/python -m pytest -m {mark} -k one" in lines
    assert lines[-1] == f"mpipipe: {name} {verdict} mpi={mpi} ranks=2 exit={status}"


def test_faults_job_runs_all_faults_with_each_mpi(checkout):
    result = run(["bash", "jobs/test_faults.sh", "-k", "signal"], checkout)
    assert result.returncode == 0, result
    calls = [line for line in (checkout / "calls.txt").read_text().splitlines() if "pytest" in line]
    assert calls == ["python -m pytest -m  tests/faults/test_faults.py -k signal"] * 2


def test_installation_is_repeated_only_when_the_package_changes(checkout):
    installs = []
    for change in ("", "", "# another dependency\n"):
        with open(checkout / "pyproject.toml", "a") as project:
            project.write(change)
        assert run(["bash", "jobs/quickstart.sh"], checkout).returncode == 0
        installs.append((checkout / "calls.txt").read_text().count("--editable .[mpich]"))
    assert installs == [1, 1, 2]


def test_one_installation_serves_the_jobs_that_want_a_part_of_it(checkout):
    script = "set -euo pipefail; . jobs/common.sh; choose_mpi; install_package dev test; install_package test"
    assert run(["bash", "-c", script], checkout).returncode == 0
    assert run(["bash", "jobs/test.sh"], checkout).returncode == 0
    assert run(["bash", "jobs/quickstart.sh"], checkout).returncode == 0
    assert re.findall(r"--editable (\S+)", (checkout / "calls.txt").read_text()) == [".[mpich,dev,test]"]
    run(["bash", "jobs/docs.sh"], checkout)
    assert "--editable .[mpich,docs]" in (checkout / "calls.txt").read_text()


@pytest.mark.parametrize("forbidden", ["", "1"])
def test_where_no_bytecode_may_be_written_beside_the_sources_tests_keep_it_in_the_environment(checkout, forbidden):
    shown = 'echo "${PYTHONDONTWRITEBYTECODE:-unset} ${PYTHONPYCACHEPREFIX:-unset}"'
    executable(checkout / ".venv" / "bin" / "mpiexec", shown)
    chosen = {"PYTHONDONTWRITEBYTECODE": forbidden, "PYTHONPYCACHEPREFIX": ""}
    result = run(["bash", "jobs/test.sh"], checkout, TMPDIR=str(checkout), **chosen)
    folder = f"{checkout}/.venv/bytecode" if forbidden else "unset"
    assert f"unset {folder}" in result.stdout.splitlines(), result


def test_quickstart_trains_on_four_ranks_and_hands_on_options_and_status(checkout):
    result = run(["bash", "jobs/quickstart.sh", "--steps", "5"], checkout, STATUS="4")
    assert result.returncode == 4, result
    last = result.stdout.splitlines()[-1]
    assert ".venv/bin -n 4 .venv/bin/python -m mpipipe train " in last and last.endswith(" --steps 5")


@pytest.mark.parametrize(
    ("other", "verdict"),
    [
        ([3.0, 2.0001], "ok"),
        ([3.0, 2.001], "failed"),
        ([3.0, float("nan")], "failed"),
        ([3.0], "failed"),
        ([], "failed"),
    ],
)
def test_long_context_compares_the_losses_of_two_trainings(tmp_path, capsys, other, verdict):
    for name, (first, *rest) in {"one": [3.0, 2.0], "other": other or [None]}.items():
        (tmp_path / name).mkdir()
        records = [{"step": 0, "validation": first}, *({"step": 1, "loss": loss} for loss in rest)]
        lines = [] if first is None else [json.dumps(record) for record in records]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(lines))
    main = runpy.run_path(str(ROOT / "jobs" / "compare_losses.py"))["main"]
    code = main("long context", str(tmp_path / "one"), str(tmp_path / "other"))
    assert code == (verdict != "ok") and f"mpipipe: long context {verdict} losses=" in capsys.readouterr().out


def test_unknown_and_missing_mpi_are_refused_with_the_remedy(checkout):
    result = run(["bash", "jobs/quickstart.sh"], checkout, MPI="mvapich")
    assert result.returncode == 2 and "mpich, openmpi or site" in result.stderr
    executable(checkout / "bin" / "dirname", f'exec {shutil.which("dirname")} "$@"')
    bash = shutil.which("bash")
    result = run([bash, "jobs/test.sh"], checkout, MPI="site", PATH=str(checkout / "bin"))
    assert result.returncode == 2 and "load the MPI module" in result.stderr


def test_train_gpu_starts_one_rank_or_as_many_as_asked_for(checkout):
    executable(checkout / "bin" / "python", 'echo "python $*"; exit "${STATUS:-0}"')
    executable(checkout / "bin" / "mpiexec", 'echo "mpiexec $*"')
    tools = {"PYTHON": str(checkout / "bin" / "python"), "MPIEXEC": str(checkout / "bin" / "mpiexec")}
    one = run(["bash", "jobs/train_gpu.sh", "--steps", "5"], checkout, STATUS="3", DATA="a.txt b", **tools)
    assert one.returncode == 3
    options = one.stdout.split()
    assert options[:4] == ["python", "-m", "mpipipe", "train"] and options[-2:] == ["--steps", "5"]
    assert "--config jobs/gpt2_small.toml --data a.txt --data b" in one.stdout
    several = run(["bash", "jobs/train_gpu.sh"], checkout, RANKS="4", **tools)
    assert several.stdout.startswith(f"mpiexec -n 4 {tools['PYTHON']} -m mpipipe train --config jobs/gpt2_small.toml")


def test_every_file_of_the_package_that_is_not_python_is_declared():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["*"]
    others = [path for path in ROOT.glob("mpipipe/**/*") if path.is_file() and path.suffix not in (".py", ".pyc")]
    assert len(others) > 2
    assert [path for path in others if not any(fnmatch(path.name, pattern) for pattern in patterns)] == []


PYTHON = """
case "$*" in
    *check_device*) [ "${GPU:-1}" = 1 ] && exit; echo 'mpipipe.errors.BackendError: no GPU here' >&2; exit 1 ;;
    *pytest_mpi*) exit "${PYTEST_MPI:-1}" ;;
    *) echo "ranks=${RANKS_HERE:-1} stream=${MPIPIPE_TEST_GPU_STREAM:-} $*" >> calls.txt ;;
esac
case "$*" in
    *pytest*) [ -z "${SLOW:-}" ] || sleep 30; exit "${TESTS:-0}" ;;
esac
"""


@pytest.fixture
def gpu_check(checkout):
    """gpu_check(**variables): the outcome of jobs/gpu_check.sh with a stand-in for Python, and what that was asked."""
    executable(checkout / "bin" / "python", PYTHON)
    executable(checkout / "bin" / "mpiexec", 'n=$2; shift 2; for i in $(seq "$n"); do RANKS_HERE=$n "$@"; done')

    def start(**variables):
        programs = {"PYTHON": str(checkout / "bin" / "python"), "MPIEXEC": str(checkout / "bin" / "mpiexec")}
        result = run(["bash", "jobs/gpu_check.sh"], checkout, **{**programs, "RESULTS": "out", **variables})
        calls = checkout / "calls.txt"
        return result, calls.read_text().splitlines() if calls.exists() else []

    return start


def test_gpu_check_refuses_to_run_without_a_gpu(gpu_check):
    result, calls = gpu_check(GPU="0")
    assert result.returncode == 2 and not calls
    assert "no GPU here" in result.stderr and "this check needs a GPU" in result.stderr


def test_gpu_check_runs_tests_on_each_number_of_ranks_and_measures(gpu_check, checkout):
    result, calls = gpu_check()
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "gpu_check: all as expected; the logs are in out"
    tests = [call for call in calls if "pytest" in call]
    assert [call.split()[0] for call in tests] == ["ranks=1"] + ["ranks=2"] * 2 + ["ranks=4"] * 4
    assert all(" -m gpu -k " in call and " -p support.mpi_stand_in" in call for call in tests)
    assert "stream=own" in tests[0] and "-m gpu and ranks" in tests[1]
    assert sum("bench gpu --json out/bench.json" in call for call in calls) == 1
    assert {path.name for path in (checkout / "out").iterdir()} >= {"info.log", "tests-1.log", "tests-4.log"}


@pytest.mark.parametrize("problem", [{"TESTS": "1"}, {"SLOW": "1", "LIMIT": "1"}])
def test_a_quick_gpu_check_fails_where_a_test_fails_or_takes_too_long_and_goes_on(gpu_check, problem):
    result, calls = gpu_check(QUICK="1", PYTEST_MPI="0", **problem)
    (tests,) = [call for call in calls if "pytest" in call]
    assert "tests/arrays" in tests and "mpi_stand_in" not in tests
    assert result.returncode == 1 and "bench gpu --quick" in calls[-1]
    assert "gpu_check: not as expected: tests-1; the logs are in out" in result.stdout
