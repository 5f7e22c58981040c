"""The job scripts: they parse, name no site, hand on options and exit status. Stand-ins run in place of programs."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
from fnmatch import fnmatch
from pathlib import Path

import pytest
from support.launch import ROOT, job_environment

from mpipipe.gpu_check import suite
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


def test_batch_job_without_the_file_of_its_end_has_failed_whatever_srun_says(submit, checkout):
    """One of an earlier job counts for nothing."""
    (checkout / "runs" / "slurm-17").mkdir(parents=True)
    (checkout / "runs" / "slurm-17" / "finished").touch()
    result = submit("train.sbatch", finishes=False)
    assert result.returncode == 1 and "not all ranks have ended well" in result.stderr
    assert result.stdout.splitlines()[-1] == "mpipipe: job 17 failed exit=1 out=runs/slurm-17"
    assert not (checkout / "runs" / "slurm-17" / "finished").exists()


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


@pytest.mark.parametrize(("mpi", "venv"), [("mpich", ".venv"), ("openmpi", ".venv-openmpi")])
@pytest.mark.parametrize(("status", "verdict"), [(0, "ok"), (3, "failed")])
def test_test_job_ends_with_its_verdict_and_the_status_of_pytest(checkout, mpi, venv, status, verdict):
    result = run(["bash", "jobs/test.sh", "-k", "one"], checkout, MPI=mpi, RANKS="2", STATUS=str(status))
    assert result.returncode == status, result
    lines = result.stdout.splitlines()
    assert f"{venv}/bin -n 2 {venv}/bin/python -m pytest -m not long -k one" in lines
    assert lines[-1] == f"mpipipe: tests {verdict} mpi={mpi} ranks=2 exit={status}"


@pytest.mark.parametrize(("options", "mpis"), [([], ["mpich", "openmpi"]), (["--mpi", "openmpi"], ["openmpi"])])
def test_faults_job_hands_on_an_interpreter_for_each_mpi_and_the_options(checkout, options, mpis):
    result = run(["bash", "jobs/test_faults.sh", *options, "--quick", "[4 run]"], checkout)
    assert result.returncode == 0, result
    last = (checkout / "calls.txt").read_text().splitlines()[-1]
    venvs = {"mpich": ".venv", "openmpi": ".venv-openmpi"}
    pythons = " ".join(f"--python {mpi}={venvs[mpi]}/bin/python" for mpi in mpis)
    assert last == f"python -m faults {pythons} --quick [4 run]"


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


def test_readme_shows_the_two_commands_and_they_exist():
    readme = (ROOT / "README.md").read_text()
    for script in ("jobs/quickstart.sh", "jobs/test.sh"):
        assert f"bash {script}" in readme
        assert Path(ROOT, script).is_file()


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
    *"gpu_check.extra attention") echo "attention by: ${{ATTENTION:-cudnn 9.24.0}}"; [ -z "${{ATTENTION:-}}" ]; exit ;;
    *gpu_check.extra*) echo "all as expected"; exit ;;
    *mpipipe.gpu_check*) exec {python} "$@" ;;
    *check_device*) [ "${{GPU:-1}}" = 1 ] && exit
        printf 'Traceback:\n  here\nmpipipe.errors.BackendError: no GPU here\n  found: \n    no headers\n' >&2
        printf '    no cuBLAS\n    no NVRTC\n  remedy: install it\n' >&2; exit 1 ;;
    *sys.executable*) echo "$(dirname "$0")/mpiexec" ;;
    *pytest_mpi*) exit "${{PYTEST_MPI:-1}}" ;;
    *COMM_WORLD.size*) echo "${{WORLD:-2}}" ;;
    *"from mpi4py import MPI") [ "${{HAS_MPI:-1}}" = 1 ] && exit
        printf 'Traceback:\nRuntimeError: cannot load MPI library\nlibmpi.so.12: none\n' >&2; exit 1 ;;
    *gpu_emulator.warm_kernels*) echo "$*" >> warm.txt; echo "200 of 200 sources compiled" ;;
    *"mpipipe info"*) echo "GPU-aware MPI  ${{AWARE:-staged through the host: says no, directly}}" ;;
    *pytest*) way="direct=${{MPIPIPE_GPU_DIRECT:-}} stream=${{MPIPIPE_TEST_GPU_STREAM:-}}"
        echo "$way ranks=${{RANKS_HERE:-1}} $*" >> calls.txt
        if [ "${{SLOW:-}}" = "${{RANKS_HERE:-1}}" ]; then
            trap 'echo "1 ${{FOUND:-passed}}, 1 skipped in 7.00s"; kill $!; exit 2' INT
            sleep 30 & wait
        fi
        echo "==== 3 passed in 0.10s ===="; exit "${{TESTS:-0}}" ;;
    *"bench gpu"*) echo "$*" >> calls.txt
        echo '{{"rows": [{{"what": "copy | all", "value": 4321.0, "unit": "GB/s", "peer": "",
        "peer_value": null, "ratio": null, "goal": ""}}], "failed": ["ring failed: no memory left"]}}' > "${{*: -1}}"
        exit 1 ;;
esac
"""


