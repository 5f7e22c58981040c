"""The job scripts under a real SLURM of one node, which jobs/slurm_local.sh starts: `bash jobs/test_slurm.sh`."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from mpi4py import MPI
from support.launch import ROOT, job_environment
from support.small_training import TASK
from train.test_kills import outcome

pytestmark = [
    pytest.mark.jobs,
    pytest.mark.skipif(shutil.which("slurmctld") is None, reason="needs SLURM: bash jobs/test_slurm.sh installs it"),
    pytest.mark.skipif(os.geteuid() != 0, reason="jobs/slurm_local.sh needs root"),
    pytest.mark.skipif(MPI.COMM_WORLD.size > 1, reason="one SLURM on a machine is enough"),
]
OPEN_MPI = MPI.get_vendor()[0] == "Open MPI"
FITTING, WRONG = ("--mpi=pmix", "--mpi=pmi2") if OPEN_MPI else ("--mpi=pmi2", "--mpi=none")
TINY = "--data README.md --steps 3 --dim 16 --layers 2 --heads 2 --seq-len 16 --batch 8 --sample-bytes 0".split()
ON_CPU = "--device cpu --dtype float32".split()
SECONDS = 300  # for a job to end, on a machine with other work, too


def local(command, folder, **variables):
    env = job_environment({"SLURM_LOCAL": str(folder), **variables})
    return subprocess.run(
        ["bash", ROOT / "jobs" / "slurm_local.sh", command], env=env, capture_output=True, text=True, timeout=90
    )


def processes_of(folder):
    """The processes whose environment or command line names this folder."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as environ, open(f"/proc/{pid}/cmdline", "rb") as command:
                text, words = environ.read() + b"\0", command.read()
        except OSError:
            continue
        if int(pid) != os.getpid() and (f"={folder}".encode() in text or str(folder).encode() in words):
            found.append(words.replace(b"\0", b" ").decode())
    return found


