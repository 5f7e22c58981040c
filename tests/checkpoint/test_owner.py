"""One owner of a folder: others wait, are refused or take over, one of them; an owner that has lost it notices."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from support.saved_model import trained

from mpipipe import Mesh, checkpoint
from mpipipe.checkpoint import owner, tensor_files
from mpipipe.checkpoint.owner import OwnerRecord, Taking, this_process
from mpipipe.errors import OwnerError, StorageError
from mpipipe.job.exit import Stop
from mpipipe.job.group import group_of

DEAD = "0123456789abcdef"


@pytest.fixture
def quick(monkeypatch):
    """Times of a job that is watched by people in a hurry."""
    times = {"STALE_SECONDS": 0.4, "LIVING_SECONDS": 0.2, "PREDECESSOR_SECONDS": 0.6, "LOOK_SECONDS": 0.02}
    for name, seconds in times.items():
        monkeypatch.setattr(owner, name, seconds)
    monkeypatch.setattr(owner, "FRESH_SECONDS", 0.0)


@pytest.fixture
def sleeper():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def record(token=DEAD, process=None, **facts):
    """What a job says that has this process, by default one that has ended."""
    where, _, _ = this_process()
    number = 2**22 + 1 if process is None else process  # no process has so high a number
    own = OwnerRecord.of_this_job(token, [(where, number, owner._start_of(number) or "1")])
    return replace(own, **facts)


def leave(folder, left):
    (folder / "owner.json").write_bytes(left.content())


@contextmanager
def renewing(folder, left):
    """An owner with this record that lives as long as the block."""
    ended = threading.Event()
    leave(folder, left)

    def renew(lives=left):
        descriptor = os.open(folder / "owner.json", os.O_RDWR)
        while not ended.wait(0.1):
            lives = lives.renewed_now()
            owner.write_over(descriptor, lives.content())
        os.close(descriptor)

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def taken(folder, own=None):
    """Go on until the folder is this process's, or the try ends."""
    taking = Taking(folder, own or record("f" * 16, os.getpid()))
    while not taking.ended(0.01):
        pass
    if taking.descriptor >= 0:
        os.close(taking.descriptor)
    return taking


def record_in(folder):
    return OwnerRecord.parse((folder / "owner.json").read_bytes())


def token_in(folder):
    return record_in(folder).token


def wait_until(is_so):
    stop = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < stop
        time.sleep(0.01)


def test_a_dead_owner_on_this_host_is_told_of_and_taken_over_at_once(tmp_path, capfd):
    leave(tmp_path, record(job="SLURM_JOB_ID 17"))
    start = time.monotonic()
    taken(tmp_path)
    assert time.monotonic() - start < 5 and token_in(tmp_path) == "f" * 16
    assert os.listdir(tmp_path) == ["owner.json"]
    told = capfd.readouterr().err
    assert "was owned by SLURM_JOB_ID 17, process 4194305 on" in told and "dead: taken over" in told
    assert told.count("\n") == 1


LEFT = {
    "the number of a dead process": lambda folder: leave(folder, replace(record(), processes=((os.getpid(), "1"),))),
    "a token that is a path": lambda folder: leave(folder, record(token="/../../evil")),
    "by a job that died while it took over": lambda folder: (
        leave(folder, record()),
        (folder / f"owner.json.after-{DEAD}").write_bytes(record("e" * 16).content()),
    ),
    **{
        f"cut short: {content!r}": lambda folder, content=content: (folder / "owner.json").write_bytes(content)
        for content in (b"", b"{", b"[]", b'{"token": 1}', b"\xff" * 10)
    },
}


@pytest.mark.parametrize("left", LEFT)
def test_what_a_dead_job_has_left_is_taken_over_and_leads_nowhere_else(tmp_path, quick, left):
    (tmp_path / "run").mkdir()
    LEFT[left](tmp_path / "run")
    taken(tmp_path / "run")
    assert token_in(tmp_path / "run") == "f" * 16
    assert os.listdir(tmp_path) == ["run"] and os.listdir(tmp_path / "run") == ["owner.json"]


def test_an_owner_that_lives_is_waited_for_and_then_the_job_is_refused(tmp_path, capfd, quick, sleeper):
    leave(tmp_path, record(process=sleeper.pid))
    with pytest.raises(OwnerError, match="another job owns the folder") as caught:
        taken(tmp_path)
    assert f"process {sleeper.pid} on " in caught.value.found and "choose another folder" in caught.value.remedy
    assert token_in(tmp_path) == DEAD and os.listdir(tmp_path) == ["owner.json"]
    assert capfd.readouterr().err.count("waits up to 0.2 s for it to leave") == 1