@pytest.fixture
def gpu_check(checkout):
    """gpu_check(**variables): the outcome of jobs/gpu_check.sh with a stand-in for Python, and its JSON or None."""
    executable(checkout / "bin" / "python", PYTHON.format(python=sys.executable))
    executable(checkout / "bin" / "mpiexec", 'n=$2; shift 2; for i in $(seq "$n"); do RANKS_HERE=$n "$@"; done')

    def start(**variables):
        variables = {"PYTHON": str(checkout / "bin" / "python"), "RESULTS": "out", **variables}
        result = run(["bash", "jobs/gpu_check.sh"], checkout, **variables)
        written = checkout / "out" / "gpu_check.json"
        return result, json.loads(written.read_text()) if written.exists() else None

    return start


def test_gpu_check_refuses_to_run_without_a_gpu(gpu_check, checkout):
    result, facts = gpu_check(GPU="0")
    assert result.returncode == 2 and facts is None and not (checkout / "out").exists()
    lines = [line.strip() for line in result.stderr.splitlines()]
    assert lines[0].endswith("mpipipe.errors.BackendError: no GPU here") and "needs a GPU" in lines[-1]
    assert lines[2:-1] == ["no headers", "no cuBLAS", "no NVRTC", "remedy: install it"]


def test_gpu_check_refuses_an_interpreter_without_the_packages_and_a_limit_that_is_no_number(gpu_check, checkout):
    result, facts = gpu_check(PYTHON="false")
    assert result.returncode == 2 and facts is None and "false cannot import what mpipipe needs" in result.stderr
    result, facts = gpu_check(LIMIT="long")
    assert result.returncode == 2 and facts is None and "LIMIT=long" in result.stderr


def test_gpu_check_runs_every_part_and_a_failed_measurement_is_no_failure(gpu_check, checkout):
    result, facts = gpu_check()
    assert result.returncode == 0, result
    outcomes = [(check["check"], check["status"]) for check in facts["checks"]]
    assert outcomes == [
        ("info", "ok"), ("attention", "ok"), ("compile", "ok"), ("extra", "ok"), ("tests-1", "ok"),
        ("bench", "failed"), ("bench-2", "failed"), ("tests-direct", "skipped"), ("tests-2-staged", "ok"),
        ("tests-4-staged", "ok"),
    ]  # fmt: skip
    assert "3 passed" in next(check["why"] for check in facts["checks"] if check["check"] == "tests-1")
    assert [row["value"] for row in facts["measurements"]] == [4321.0] * 2
    text = (checkout / "out" / "gpu_check.md").read_text()
    assert "| tests-4-staged | ok |" in text and "copy / all | 4321 GB/s" in text and "no memory left" in text
    assert result.stdout.splitlines()[-1].startswith("mpipipe: gpu check ok ")
    calls = (checkout / "calls.txt").read_text().splitlines()
    tests = [call for call in calls if "pytest" in call]
    assert [call.split(" -m ")[0] for call in tests] == ["direct= stream=own ranks=1",
                                                          *["direct=0 stream= ranks=2"] * 2,
                                                          *["direct=0 stream= ranks=4"] * 4]  # fmt: skip
    assert all("-m gpu -p support.gpu_selection -p support.mpi_stand_in --few-plans" in call for call in tests)
    assert tests[0].endswith("--few-plans tests")
    assert all(call.endswith("--few-plans --several-ranks tests") for call in tests[1:])
    assert not any("--quick" in call for call in calls)


def test_gpu_check_begins_with_a_quick_look(gpu_check, checkout):
    result, facts = gpu_check(QUICK="1")
    assert result.returncode == 0, result
    assert [check["check"] for check in facts["checks"]] == ["info", "attention", "compile", "tests-1", "bench"]
    assert (checkout / "warm.txt").read_text().split()[-1] == str(min(8, os.cpu_count()))
    tests, bench = (checkout / "calls.txt").read_text().splitlines()
    assert tests.endswith("--few-plans tests/arrays tests/nn/test_device_kernels.py")
    assert "bench gpu --quick --no-peers --json out/bench.json" in bench


def test_gpu_check_without_an_mpi_library_measures_and_says_how_to_come_by_one(gpu_check, checkout):
    result, facts = gpu_check(HAS_MPI="0")
    assert result.returncode == 0, result
    outcomes = {check["check"]: (check["status"], check["why"]) for check in facts["checks"]}
    assert [outcomes.pop(name)[0] for name in ("info", "attention", "compile", "extra")] == ["ok"] * 4
    assert outcomes.pop("bench")[0] == "failed"  # as its stand-in does
    assert outcomes == dict.fromkeys(
        ["tests-1", "tests-2-staged", "tests-4-staged", "tests-direct", "bench-2"], ("skipped", "no MPI library")
    )
    assert len(facts["measurements"]) == 1
    assert "cannot load MPI: RuntimeError: cannot load MPI library" in result.stdout
    assert "LD_LIBRARY_PATH=SITE/lib MPIEXEC=SITE/bin/mpiexec bash jobs/gpu_check.sh" in result.stdout