class Cluster:
    """The SLURM that runs, and jobs in it, submitted from a folder that looks like a checkout."""

    def __init__(self, started, folder):
        self.conf, self.folder = started.stdout.strip().removeprefix("SLURM_CONF="), folder / "checkout"
        self.folder.mkdir(exist_ok=True)
        for name in ("jobs", "mpipipe", "README.md"):
            (self.folder / name).unlink(missing_ok=True)
            (self.folder / name).symlink_to(ROOT / name)

    def ask(self, *command, **variables):
        env = job_environment({"SLURM_CONF": self.conf, "MPIPIPE_PYTHON": sys.executable, **variables})
        result = subprocess.run(command, cwd=self.folder, env=env, capture_output=True, text=True, timeout=60)
        assert result.returncode == 0, result
        return result.stdout

    def submit(self, script, *sbatch, options=(), flags=FITTING, model=TINY, **variables):
        """The number of the job."""
        command = ["sbatch", "--parsable", *sbatch, f"jobs/{script}", *model, *options]
        return self.ask(*command, MPIPIPE_SRUN_FLAGS=flags, **variables).strip()

    def end_of(self, job):
        """(state, exit code of the script) of each job of an array, or of the one job, in one string."""
        stop = time.monotonic() + SECONDS
        while True:
            shown = self.ask("scontrol", "show", "job", job)
            ends = re.findall(r"JobState=(\w+).*?ExitCode=(\d+):", shown, re.DOTALL)
            if not any(state in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING") for state, _ in ends):
                return " ".join(f"{state} {code}" for state, code in ends)
            assert time.monotonic() < stop, (shown, self.printed(job))
            time.sleep(0.2)

    def until(self, job, pattern):
        """Wait until the job has printed a line like this."""
        stop = time.monotonic() + SECONDS
        while not re.search(pattern, self.printed(job), re.MULTILINE):
            assert time.monotonic() < stop, self.printed(job)
            time.sleep(0.1)

    def task(self, job, number):
        """The process of a task of the job's step."""
        listed = self.ask("scontrol", "listpids", job)
        return int(re.search(rf"^(\d+) +\S+ +\d+ +{number} ", listed, re.MULTILINE)[1])

    def printed(self, job):
        path = self.folder / f"slurm-{job}.out"
        return path.read_text() if path.exists() else ""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slurm")
    started = local("start", folder / "daemons")
    assert started.returncode == 0, started
    yield Cluster(started, folder)
    stopped = local("stop", folder / "daemons")
    assert stopped.returncode == 0, stopped


def test_a_local_slurm_starts_and_stops_twice_and_leaves_nothing(tmp_path):
    for _ in range(2):
        started = local("start", tmp_path / "slurm")
        assert started.returncode == 0 and started.stdout == f"SLURM_CONF={tmp_path}/slurm/slurm.conf\n", started
        again = local("start", tmp_path / "slurm")
        assert again.returncode == 2 and "runs already" in again.stderr
        cluster = Cluster(started, tmp_path)
        cluster.ask("sbatch", "--wrap=trap '' TERM; sleep 98; sleep 99")  # stop ends it, too
        assert cluster.ask("srun", "-n2", "echo", "here") == "here\nhere\n"
        stopped = local("stop", tmp_path / "slurm")
        assert stopped.returncode == 0, stopped
        assert processes_of(tmp_path / "slurm") == [] and not (tmp_path / "slurm").exists()
    again = local("stop", tmp_path / "slurm")
    assert again.returncode == 2 and "nothing to stop" in again.stderr


def test_a_folder_of_somebody_else_stays_as_it_is(tmp_path):
    (tmp_path / "slurm.conf").write_text("ClusterName=production\n")
    result = local("start", tmp_path)
    assert result.returncode == 2 and "stays as it is" in result.stderr
    assert (tmp_path / "slurm.conf").read_text() == "ClusterName=production\n"


@pytest.mark.parametrize(
    ("script", "sbatch", "options", "mesh"),
    [
        ("train.sbatch", ["--ntasks=2"], [], "pipe 2 x data 1 x seq 1"),
        ("train_gpu.sbatch", ["--ntasks-per-node=2"], ON_CPU, "pipe 2 x data 1 x seq 1"),
        ("train_gpu.sbatch", ["--ntasks-per-node=2"],
         [*ON_CPU, "--pipe", "1", "--seq", "2"], "pipe 1 x data 1 x seq 2"),
    ],
)  # fmt: skip
def test_a_batch_script_trains_to_the_end(slurm, script, sbatch, options, mesh):
    job = slurm.submit(script, "--cpus-per-task=1", *sbatch, options=options)
    assert slurm.end_of(job) == "COMPLETED 0", slurm.printed(job)
    text = slurm.printed(job)
    assert f"mpipipe: 2 ranks = {mesh};" in text and "mpipipe: ok steps=3 " in text
    assert text.splitlines()[-1] == f"mpipipe: job {job} finished out=runs/slurm-{job}"
    assert (slurm.folder / "runs" / f"slurm-{job}" / "finished").exists()


def test_an_array_job_trains_each_seed(slurm):
    job = slurm.submit("train.sbatch", "--array=5-6", "--output=slurm-%A_%a.out", "--ntasks=2")
    assert slurm.end_of(job) == "COMPLETED 0 COMPLETED 0", slurm.printed(f"{job}_5")
    losses = [(slurm.folder / "runs" / f"slurm-{job}_{seed}" / "metrics.jsonl").read_text() for seed in (5, 6)]
    assert losses[0] != losses[1]


def test_ranks_that_do_not_see_each_other_are_refused(slurm):
    job = slurm.submit("train.sbatch", "--ntasks=2", flags=WRONG)
    assert slurm.end_of(job) == "FAILED 1", slurm.printed(job)
    text = slurm.printed(job)
    assert text.count("LaunchError: this process is alone in COMM_WORLD") == 1
    assert "remedy:" in text and "`srun --mpi=pmix` for Open MPI" in text
    assert text.splitlines()[-1] == f"mpipipe: job {job} failed exit=1 out=runs/slurm-{job}"


def test_a_killed_task_ends_the_job(slurm):
    job = slurm.submit("train.sbatch", "--ntasks=2", options=["--steps", "100000"])
    slurm.until(job, r"^step +1/")
    os.kill(slurm.task(job, 1), signal.SIGKILL)
    assert slurm.end_of(job).startswith("FAILED"), slurm.printed(job)
    assert re.fullmatch(rf"mpipipe: job {job} failed exit=[1-9]\d* out=\S+", slurm.printed(job).splitlines()[-1])
    assert not (slurm.folder / "runs" / f"slurm-{job}" / "finished").exists()


@pytest.mark.parametrize("model", [[*TINY, "--dropout", "0.1"], ["fields.py", "--batch", "8"]], ids=["text", "fields"])
def test_a_job_that_is_preempted_killed_or_out_of_time_is_requeued_and_ends_with_the_same_bits(slurm, model):
    """SIGUSR2 to all ranks; a task killed by SIGKILL, which leaves its node dirty; a time limit, seen by rank 0."""
    options = "--steps 300 --log-every 10 --save-every 40".split()
    (slurm.folder / "fields.py").write_text(TASK)
    limit = slurm.folder / "limit.toml"
    limit.write_text('time_limit = "4"')
    disturbances = {
        "USR2": lambda job: slurm.ask("scancel", "--signal=USR2", job),
        "KILL": lambda job: os.kill(slurm.task(job, 1), signal.SIGKILL),
        "limit": lambda job: (slurm.until(job, "the time limit, .* ahead: left after"), limit.write_text("")),
    }
    jobs, codes = {}, {"USR2": "75", "KILL": "1(37|43)", "limit": "75"}  # srun returns the highest one of the tasks
    for how, disturb in disturbances.items():
        more = ["--config", "limit.toml"] if how == "limit" else []
        jobs[how] = slurm.submit("train_preemptable.sbatch", "--ntasks=2", options=[*options, *more], model=model)
        slurm.until(jobs[how], r"^step +\d*[1-9]0/" if how != "limit" else r"^step +1/")
        disturb(jobs[how])  # the job waits for its turn while the next one runs
    whole = slurm.submit("train.sbatch", "--ntasks=2", options=options, model=model)
    assert slurm.end_of(whole) == "COMPLETED 0", slurm.printed(whole)
    for how, job in jobs.items():
        assert slurm.end_of(job) == "COMPLETED 0", slurm.printed(job)
        text, out = slurm.printed(job), slurm.folder / f"runs/slurm-{job}"
        assert (
            re.search(f"mpipipe: job {job} requeued exit={codes[how]} out=", text) and "mpipipe: ok steps=300 " in text
        )
        assert "start 2" in text and (out / "finished").exists() and not out.with_suffix(".restarts").exists()
        assert text.count("\nstep 300/300  loss ") == 1
        assert outcome(out) == outcome(slurm.folder / f"runs/slurm-{whole}"), how


def test_a_job_that_is_cancelled_saves_and_does_not_come_back(slurm):
    job = slurm.submit("train_preemptable.sbatch", "--ntasks=2", options=["--steps", "100000"])
    slurm.until(job, r"^step +1/")
    slurm.ask("scancel", job)
    assert slurm.end_of(job).startswith("CANCELLED"), slurm.printed(job)
    text = slurm.printed(job)
    assert "mpipipe: SIGTERM on all 2 ranks: left after step" in text and "requeued" not in text


def test_a_job_that_fails_without_a_new_checkpoint_is_given_up(slurm):
    job = slurm.submit("train_preemptable.sbatch", "--ntasks=2", flags=WRONG, MPIPIPE_RESTARTS="2")
    assert slurm.end_of(job).startswith("FAILED"), slurm.printed(job)
    assert slurm.printed(job).count("LaunchError: this process is alone in COMM_WORLD") == 2
    assert "2 starts in a row have ended without a new checkpoint (newest: none)" in slurm.printed(job)


def test_a_job_that_is_refused_is_not_requeued(slurm):
    job = slurm.submit("train_preemptable.sbatch", "--ntasks=2", options=["--preempt-signals", "KILL"])
    assert slurm.end_of(job) == "FAILED 2", slurm.printed(job)
    assert slurm.printed(job).count("a signal that cannot be caught") == 1


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two cores are bound")
def test_a_rank_has_the_cores_and_the_threads_that_its_script_asks_for(tmp_path):
    started = local("start", tmp_path / "daemons", SLURM_LOCAL_CPUS="2")
    assert started.returncode == 0, started
    cluster, found = Cluster(started, tmp_path), {}
    for ranks, threads in ((1, 2), (2, 1)):
        job = cluster.submit("train.sbatch", f"--ntasks-per-node={ranks}", f"--cpus-per-task={threads}")
        assert cluster.end_of(job) == "COMPLETED 0", cluster.printed(job)
        surroundings = json.loads((cluster.folder / f"runs/slurm-{job}/environment.json").read_text())
        found[ranks] = [(place["cores"], place["threads"]) for place in surroundings["binding"]]
        assert surroundings["variables"]["MPIPIPE_THREADS"] == str(threads)
    assert found == {1: [("0-1", 2)], 2: [("0", 1), ("1", 1)]}
    stopped = local("stop", tmp_path / "daemons")
    assert stopped.returncode == 0, stopped
