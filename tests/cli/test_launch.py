"""mpipipe launch: an exit code 0 is believed with a proof alone, and all else passes through as it is."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.harness import AT_LENGTH, only_at_length
from support.launch import Job, job_environment, mpiexec

from mpipipe.job import ended

pytestmark = pytest.mark.jobs
LAUNCH = [sys.executable, "-m", "mpipipe", "launch"]
ON_PAPER = [sys.executable, "-m", "mpipipe", "simulate", "--schedule", "gpipe"]  # a command of one process
# C code on the last rank ends the process in a forward
EXIT = """
import ctypes, sys, numpy as np, mpipipe
from mpipipe import nn, schedules
from mpipipe.job import runtime
comm, calls = runtime.world(), [0]
class Stage(nn.Stage):
    def forward(self, x):
        calls[0] += 1
        if comm.rank == comm.size - 1 and calls[0] == 5 and sys.argv[1] != "none":
            getattr(ctypes.CDLL(None), sys.argv[1])(0)
        return super().forward(x)
x = np.ones((8, 8), np.float32)
stage = Stage([nn.Linear(8, 8)], first=comm.rank)
with mpipipe.Pipeline([stage], schedules.gpipe(comm.size, 2), comm, loss=nn.mean_squared_error) as pipeline:
    for _ in range(20):
        pipeline.step(x if comm.rank == 0 else None, x if comm.rank == comm.size - 1 else None)
print("finished")
"""
# says which signals come, until SIGQUIT ends it
LISTENER = """
import os, signal, time
def say(text):
    os.write(1, f"{text}\\n".encode())  # print must not be called within itself
def note(number, frame):
    say(signal.Signals(number).name if number < 32 else number)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGCONT,
               signal.SIGALRM, signal.SIGXCPU, signal.SIGTSTP, signal.SIGRTMIN):
    signal.signal(number, note)
say("up")
while True:
    time.sleep(0.01)
