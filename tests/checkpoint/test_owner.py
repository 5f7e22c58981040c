"""One owner of a folder: others wait, are refused or take over, one of them; an owner that has lost it notices."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace

import pytest
from support.harness import on_rank_0
from support.saved_model import trained

from mpipipe import Mesh, checkpoint
from mpipipe.checkpoint import folders, owner, tensor_files
from mpipipe.checkpoint.owner import OwnerRecord
from mpipipe.errors import OwnerError, StorageError
from mpipipe.job.group import group_of

DEAD = "0123456789abcdef"


@pytest.fixture
def quick(monkeypatch):
    """The time of a job that is watched by people in a hurry."""
    monkeypatch.setattr(owner, "SETTLING_SECONDS", 0.1)


@pytest.fixture
def sleeper():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def record(token=DEAD, process=None, **facts):
    """What a job says that has this process, by default one that has ended."""
    number = 2**22 + 1 if process is None else process  # no process has so high a number
    start = owner.start_of(number) or "1"
    return replace(OwnerRecord.of_this_job(), token=token, process=number, start=start, **facts)


def leave(folder, left, name="owner.json"):
    (folder / name).write_text("" if left is None else json.dumps(asdict(left)))


def machine(**changed):
    """The name of this machine, with another host or boot, or another space of processes."""
    facts = dict(zip(("host", "boot", "space"), owner.this_machine().split(), strict=True))
    return " ".join((facts | changed).values())


def taken(folder, own=None):
    """Make the folder this process's."""
    owner.take(folder / "owner.json", own or record("f" * 16, os.getpid()))


def token_in(folder):
    return owner.read(folder / "owner.json").token


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
    "the number of a dead process": lambda folder: leave(folder, replace(record(), process=os.getpid(), start="1")),
    "a token that is a path": lambda folder: leave(folder, record(token="/../../evil")),
    "before the host was started again": lambda folder: leave(folder, record(machine=machine(boot="before"))),
    **{
        f"cut short: {content!r}": lambda folder, content=content: (folder / "owner.json").write_bytes(content)
        for content in (b"", b"{", b"[]", b'{"token": 1}', b"\xff" * 10)
    },
}


@pytest.mark.parametrize("left", LEFT)
def test_what_a_dead_job_has_left_is_taken_over_and_leads_nowhere_else(tmp_path, quick, left):
    (tmp_path / "run").mkdir()
    leave(tmp_path / "run", record())
    LEFT[left](tmp_path / "run")
    taken(tmp_path / "run")
    assert token_in(tmp_path / "run") == "f" * 16
    assert os.listdir(tmp_path) == ["run"] and os.listdir(tmp_path / "run") == ["owner.json"]


def test_an_owner_that_lives_is_no_zombie_and_keeps_its_folder(tmp_path, quick, sleeper):
    leave(tmp_path, record(process=sleeper.pid))
    with pytest.raises(OwnerError, match="another job owns the folder") as caught:
        taken(tmp_path)
    assert f"process {sleeper.pid} on " in caught.value.found and caught.value.found.endswith("/owner.json")
    assert "choose another folder" in caught.value.remedy and os.listdir(tmp_path) == ["owner.json"]
    assert token_in(tmp_path) == DEAD
    sleeper.send_signal(signal.SIGKILL)  # nobody waits for it: it stays in the table of processes
    while owner.start_of(sleeper.pid) is not None:
        time.sleep(0.01)
    taken(tmp_path)
    assert token_in(tmp_path) == "f" * 16


@pytest.mark.parametrize("error", [FileNotFoundError, PermissionError])
def test_an_owner_of_another_user_whose_processes_are_hidden_is_not_taken_for_dead(tmp_path, quick, monkeypatch, error):
    """By a /proc with hidepid=2 or 1, as on many login nodes."""
    left, read_text = record(process=os.getppid()), owner.Path.read_text

    def hidden(path, *words, **options):
        if path.name == "stat" and path.parent.name == str(os.getppid()):
            raise error(str(path))
        return read_text(path, *words, **options)

    monkeypatch.setattr(owner.Path, "read_text", hidden)
    leave(tmp_path, left)
    with pytest.raises(OwnerError, match="another job owns the folder"):
        taken(tmp_path)
    assert token_in(tmp_path) == DEAD


@pytest.mark.parametrize("left", [{"machine": machine(host="b"), "host": "b"}, {"machine": machine(space="b")}])
def test_an_owner_on_another_host_is_refused_unless_it_is_an_earlier_start_of_the_same_job(tmp_path, quick, left):
    """So it is in another container of this host."""
    again = replace(record("f" * 16, os.getpid()), job="SLURM_JOB_ID 17", starts=1)
    leave(tmp_path, record(job="SLURM_JOB_ID 17", **left))
    for other in (record("f" * 16), replace(again, starts=0), replace(again, job="SLURM_JOB_ID 18")):
        with pytest.raises(OwnerError, match=r"another job owns the folder(.|\n)*has died on another host, remove"):
            taken(tmp_path, other)
        assert token_in(tmp_path) == DEAD
    taken(tmp_path, again)
    assert token_in(tmp_path) == "f" * 16


