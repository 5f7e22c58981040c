"""The job scripts: they parse, name no site, hand on options and exit status. Stand-ins run in place of programs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from launch import ROOT, job_environment

SCRIPTS = sorted([*ROOT.glob("jobs/*"), ROOT / ".ci" / "run"])
BATCH = (ROOT / "jobs" / "train.sbatch").read_text()
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


def test_batch_header_asks_for_tasks_and_names_no_site():
    header = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", BATCH, re.MULTILINE))
    assert len(header) == BATCH.count("\n#SBATCH"), "every option reads --name=value"
    assert {"ntasks", "nodes", "time", "cpus-per-task", "output"} <= set(header)
    assert not [name for name in header if re.fullmatch(SITE_OPTIONS, name)]
    assert BATCH.rindex("\n#SBATCH") < BATCH.index("\nset -euo pipefail"), "sbatch reads no option below a command"


@pytest.mark.parametrize("status", [0, 3])
def test_batch_job_starts_one_rank_for_each_task_and_hands_on_the_status(tmp_path, status):
    executable(tmp_path / "bin" / "srun", f'printf "%s\\n" "$@"; exit {status}')
    path = os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]])
    slurm = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_NTASKS": "6", "SLURM_CPUS_PER_TASK": "2", "SLURM_JOB_ID": "17"}
    command = ["bash", ROOT / "jobs" / "train.sbatch", "--steps", "5"]
    result = run(command, tmp_path, PATH=path, MPIPIPE_SRUN_FLAGS="--mpi=pmi2 -v", MPIPIPE_PYTHON="our-python", **slurm)
    assert result.returncode == status, result
    lines = result.stdout.splitlines()
    assert lines[0].startswith("job 17: 6 tasks on this node, 2 threads each, our-python")
    assert lines[1:] == [
        "--kill-on-bad-exit=1", "--wait=30", "--cpus-per-task=2", "--mpi=pmi2", "-v", "our-python", "-m", "mpipipe",
        "train", "--pipe", "6", "--out", "runs/slurm-17", "--steps", "5",
    ]  # fmt: skip


@pytest.mark.parametrize(("mpi", "venv"), [("mpich", ".venv"), ("openmpi", ".venv-openmpi")])
@pytest.mark.parametrize(("status", "verdict"), [(0, "ok"), (3, "failed")])
def test_test_job_ends_with_its_verdict_and_the_status_of_pytest(checkout, mpi, venv, status, verdict):
    result = run(["bash", "jobs/test.sh", "-k", "one"], checkout, MPI=mpi, RANKS="2", STATUS=str(status))
    assert result.returncode == status, result
    lines = result.stdout.splitlines()
    assert f"{venv}/bin -n 2 {venv}/bin/python -m pytest -k one" in lines
    assert lines[-1] == f"mpipipe: tests {verdict} mpi={mpi} ranks=2 exit={status}"


def test_installation_is_repeated_only_when_the_package_changes(checkout):
    installs = []
    for change in ("", "", "# another dependency\n"):
        with open(checkout / "pyproject.toml", "a") as project:
            project.write(change)
        assert run(["bash", "jobs/quickstart.sh"], checkout).returncode == 0
        installs.append((checkout / "calls.txt").read_text().count("--editable .[mpich]"))
    assert installs == [1, 1, 2]


def test_quickstart_trains_on_four_ranks_and_hands_on_options_and_status(checkout):
    result = run(["bash", "jobs/quickstart.sh", "--steps", "5"], checkout, STATUS="4")
    assert result.returncode == 4, result
    last = result.stdout.splitlines()[-1]
    assert ".venv/bin -n 4 .venv/bin/python -m mpipipe train " in last and last.endswith(" --steps 5")


def test_unknown_and_missing_mpi_are_refused_with_the_remedy(checkout):
    result = run(["bash", "jobs/quickstart.sh"], checkout, MPI="mvapich")
    assert result.returncode == 2 and "mpich, openmpi or site" in result.stderr
    executable(checkout / "bin" / "dirname", f'exec {shutil.which("dirname")} "$@"')
    bash = shutil.which("bash")
    result = run([bash, "jobs/test.sh"], checkout, MPI="site", PATH=str(checkout / "bin"))
    assert result.returncode == 2 and "load the MPI module" in result.stderr


def test_readme_shows_the_two_commands_and_they_exist():
    readme = (ROOT / "README.md").read_text()
    for script in ("jobs/quickstart.sh", "jobs/test.sh"):
        assert f"bash {script}" in readme
        assert Path(ROOT, script).is_file()