"""


def run(*words, folder=None, stdin="", **variables):
    """The finished `mpipipe launch -- words`; it must leave nothing in its folder."""
    result = subprocess.run(
        [*LAUNCH, "--", *map(str, words)],
        cwd=folder,
        env=job_environment(variables),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert not [path for path in Path(folder or ".").glob(f"{ended.PREFIX}*") if "old" not in path.name]
    return result


def started(folder, *words):
    """A job of `mpipipe launch` under way."""
    return Job([*LAUNCH, "--", *words], folder)


def wait_for(condition, job, seconds=30):
    stop = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < stop, (job.returncode, job.stdout, job.stderr)
        time.sleep(0.01)


def ranks_of(folder, ranks, script, *words):
    (folder / "job.py").write_text(script)
    return [mpiexec(), "-n", str(ranks), sys.executable, "-m", "mpipipe", "run", "job.py", *words]


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2, 3, 4] if AT_LENGTH else [1, 2, 3])
@pytest.mark.parametrize("how", ["exit", "_exit"])
def test_a_rank_that_c_code_ends_is_never_a_success(tmp_path, ranks, how):
    for _ in range(4 if AT_LENGTH else 1):
        job = run(*ranks_of(tmp_path, ranks, EXIT, how), folder=tmp_path)
        assert job.returncode != 0, job
        if "mpipipe launch:" in job.stderr:  # else the launcher has said so by itself
            assert job.returncode == 1 and "returned 0, but nothing proves that all ranks have ended well" in job.stderr
            assert f"found: {ranks} rank{'s' * (ranks > 1)} on " in job.stderr, job.stderr


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_good_job_is_a_success_and_nothing_is_added(tmp_path, ranks):
    job = run(*ranks_of(tmp_path, ranks, EXIT, "none"), folder=tmp_path)
    assert job.returncode == 0 and job.stderr == "", job
    assert job.stdout.split() == ["finished"] * ranks
    assert [path.name for path in tmp_path.iterdir() if path.suffix] == ["job.py"]


@only_at_length
def test_a_hundred_good_jobs_are_a_hundred_successes(tmp_path, allow_seconds):
    allow_seconds(900)
    command = ranks_of(tmp_path, 2, EXIT, "none")
    assert [run(*command, folder=tmp_path).returncode for _ in range(100)] == [0] * 100


def test_a_script_that_finalizes_mpi_itself_is_a_success(tmp_path):
    script = "from mpi4py import MPI\nfrom mpipipe.job import runtime\nruntime.world().Barrier()\nMPI.Finalize()"
    job = run(*ranks_of(tmp_path, 2, script), folder=tmp_path)
    assert job.returncode == 0, job


def test_a_program_without_mpipipe_run_is_no_success_and_the_sentence_says_why(tmp_path):
    job = run(sys.executable, "-c", "import mpipipe", folder=tmp_path)
    assert job.returncode == 1
    assert "no rank 0 of mpipipe has begun" in job.stderr and "remedy: python -m mpipipe run script.py" in job.stderr


def test_a_launcher_that_drops_the_variable_is_named_as_a_cause(tmp_path):
    job = run("env", "-u", "MPIPIPE_ENDED", *ranks_of(tmp_path, 1, "print('done')"), folder=tmp_path)
    assert job.returncode == 1 and "done" in job.stdout and "hand on the variable MPIPIPE_ENDED" in job.stderr, job


def test_what_an_earlier_job_has_left_proves_nothing(tmp_path):
    old = tmp_path / f"{ended.PREFIX}old"
    old.write_text(f"begun 2 ranks on here\n{ended.last_line(str(old))}\n")
    assert run("true", folder=tmp_path).returncode == 1
    job = run("bash", "-c", f'cp {old} "$MPIPIPE_ENDED"', folder=tmp_path)  # as from a backup
    assert job.returncode == 1 and "2 ranks on here had begun" in job.stderr
    job = run("bash", "-c", f'ln -s {old} "$MPIPIPE_ENDED"; {" ".join(ON_PAPER)}', folder=tmp_path)
    assert job.returncode == 2 and old.read_text().count("\n") == 2, job


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["bash", "-c", "exit 3"], 3),
        (["bash", "-c", "exit 75"], 75),
        (["bash", "-c", "exit 255"], 255),
        (["bash", "-c", "kill -9 $$"], 137),
        (["bash", "-c", "kill -TERM $$"], 143),
        (["/no/such/file"], 127),
        (["/"], 126),
    ],
)
def test_other_exit_codes_pass(tmp_path, words, code):
    job = run(*words, folder=tmp_path)
    assert job.returncode == code
    assert ("cannot start" in job.stderr) == (code in (126, 127))


def test_a_command_that_reads_and_writes_does_so_itself(tmp_path):
    job = run("cat", stdin="one\ntwo", folder=tmp_path)
    assert job.stdout == "one\ntwo"


@pytest.mark.parametrize("closed", [">&-", "<&-"])
def test_a_launch_without_stdin_or_stdout_starts_its_command(tmp_path, closed):
    words = ["bash", "-c", f'exec "$@" {closed}', "bash", *LAUNCH, "--", "bash", "-c", "echo started >&2; exit 3"]
    job = subprocess.run(words, cwd=tmp_path, env=job_environment(), capture_output=True, text=True, timeout=60)
    assert job.returncode == 3 and job.stderr == "started\n", job


@pytest.mark.long
def test_each_command_of_one_process_leaves_a_proof_also_below_two_launches(tmp_path):
    assert run(*ON_PAPER, folder=tmp_path).returncode == 0
    assert run(*LAUNCH, "--", *ON_PAPER, folder=tmp_path).returncode == 0
    job = run("bash", "-c", f"{' '.join([*LAUNCH, '--', *ON_PAPER])}; exit 0", folder=tmp_path)
    assert job.returncode == 0
    job = run(*LAUNCH, "--", "true", folder=tmp_path)
    assert job.returncode == 1 and job.stderr.count("nothing proves") == 1, job


def test_two_jobs_below_one_launch_are_refused(tmp_path):
    words = " ".join(ON_PAPER)
    job = run("bash", "-c", f"{words} && {words}", folder=tmp_path)
    assert job.returncode == 2 and "another job has begun under the same `mpipipe launch`" in job.stderr


@pytest.mark.long
def test_processes_that_do_not_see_each_other_say_so_and_prove_nothing(tmp_path):
    """As under the mpiexec of another MPI: each is alone in COMM_WORLD."""

    def alone(*words):
        command = " ".join([sys.executable, "-m", "mpipipe", *words])
        both = "status=0; for SLURM_PROCID in 0 1; do export SLURM_PROCID; {} || status=$?; done; exit $status"
        return run("bash", "-c", both.format(command), folder=tmp_path, SLURM_STEP_NUM_TASKS="2")

    (tmp_path / "job.py").write_text("from mpipipe.job import runtime\nruntime.world()")
    for words in (["run", "job.py"], ["train", "--steps", "1"]):
        job = alone(*words)
        assert job.returncode == 1 and job.stderr.count("this process is alone in COMM_WORLD") == 1, job
        assert "another job has begun" not in job.stderr
    job = alone("--version")
    assert job.returncode == 1 and "processes that do not see each other" in job.stderr, job


def test_a_process_that_a_rank_starts_does_not_end_in_its_place(tmp_path):
    script = f"""