@pytest.mark.parametrize("how", ["release", "kill", "zombie"])
def test_an_owner_that_leaves_meanwhile_is_followed(tmp_path, monkeypatch, sleeper, how):
    monkeypatch.setattr(owner, "LIVING_SECONDS", 60.0)
    leave(tmp_path, record(process=sleeper.pid))

    def go():
        if how == "release":
            (tmp_path / "owner.json").unlink()
        else:
            sleeper.send_signal(signal.SIGKILL)  # nobody waits for it: it stays in the table of processes
        if how == "kill":
            sleeper.wait()

    timer = threading.Timer(0.3, go)
    timer.start()
    taken(tmp_path)
    timer.join()
    assert token_in(tmp_path) == "f" * 16


@pytest.mark.parametrize("error", [FileNotFoundError, PermissionError])
def test_an_owner_of_another_user_whose_processes_are_hidden_is_not_taken_for_dead(tmp_path, quick, monkeypatch, error):
    """By a /proc with hidepid=2 or 1, as on many login nodes: its file says whether it lives."""
    left, read_text = record(process=os.getppid()), owner.Path.read_text

    def hidden(path, *words, **options):
        if path.name == "stat" and path.parent.name == str(os.getppid()):
            raise error(str(path))
        return read_text(path, *words, **options)

    monkeypatch.setattr(owner.Path, "read_text", hidden)
    with renewing(tmp_path, left), pytest.raises(OwnerError, match="another job owns the folder"):
        taken(tmp_path)
    assert token_in(tmp_path) == DEAD
    taken(tmp_path)  # which is not renewed any more
    assert token_in(tmp_path) == "f" * 16


def test_an_owner_on_another_host_that_renews_its_file_is_alive_and_dead_once_that_stays_as_it_is(
    tmp_path, quick, capfd
):
    with renewing(tmp_path, record(machine="another")), pytest.raises(OwnerError, match="another job owns"):
        taken(tmp_path)
    assert token_in(tmp_path) == DEAD
    start = time.monotonic()
    taken(tmp_path)
    assert time.monotonic() - start >= 0.4 and token_in(tmp_path) == "f" * 16
    assert "looks for 0.4 s whether it is alive" in capfd.readouterr().err


def test_a_file_system_that_hangs_makes_no_owner_stale(tmp_path, monkeypatch):
    """Time counts only where it was looked at the file meanwhile."""
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: None)
    monkeypatch.setattr(owner, "time", clock)
    leave(tmp_path, record(machine="another"))
    taking = Taking(tmp_path, record("f" * 16, os.getpid()))
    for _ in range(50):
        now[0] += 100.0
        assert not taking.ended(0.0)
    while not taking.ended(0.0):
        now[0] += owner.LOOK_SECONDS
    assert now[0] - 5000 == pytest.approx(owner.STALE_SECONDS - 50 * 0.4, abs=1.0)
    os.close(taking.descriptor)


@pytest.mark.long
def test_of_many_jobs_that_take_over_at_once_one_wins(tmp_path, quick):
    """Processes of their own, again and again; each says by its exit code whether it owns the folder."""
    for turn in range(5):
        leave(tmp_path, record())
        begin, children = time.time() + 0.2, []
        for number in range(6):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    taking = Taking(tmp_path, record(f"{turn:08x}{number:08x}", os.getpid()))
                    time.sleep(max(0.0, begin - time.time()))
                    while not taking.ended(0.001):
                        pass
                    time.sleep(1.0)  # others must find it alive
                    code = 0 if token_in(tmp_path) == taking.record.token else 3
                except OwnerError:
                    code = 2
                finally:
                    os._exit(code)
            children.append(child)
        codes = sorted(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)
        assert codes == [0, 2, 2, 2, 2, 2]


def test_an_earlier_start_of_the_same_job_is_waited_for_longer_and_may_be_tried_again(tmp_path, quick, sleeper):
    leave(tmp_path, record(process=sleeper.pid, job="SLURM_JOB_ID 17", starts="0"))
    again = replace(record("f" * 16, os.getpid()), job="SLURM_JOB_ID 17", starts="1")
    start = time.monotonic()
    taking = taken(tmp_path, again)
    assert time.monotonic() - start > 0.6 and taking.descriptor < 0
    assert "earlier start of this job" in taking.stop and token_in(tmp_path) == DEAD
    with pytest.raises(OwnerError):  # a second step of the same start is another job
        taken(tmp_path, replace(again, starts="0"))


def test_the_job_of_the_scheduler():
    for environment, expected in (
        ({}, ("", "")),
        ({"SLURM_JOB_ID": "17"}, ("SLURM_JOB_ID 17", "0")),
        ({"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": "2"}, ("SLURM_JOB_ID 17", "2")),
        ({"PBS_JOBID": "17.server"}, ("PBS_JOBID 17.server", "")),
        ({"LSB_JOBID": "17", "LSB_JOBINDEX": "3"}, ("LSB_JOBID 17[3]", "")),
        ({"LSB_JOBID": "17", "LSB_JOBINDEX": "0"}, ("LSB_JOBID 17", "")),
    ):
        assert owner._job(environment) == expected