def test_gpu_check_tests_direct_messages_where_mpi_takes_them(gpu_check, checkout):
    result, facts = gpu_check(AWARE="direct: it says yes", PYTEST_MPI="0")
    assert result.returncode == 0, result
    assert [check["check"] for check in facts["checks"] if "direct" in check["check"]] == [
        "tests-2-direct", "tests-4-direct"
    ]  # fmt: skip
    calls = (checkout / "calls.txt").read_text()
    assert calls.count("direct=1 ") == calls.count("direct=0 ") == 6 and "mpi_stand_in" not in calls


def test_gpu_check_fails_where_a_test_fails_and_goes_on(gpu_check):
    result, facts = gpu_check(TESTS="1")
    assert result.returncode == 1
    assert [check["status"] for check in facts["checks"]].count("failed") == 5 and len(facts["checks"]) == 10
    assert result.stdout.splitlines()[-1].startswith("mpipipe: gpu check failed tests-1 tests-2-staged tests-4-staged ")
    assert all("3 passed" in check["why"] for check in facts["checks"] if check["check"].startswith("tests-1"))


def test_gpu_check_fails_where_cudnn_does_not_compute_attention(gpu_check):
    result, facts = gpu_check(QUICK="1", ATTENTION="cupy because of something")
    assert result.returncode == 1
    assert "attention failed" in result.stdout and "exit 1; see out/attention.log: attention by: cupy" in result.stdout
    assert [check["status"] for check in facts["checks"]] == ["ok", "failed", "ok", "ok", "failed"]  # the others go on


def test_gpu_check_packs_its_results(gpu_check, checkout):
    result, facts = gpu_check(QUICK="1", PROCESSES="3")
    assert result.stdout.splitlines()[-1].endswith(" packed=out.tar.gz")
    with tarfile.open(checkout / "out.tar.gz") as packed:
        assert {"out/gpu_check.json", "out/gpu_check.md", "out/bench.json", "out/tests-1.log"} <= set(packed.getnames())
        assert json.load(packed.extractfile("out/gpu_check.json")) == facts
    assert "attention by" in facts and (checkout / "warm.txt").read_text().split()[-1] == "3"
    result, _ = gpu_check(PROCESSES="all")
    assert result.returncode == 2 and "PROCESSES=all is no number" in result.stderr


def test_gpu_check_without_an_mpi_that_works_skips_what_needs_ranks(gpu_check):
    result, facts = gpu_check(WORLD="1")
    assert result.returncode == 0, result
    skipped = {check["check"]: check["why"] for check in facts["checks"] if check["status"] == "skipped"}
    assert set(skipped) == {"tests-2-staged", "tests-4-staged", "tests-direct", "bench-2"}
    assert set(skipped.values()) == {"no mpiexec starts ranks that see each other"}


@pytest.mark.long
@pytest.mark.parametrize(("slow", "found", "status"), [("2", "passed", "cut"), ("1", "passed", "cut"),
                                                      ("1", "failed", "failed")])  # fmt: skip
def test_gpu_check_ends_in_time_and_says_what_was_left_out(gpu_check, slow, found, status):
    """What the limit for everything cuts short has not failed, unless a test had failed before."""
    result, facts = gpu_check(SLOW=slow, FOUND=found, LIMIT="7")
    outcomes = {check["check"]: (check["status"], check["why"]) for check in facts["checks"]}
    name = "tests-1" if slow == "1" else "tests-2-staged"
    assert outcomes[name][0] == status and "ended at" in outcomes[name][1]
    assert slow == "2" or f"1 {found}, 1 skipped" in outcomes[name][1]
    assert outcomes["tests-4-staged"] == ("skipped", "no time left")
    assert result.returncode == (1 if status == "failed" else 0)


@pytest.mark.long
@pytest.mark.parametrize(("found", "status", "code"), [("passed", "cut", 0), ("failed", "failed", 1)])
def test_gpu_check_cuts_a_part_that_runs_past_its_own_limit(gpu_check, checkout, monkeypatch, found, status, code):
    """It has not failed either, unless a test had failed before."""
    monkeypatch.setattr(suite, "WHOLE_LIMITS", suite.Limits(tests=6))
    for name, value in {"PYTHON": "bin/python", "RESULTS": "out", "SLOW": "1", "FOUND": found}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(checkout)
    assert suite.main() == code
    facts = json.loads(Path("out", "gpu_check.json").read_text())
    (tests,) = (check for check in facts["checks"] if check["check"] == "tests-1")
    assert tests["status"] == status and "ended at 6 s, its own limit" in tests["why"]