import ctypes, os, subprocess
assert "MPIPIPE_ENDED" not in os.environ
assert subprocess.run({ON_PAPER!r}, env={{**os.environ, "PMI_SIZE": "", "OMPI_COMM_WORLD_SIZE": ""}}).returncode == 0
if os.fork() == 0:
    raise SystemExit(0)
os.wait()
ctypes.CDLL(None)._exit(0)
"""
    job = run(*ranks_of(tmp_path, 1, script)[3:], folder=tmp_path)
    assert job.returncode == 1 and "1 rank on" in job.stderr, job


def test_a_folder_that_is_not_there_is_refused_before_anything_is_started(tmp_path):
    words = [*LAUNCH, "--marker-folder", "/no/such", "--", "touch", "started"]
    job = subprocess.run(words, cwd=tmp_path, env=job_environment(), capture_output=True, text=True, timeout=60)
    assert job.returncode == 2 and "--marker-folder" in job.stderr and list(tmp_path.iterdir()) == []


def test_a_node_that_does_not_see_the_folder_says_so_at_the_start(tmp_path):
    """It is not there any more once the ranks begin."""
    (tmp_path / "gone").mkdir()
    command = " ".join(ranks_of(tmp_path, 2, "print('started')"))
    words = [*LAUNCH, "--marker-folder", "gone", "--", "bash", "-c", f"rmdir gone; {command}"]
    job = subprocess.run(words, cwd=tmp_path, env=job_environment(), capture_output=True, text=True, timeout=60)
    assert job.returncode == 2 and "started" not in job.stdout, job
    assert job.stderr.count("the proof of this job's end cannot be written on ") == 1


@pytest.mark.parametrize("to", ["launcher", "group"])
def test_each_signal_comes_once(tmp_path, to):
    job = started(tmp_path, sys.executable, "-c", LISTENER)
    names = "TERM INT USR1 USR2 HUP CONT ALRM XCPU TSTP".split()
    try:
        wait_for(lambda: "up" in job.stdout, job)
        for count, name in enumerate([*names, "RTMIN"], 2):
            job.send(getattr(signal, f"SIG{name}"), to)
            wait_for(lambda count=count: len(job.stdout.split()) == count, job)
        job.send(signal.SIGQUIT, to)
        assert job.wait(20) and job.returncode == 128 + signal.SIGQUIT
        assert job.stdout.split() == ["up", *(f"SIG{name}" for name in names), str(int(signal.SIGRTMIN))]
    finally:
        job.end()


def test_ctrl_c_and_ctrl_z_at_a_terminal_reach_the_command_once(tmp_path):
    """The terminal is the command's: it may read there, and a Ctrl-Z stops both."""
    (tmp_path / "listener.py").write_text(LISTENER.replace("signal.SIGTSTP, ", ""))
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execvpe(sys.executable, [*LAUNCH, "--", sys.executable, "listener.py"], job_environment())
    said = b""

    def until(text):
        nonlocal said
        while text not in said:
            said += os.read(terminal, 1000)

    until(b"up")
    os.write(terminal, b"\x03")
    until(b"SIGINT")
    os.write(terminal, b"\x1a")
    assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
    os.kill(pid, signal.SIGCONT)
    until(b"SIGCONT")
    os.write(terminal, b"\x1c")  # Ctrl-\
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 128 + signal.SIGQUIT
    os.close(terminal)
    assert said.count(b"SIGINT") == 1