@contextmanager
def failed(folder):
    try:
        yield
    except OSError as error:
        raise StorageError(f"{folder}: {error}") from error


def test_the_owner_is_the_job_and_leaves_nothing(comm, mpi_tmp_path):
    folder = mpi_tmp_path / "a" / "run"
    group = group_of(comm)
    owned = owner.take_folder(folder, group, failed)
    assert owner.owner_of(folder / "b") is owned and owner.owner_of(folder.parent) is None
    assert token_in(folder) == owned.token
    shared = owner.share_folder(folder / "b", group, failed)
    assert shared is owned
    for _ in range(2):
        comm.Barrier()
        assert (folder / "owner.json").exists()
        comm.Barrier()
        owned.release()
    comm.Barrier()
    assert os.listdir(mpi_tmp_path) == [] and owner.owner_of(folder) is None


def test_a_folder_that_cannot_be_made_or_is_another_jobs_is_an_error_on_all_ranks(
    comm, mpi_tmp_path, quick, monkeypatch
):
    if comm.rank == 0:
        (mpi_tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file/run: "):
        owner.take_folder(mpi_tmp_path / "file" / "run", group_of(comm), failed)
    if comm.rank == 0:
        leave(mpi_tmp_path, record(process=os.getppid(), job="SLURM_JOB_ID 17", starts="0"))
    comm.Barrier()
    with pytest.raises(OwnerError, match="another job owns the folder"):
        owner.take_folder(mpi_tmp_path, group_of(comm), failed)
    for name, value in {"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Stop, match="earlier start") as caught:
        owner.take_folder(mpi_tmp_path, group_of(comm), failed)
    assert caught.value.code == 1 and owner.owner_of(mpi_tmp_path) is None


def test_an_owner_writes_once_in_ten_seconds_and_into_its_own_file_alone(comm, mpi_tmp_path, monkeypatch):
    assert owner.RENEW_SECONDS >= 10.0
    written, original = [], owner.write_over
    monkeypatch.setattr(owner, "RENEW_SECONDS", 0.2)
    monkeypatch.setattr(
        owner, "write_over", lambda *arguments: (written.append(time.monotonic()), original(*arguments))
    )
    owned = owner.take_folder(mpi_tmp_path, group_of(comm), failed)
    if comm.rank == 0:
        wait_until(lambda: len(written) >= 3)
        assert min(np.diff(written)) >= 0.19
        assert int(record_in(mpi_tmp_path).renewals) >= 2
        (mpi_tmp_path / "owner.json").rename(mpi_tmp_path / "former")  # as by a job that takes over
        leave(mpi_tmp_path, record())
        seen = len(written)
        wait_until(lambda: len(written) >= seen + 2)
    comm.Barrier()
    assert token_in(mpi_tmp_path) == DEAD and (comm.rank == 0 or written == [])
    comm.Barrier()
    owned.release()
    comm.Barrier()
    assert token_in(mpi_tmp_path) == DEAD  # nor is another job's file removed


@pytest.mark.parametrize("when", ["before", "while"])
def test_a_saver_that_has_lost_its_folder_ends_and_touches_nothing(comm, mpi_tmp_path, monkeypatch, when):
    """As that of a job which was stopped, and wakes up after another has taken over."""
    monkeypatch.setattr(owner, "FRESH_SECONDS", 0.0)

    def lose():
        if comm.rank == 0:
            leave(mpi_tmp_path, record())
            theirs = mpi_tmp_path / "step-00000002"
            theirs.mkdir(exist_ok=True)
            for rank in range(comm.size):
                (theirs / f"part-{rank}.safetensors").write_text("theirs")
        comm.Barrier()

    began, original = threading.Event(), tensor_files.crc32
    with Mesh(comm, pipe=comm.size) as mesh:
        stages, optimizer = trained(mesh)
        with pytest.raises(OwnerError, match="another job has taken the folder"):
            with checkpoint.Saver(mpi_tmp_path, mesh, stages, optimizer) as saver:
                saver.save(1)
                saver.wait()
                if when == "before":
                    lose()
                    saver.save(2)
                monkeypatch.setattr(tensor_files, "crc32", lambda *some: (began.wait(60), original(*some))[1])
                saver.save(2)
                lose()
                began.set()
                saver.wait()
    comm.Barrier()
    contents = {path.name: path.read_text() for path in (mpi_tmp_path / "step-00000002").iterdir()}
    ours = {name for name in contents if name.endswith(".partial")}
    assert {contents[name] for name in contents.keys() - ours} == {"theirs"} and ours == set()
    assert token_in(mpi_tmp_path) == DEAD