def test_a_job_that_its_disk_kept_while_another_took_over_is_refused(tmp_path, quick, monkeypatch, sleeper):
    leave(tmp_path, record())
    create = owner._create

    def slow(path, own):
        """Write the second file of this job after another job has taken the folder over."""
        if path.name != "owner.json":
            leave(tmp_path, record("e" * 16, sleeper.pid))
        return create(path, own)

    monkeypatch.setattr(owner, "_create", slow)
    with pytest.raises(OwnerError, match="another job owns the folder"):
        taken(tmp_path)
    assert token_in(tmp_path) == "e" * 16 and os.listdir(tmp_path) == ["owner.json"]


@pytest.mark.parametrize("file", ["owner.json", f"owner.json.{'f' * 16}"])
def test_a_folder_that_another_job_releases_while_this_one_takes_it_over_is_this_jobs(
    tmp_path, quick, monkeypatch, file
):
    """Before the rename of this job's file, or while it settles."""
    leave(tmp_path, record())
    releases = [tmp_path / "owner.json"]

    def release():
        if releases:
            releases.pop().unlink()

    if file == "owner.json":
        monkeypatch.setattr(owner.time, "sleep", lambda seconds: release())
    else:
        create = owner._create
        monkeypatch.setattr(owner, "_create", lambda path, own: (path.name == file and release(), create(path, own))[1])
    taken(tmp_path)
    assert token_in(tmp_path) == "f" * 16 and os.listdir(tmp_path) == ["owner.json"]
    assert not releases


@pytest.mark.long
def test_of_many_jobs_that_take_over_at_once_one_wins(tmp_path):
    """Processes of their own, again and again; each says by its exit code whether it owns the folder."""
    for turn in range(3):
        leave(tmp_path, record())
        begin, children = time.time() + 0.2, []
        for number in range(6):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    own = record(f"{turn:08x}{number:08x}", os.getpid())
                    time.sleep(max(0.0, begin - time.time()))
                    taken(tmp_path, own)
                    time.sleep(2.5)  # others must find it alive
                    code = 0 if token_in(tmp_path) == own.token else 3
                except OwnerError:
                    code = 2
                finally:
                    os._exit(code)
            children.append(child)
        codes = sorted(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)
        assert codes == [0, 2, 2, 2, 2, 2]


def test_the_job_of_the_scheduler(monkeypatch):
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    for environment, expected in (
        ({}, ("", 0)),
        ({"SLURM_JOB_ID": "17"}, ("SLURM_JOB_ID 17", 0)),
        ({"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": "2"}, ("SLURM_JOB_ID 17", 2)),
    ):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        own = OwnerRecord.of_this_job()
        assert (own.job, own.starts) == expected


def test_the_owner_is_the_job_and_leaves_nothing(comm, mpi_tmp_path):
    folder = mpi_tmp_path / "run"
    group = group_of(comm)
    owned = owner.take_folder(folder, group, folders.explained)
    assert owner.owner_of(folder / "b") is owned and owner.owner_of(folder.parent) is None
    assert token_in(folder) == owned.token
    shared = owner.take_folder(folder / "b", group, folders.explained)
    assert shared is owned
    for _ in range(2):
        comm.Barrier()
        assert (folder / "owner.json").exists()
        comm.Barrier()
        owned.release()
    comm.Barrier()
    assert os.listdir(mpi_tmp_path) == [] and owner.owner_of(folder) is None


def test_a_folder_that_cannot_be_made_or_is_another_jobs_is_an_error_on_all_ranks(comm, mpi_tmp_path, quick):
    if comm.rank == 0:
        (mpi_tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file/run"):
        owner.take_folder(mpi_tmp_path / "file" / "run", group_of(comm), folders.explained)
    on_rank_0(comm, leave, mpi_tmp_path, record(process=os.getppid()))
    with pytest.raises(OwnerError, match="another job owns the folder"):
        owner.take_folder(mpi_tmp_path, group_of(comm), folders.explained)
    assert owner.owner_of(mpi_tmp_path) is None


@pytest.mark.parametrize("when", ["before", "while"])
def test_a_saver_that_has_lost_its_folder_ends_and_touches_nothing(comm, mpi_tmp_path, monkeypatch, when):
    """As that of a job which was stopped, and wakes up after another has taken over."""

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