@pytest.mark.parametrize("handler", [":", "trap 'exit 130' INT"])
def test_ctrl_c_ends_the_shell_script_around_it_too(tmp_path, handler):
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        loop, job = 'for number in 1 2; do "$@"; done; echo on', f"{handler}; echo up; sleep 60"
        os.execvpe("bash", ["bash", "-c", loop, "bash", *LAUNCH, "--", "bash", "-c", job], job_environment())
    said = b""
    while b"up" not in said:
        said += os.read(terminal, 1000)
    os.write(terminal, b"\x03")
    try:
        while said.count(b"up") == 1:
            said += os.read(terminal, 1000)
    except OSError:  # both have ended
        pass
    finally:
        os.close(terminal)
    assert said.count(b"up") == 1 and b"on" not in said, said
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGINT


WAITING = "import time\nfrom mpipipe.job import runtime\nruntime.world().Barrier()\nprint('up', flush=True)\n"


@pytest.mark.long
def test_a_launcher_or_proxy_that_is_killed_is_no_success(tmp_path):
    """That of MPICH notices a dead proxy when the ranks have ended."""
    job = started(tmp_path, *ranks_of(tmp_path, 2, WAITING + "time.sleep(2)"))
    try:
        wait_for(lambda: job.stdout.count("up") == 2, job)
        processes = {pid: Path(f"/proc/{pid}/comm").read_text().strip() for pid in job.processes()}
        victims = [pid for pid, name in processes.items() if "proxy" in name or name.startswith(("prte", "mpiexec"))]
        job.send(signal.SIGKILL, max(victims))
        assert job.wait(30) and job.returncode != 0, job.stderr
    finally:
        job.end()


@pytest.mark.long
@pytest.mark.parametrize("to", ["launcher", "rank", "mpiexec"])
def test_a_job_that_is_stopped_and_goes_on_is_a_success(tmp_path, to):
    job = started(tmp_path, *ranks_of(tmp_path, 2, WAITING + "time.sleep(1.5)"))
    try:
        wait_for(lambda: job.stdout.count("up") == 2, job)
        pids = sorted(job.processes())
        target = {"launcher": "launcher", "mpiexec": pids[1], "rank": pids[-1]}[to]
        job.send(signal.SIGSTOP, target)
        time.sleep(2)
        assert job.returncode is None or to == "rank"
        job.send(signal.SIGCONT, target)
        assert job.wait(30) and job.returncode == 0, job.stderr
    finally:
        job.end()


def test_a_launch_that_is_killed_takes_its_job_along(tmp_path):
    job = started(tmp_path, *ranks_of(tmp_path, 2, WAITING + "time.sleep(60)"))
    try:
        wait_for(lambda: job.stdout.count("up") == 2, job)
        job.send(signal.SIGKILL, "launcher")
        assert job.wait(10) and not job.outlived_by(10)
    finally:
        job.end()


def test_a_script_that_ends_by_run_or_abort_is_run_as_a_whole_also_below_mpipipe_run(tmp_path):
    """What it hands over runs after the script itself, whose exit comes first."""
    script = "import sys\nfrom mpipipe.job.exit import run_or_abort\n"
    job = run(*ranks_of(tmp_path, 2, script + "sys.exit(run_or_abort(lambda: print('worked')))"), folder=tmp_path)
    assert job.returncode == 0 and job.stdout.split() == ["worked"] * 2, job
    job = run(*ranks_of(tmp_path, 2, script + "sys.exit(run_or_abort(lambda: sys.exit(3)))"), folder=tmp_path)
    assert job.returncode == 3, job
