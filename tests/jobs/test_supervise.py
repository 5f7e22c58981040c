"""jobs/supervise.sh: starts what failed again, as long as new checkpoints come, and stops when it is asked to."""

import signal
import subprocess
import time

import pytest
from support.launch import ROOT, job_environment

pytestmark = pytest.mark.jobs
# a job that makes one checkpoint in each start, as `steps` says, and ends with a code of `codes`; "silent" is a 0
# without the file that a rank 0 leaves
FAKE = """
echo start >> starts
n=$(wc -l < starts)
step=$(sed -n ${n}p steps) code=$(sed -n ${n}p codes)
folder=run/checkpoints/step-0000000$step
if [ -n "$step" ]; then mkdir -p $folder; touch $folder/manifest.json; fi
[ "$code" != 0 ] || touch run/finished
exit "${code/silent/0}"
"""


@pytest.fixture
def fake(tmp_path):
    """fake(steps, codes): the finished supervisor of such a job, and how many starts there were."""

    def run(steps, codes, *options, **variables):
        (tmp_path / "job.sh").write_text(FAKE)
        (tmp_path / "steps").write_text("\n".join(steps) + "\n")
        (tmp_path / "codes").write_text("\n".join(codes) + "\n")
        command = ["bash", ROOT / "jobs/supervise.sh", "bash", "job.sh", "--resume", "auto", "--out=run", *options]
        result = subprocess.run(
            command, cwd=tmp_path, env=job_environment(variables), capture_output=True, text=True, timeout=60
        )
        starts = tmp_path / "starts"
        return result, len(starts.read_text().splitlines()) if starts.exists() else 0

    return run


@pytest.mark.long
@pytest.mark.parametrize(
    ("steps", "codes", "restarts", "code", "starts", "says"),
    [
        (["1", "2", "3", ""], ["137", "1", "124", "0"], "1", 0, 4, "exit code 137; start 2 goes on from step-00000001"),
        (["1", "", "2", "", "3"], ["9", "9", "9", "9", "0"], "2", 0, 5, "start 2 goes on"),  # each one forgives
        (["1", "", "", "", ""], ["9"] * 5, "3", 9, 4, "3 starts in a row have ended without a new checkpoint"),
    ],
)
def test_failures_with_progress_are_followed_by_another_start(fake, steps, codes, restarts, code, starts, says):
    result, count = fake(steps, codes, MPIPIPE_RESTARTS=restarts)
    assert (result.returncode, count) == (code, starts) and says in result.stderr, result


def test_a_job_that_never_saves_is_given_up(fake):
    result, starts = fake([""] * 5, ["1"] * 5, MPIPIPE_RESTARTS="2")
    assert result.returncode == 1 and starts == 2, result
    assert "start 2 begins anew" in result.stderr and "(newest: none)" in result.stderr


def test_a_success_without_the_file_of_the_end_is_a_failure(fake):
    result, starts = fake(["1", "2"], ["silent", "0"])
    assert result.returncode == 0 and starts == 2, result
    assert "bash returned 0, but run/finished is not there" in result.stderr
    assert "exit code 1; start 2 goes on from step-00000001" in result.stderr


def test_a_loop_of_its_own_is_believed_and_its_files_stay(fake, tmp_path):
    (tmp_path / "finished").touch()
    result, starts = fake(["1"], ["silent"], CHECKPOINTS="checkpoints")
    assert result.returncode == 0 and starts == 1 and (tmp_path / "finished").exists(), result


@pytest.mark.parametrize("text", ["x", "0", "-1", "1.5", "3 4", "08", "9" * 30, "٣"])
def test_a_number_of_restarts_that_is_none_is_refused_before_anything_starts(fake, text):
    result, starts = fake([""], ["0"], MPIPIPE_RESTARTS=text)
    assert result.returncode == 2 and starts == 0, result
    assert f"MPIPIPE_RESTARTS is no number of starts\n  found: '{text}'\n" in result.stderr


def test_a_command_is_not_run_to_find_out_what_it_is(tmp_path):
    (tmp_path / "wrapper.sh").write_text('#!/bin/bash\necho "$*" >> starts\nexit 2\n')
    (tmp_path / "wrapper.sh").chmod(0o755)
    command = ["bash", ROOT / "jobs/supervise.sh", "./wrapper.sh", "--resume", "auto", "--out", "run"]
    subprocess.run(command, cwd=tmp_path, env=job_environment(), timeout=60)
    assert (tmp_path / "starts").read_text() == "--resume auto --out run\n"


def signalled(folder, command, file, number, **variables):
    """(exit code, stderr) of a supervisor that gets this signal once its job has made a file."""
    command = ["bash", ROOT / "jobs/supervise.sh", *command, "--resume", "auto", "--out", "run"]
    job = subprocess.Popen(command, cwd=folder, env=job_environment(variables), stderr=subprocess.PIPE, text=True)
    stop = time.monotonic() + 20
    while not (folder / file).exists():
        assert time.monotonic() < stop
        time.sleep(0.02)
    job.send_signal(number)
    error = job.communicate(timeout=20)[1]
    return job.returncode, error


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "beside", "code"),
    [("mpiexec", "prterun", 12), ("mpiexec", "hydra", 15), ("mpirun.openmpi", "x", 12), ("srun", "prterun", 15)],
)
def test_each_launcher_gets_the_signal_that_lets_its_ranks_save(tmp_path, name, beside, code):
    folder = tmp_path / "bin"
    folder.mkdir()
    text = "#!/bin/bash\ntrap 'exit 12' USR2; trap 'exit 15' TERM; touch up; while :; do sleep 0.05; done"
    for path in (folder / name, folder / beside):
        path.write_text(text)
        path.chmod(0o755)
    path = f"{folder}:{job_environment()['PATH']}"
    assert signalled(tmp_path, [name], "up", signal.SIGTERM, PATH=path)[0] == code


@pytest.mark.parametrize("code", ["2", "75"])
def test_a_job_that_is_refused_or_has_left_is_not_started_again(fake, tmp_path, code):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "finished").touch()
    result, starts = fake(["1", "2"], [code, "0"])
    assert result.returncode == int(code) and starts == 1, result
    assert (tmp_path / "run" / "finished").exists()


@pytest.mark.parametrize("options", [["--resume", "no"], ["--resume=step-1"]])
def test_a_job_that_would_begin_anew_each_time_is_refused(fake, options):
    result, starts = fake([""], ["1"], *options)
    assert result.returncode == 2 and starts == 0 and "--resume auto" in result.stderr


def test_a_signal_is_passed_on_and_nothing_is_started_again(tmp_path):
    """The job gets SIGTERM for SIGUSR2, since its launcher is not Open MPI's, and has time to save."""
    (tmp_path / "job.sh").write_text(
        "trap 'sleep 0.5; echo saved >> starts; exit 75' TERM; echo start >> starts; while :; do sleep 0.05; done"
    )
    code, error = signalled(tmp_path, ["bash", "job.sh"], "starts", signal.SIGUSR2)
    assert code == 75 and (tmp_path / "starts").read_text() == "start\nsaved\n", error
    assert "supervised job ended exit=75 on SIGUSR2" in error
