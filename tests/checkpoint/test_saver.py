"""Checkpoints written behind a training: they hold the step at which `save` was called, to the bit, or are absent."""

import os
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from support.saved_model import MODEL, load_weights, trained, values

from mpipipe import Mesh, Preemption, arrays, checkpoint, nn, optim
from mpipipe.checkpoint import contents, folders, owner, tensor_files
from mpipipe.errors import ArgumentError, NonFiniteError, StorageError
from mpipipe.job.consensus import agreed_by
from mpipipe.job.group import group_of
from mpipipe.language.models import weights

FULL = OSError(28, "No space left on device")
PATIENCE = 60  # seconds: far more than anything here takes


def names_in(folder):
    """What is in a folder of checkpoints, but for the file of its owner."""
    return [name for name in os.listdir(folder) if name != "owner.json"]


KINDS = {
    "one stage a rank, tied": dict(pipe=0),
    "two stages a rank, tied": dict(pipe=0, chunks=2),
    "replicas of two stages": dict(pipe=2, chunks=2),
    "bfloat16": dict(pipe=0, dtype="bfloat16"),
}
ON_A_GPU = ["one stage a rank, tied", "bfloat16"]


def shape(comm, pipe=0, **keys):
    """(extent of the mesh, keys of `trained`)"""
    pipe = pipe or comm.size
    if comm.size % pipe:
        pytest.skip(f"needs a multiple of {pipe} ranks")
    return pipe, keys


@contextmanager
def saving(comm, root, pipe=1, **keys):
    """A saver of a fresh model."""
    with Mesh(comm, pipe=pipe) as mesh:
        stages, optimizer = trained(mesh)
        with checkpoint.Saver(root, mesh, stages, optimizer, **keys) as saver:
            yield saver


def change(stages, optimizer, steps=1):
    """Steps that change every array."""
    for _ in range(steps):
        for stage in stages:
            host = np.random.default_rng(optimizer.steps).standard_normal(stage.gradients.flat.size)
            wide = host.astype(stage.gradients.flat.dtype)
            arrays.copy_into(stage.gradients.flat, arrays.upload(wide) if stage.device == "cuda" else wide)
        optimizer.step()


def raising(error):
    """A function that raises this."""

    def function(*arguments):
        raise error

    return function


class Gate:
    """Every piece that a thread is about to read, or each fsync, waits until the gate is open."""

    def __init__(self):
        self.opened, self.came = threading.Event(), threading.Event()

    def wait(self):
        if threading.current_thread() is not threading.main_thread():
            self.came.set()
            assert self.opened.wait(PATIENCE)

    def open_soon(self):
        threading.Timer(0.2, self.opened.set).start()


def preceded(monkeypatch, owner, name, what):
    """Let a function of a module call `what` before."""
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *arguments: (what(), original(*arguments))[1])


def gate_before(owner, name):
    """A fixture: a gate before every call of this function."""

    @pytest.fixture
    def gate(monkeypatch):
        made = Gate()
        preceded(monkeypatch, owner, name, made.wait)
        yield made
        made.opened.set()

    return gate


reading, forcing = gate_before(tensor_files, "crc32"), gate_before(os, "fsync")


@pytest.fixture
def slow_reads(monkeypatch):
    """Reading takes far longer than a step."""
    preceded(monkeypatch, tensor_files, "crc32", lambda: time.sleep(2e-3))
    monkeypatch.setattr(tensor_files, "PIECE_BYTES", 256)


def check_bits(comm, root, kind, **more):
    """Steps right behind each `save`, then a load of each checkpoint: it has the values of the moment of its save."""
    pipe, keys = shape(comm, **{**KINDS[kind], **more})
    right = {}
    with Mesh(comm, pipe=pipe) as mesh:
        stages, optimizer = trained(mesh, **keys)
        with checkpoint.Saver(root, mesh, stages, optimizer) as saver:
            for step in range(1, 4):
                change(stages, optimizer)
                now = contents.contents_of(stages, optimizer)
                right[step] = {name: arrays.copy(array) for name, array in now.items()}  # the host waits for no GPU
                assert saver.save(step, {"step": step}) == Path(root) / f"step-{step:08d}"
                assert saver.in_flight
                change(stages, optimizer, 2)
        assert not saver.in_flight
        for step, expected in right.items():
            fresh, other = trained(mesh, **{**keys, "seed": 9})
            found = checkpoint.load(Path(root) / f"step-{step:08d}", mesh, fresh, other)
            assert (found.step, found.state, other.steps) == (step, {"step": step}, 3 * step - 2)
            got = values(fresh, other)
            for name, array in expected.items():
                np.testing.assert_array_equal(got[name], arrays.download(array), name)


@pytest.mark.long
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ON_A_GPU])
def test_a_checkpoint_has_the_bits_of_the_moment_of_its_save_whenever_the_optimizer_comes(
    comm, mpi_tmp_path, slow_reads, kind
):
    check_bits(comm, mpi_tmp_path, kind)


@pytest.mark.parametrize("kind", [ON_A_GPU[0], *(pytest.param(kind, marks=pytest.mark.long) for kind in ON_A_GPU[1:])])
def test_from_a_gpu_too_whose_work_comes_late(gpu, comm, mpi_tmp_path, slow_reads, kind):
    check_bits(comm, mpi_tmp_path, kind, device="cuda")


def test_save_returns_before_anything_is_read_and_the_optimizer_waits_for_the_reading(comm, mpi_tmp_path, reading):
    """Layers of half precision compute with a copy, so only the optimizer has to wait."""
    with Mesh(comm) as mesh:
        stage = nn.Stage([nn.Linear(8, 8)], dtype="bfloat16")
        with checkpoint.Saver(mpi_tmp_path / "half", mesh, [stage], optim.AdamW([stage], 0.1)) as saver:
            saver.save(1)
            stage.refresh()
            y, _ = stage.forward(np.ones((2, 8), arrays.dtype("bfloat16")))
            assert not reading.opened.is_set() and y.shape == (2, 8)
            reading.open_soon()
    comm.Barrier()
    reading.opened.clear()
    with saving(comm, mpi_tmp_path) as saver:
        saver.save(1)
        assert saver.poll() is None and saver.waited == 0
        assert not reading.opened.is_set()
        reading.open_soon()
        saver.optimizer.step()
        assert reading.opened.is_set() and saver.waited > 0


def test_the_optimizer_does_not_wait_for_the_disk_and_poll_never_does(comm, mpi_tmp_path, forcing):
    with saving(comm, mpi_tmp_path) as saver:
        path = saver.save(1)
        for _ in range(3):
            change(saver.stages, saver.optimizer)
            assert saver.poll() is None
        assert forcing.came.wait(PATIENCE) and not forcing.opened.is_set()
        assert checkpoint.newest(mpi_tmp_path) is None and saver.in_flight
        comm.Barrier()
        forcing.opened.set()
        assert saver.wait() == path == checkpoint.newest(mpi_tmp_path)


def test_the_program_may_change_its_folder_while_a_checkpoint_is_written(comm, mpi_tmp_path, forcing, monkeypatch):
    monkeypatch.chdir(mpi_tmp_path)
    with saving(comm, "run") as saver:
        saver.save(1)
        assert forcing.came.wait(PATIENCE)
        monkeypatch.chdir("/")
        comm.Barrier()
        forcing.opened.set()
        saver.wait()
    assert checkpoint.newest(mpi_tmp_path / "run").name == "step-00000001"


class Plain:
    """A stage and an optimizer of one's own, which nobody can tell of a save."""

    def __init__(self, rank):
        self.parameters = {f"own{rank}": np.zeros(100)}
        self.steps = 0

    def named_state(self):
        return {}


@pytest.mark.parametrize("own", ["no optimizer", "own optimizer", "own stage"])
def test_where_nobody_could_tell_save_waits_until_all_is_read(comm, mpi_tmp_path, reading, own):
    with Mesh(comm) as mesh:
        stages, optimizer = trained(mesh)
        if own == "own stage":
            stages = [*stages, Plain(comm.rank)]
        optimizer = {"no optimizer": None, "own optimizer": Plain(0), "own stage": optimizer}[own]
        with checkpoint.Saver(mpi_tmp_path, mesh, stages, optimizer) as saver:
            reading.open_soon()
            saver.save(1)
            assert reading.opened.is_set()


@pytest.mark.parametrize("what", ["checkpoint", "parameters alone", "weights"])
def test_a_load_into_what_is_being_saved_waits_until_it_is_read(comm, mpi_tmp_path, reading, what):
    with Mesh(comm) as mesh:
        stages, optimizer = trained(mesh)
        reading.opened.set()
        change(stages, optimizer)
        checkpoint.save(mpi_tmp_path / "other", mesh, stages, optimizer, step=1)
        weights.save(mpi_tmp_path / "weights", MODEL, stages, mesh)
        change(stages, optimizer)
        right = values(stages, optimizer)
        comm.Barrier()
        reading.opened.clear()
        with checkpoint.Saver(mpi_tmp_path / "run", mesh, stages, optimizer) as saver:
            saver.save(2)
            reading.open_soon()
            if what == "weights":
                load_weights(mpi_tmp_path / "weights", stages)
            else:
                checkpoint.load(mpi_tmp_path / "other", mesh, stages, optimizer if what == "checkpoint" else None)
            assert reading.opened.is_set() and saver.waited > 0
        fresh, other = trained(mesh, seed=9)
        checkpoint.load(mpi_tmp_path / "run", mesh, fresh, other)
        for name, array in values(fresh, other).items():
            np.testing.assert_array_equal(array, right[name], name)


def test_a_further_save_waits_until_the_one_before_is_whole(comm, mpi_tmp_path, forcing):
    with saving(comm, mpi_tmp_path, keep=1) as saver:
        saver.save(1)
        forcing.open_soon()
        last = saver.save(2)
        assert forcing.opened.is_set() and checkpoint.newest(mpi_tmp_path) is not None
    comm.Barrier()
    assert names_in(mpi_tmp_path) == [last.name]


@pytest.mark.parametrize("error", [FULL, SystemExit(3)])
def test_whatever_ends_a_thread_of_one_rank_is_raised_on_all_and_the_next_save_begins_anew(
    comm, mpi_tmp_path, monkeypatch, error
):
    with saving(comm, mpi_tmp_path, pipe=comm.size) as saver:
        first = saver.save(1)
        saver.wait()
        with monkeypatch.context() as patch:
            if comm.rank == comm.size - 1:
                patch.setattr(tensor_files, "crc32", raising(error))
            saver.save(2)
            kind = StorageError if isinstance(error, OSError) else ArgumentError
            with pytest.raises(kind, match=f"rank {comm.size - 1}: " if comm.size > 1 else None) as caught:
                while saver.in_flight:
                    saver.poll()
                    change(saver.stages, saver.optimizer)
        assert caught.type is kind and str(error) in str(caught.value)
        comm.Barrier()
        assert names_in(mpi_tmp_path) == [first.name]
        third = saver.save(3)
        assert saver.wait() == third
    assert sorted(names_in(mpi_tmp_path)) == [first.name, third.name]


def test_a_rank_whose_thread_was_given_up_is_not_the_one_that_is_blamed(pair, mpi_tmp_path, monkeypatch, slow_reads):
    with saving(pair, mpi_tmp_path, pipe=2) as saver:
        if pair.rank == 1:
            monkeypatch.setattr(tensor_files, "PIECE_BYTES", 1 << 20)  # it fails at once, and rank 0 is still reading
            monkeypatch.setattr(tensor_files, "crc32", raising(FULL))
        saver.save(1)
        if pair.rank == 1:
            assert saver._task.work.wait(PATIENCE)
        pair.Barrier()
        with pytest.raises(StorageError, match=r"rank 1: the checkpoint cannot be written: .*No space left"):
            while saver.in_flight:
                saver.poll()


def test_an_error_that_all_ranks_raise_leaves_the_checkpoint_whole(comm, mpi_tmp_path, forcing):
    with pytest.raises(NonFiniteError), saving(comm, mpi_tmp_path) as saver:
        path = saver.save(1)
        forcing.open_soon()
        raise agreed_by(NonFiniteError("the loss is NaN"), group_of(saver.mesh.comm))
    comm.Barrier()
    assert checkpoint.newest(mpi_tmp_path) == path


def test_a_manifest_that_cannot_be_written_takes_the_arrays_along(comm, mpi_tmp_path, monkeypatch):
    with saving(comm, mpi_tmp_path, pipe=comm.size) as saver:
        saver.save(1)
        with monkeypatch.context() as patch:
            patch.setattr(folders, "write", raising(OSError(30, "Read-only file system")))
            with pytest.raises(StorageError, match="Read-only file system"):
                saver.wait()
        comm.Barrier()
        assert names_in(mpi_tmp_path) == []


def test_old_checkpoints_that_cannot_be_removed_are_no_reason_to_fail(comm, mpi_tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(
        folders, "prune", lambda root, keep, **more: raising(PermissionError(13, "Permission denied"))()
    )
    with saving(comm, mpi_tmp_path, keep=1) as saver:
        saver.save(1)
    assert ("an old checkpoint cannot be removed: [Errno 13] Permission denied" in caplog.text) == (comm.rank == 0)
    assert checkpoint.newest(mpi_tmp_path).name == "step-00000001"


def test_a_save_takes_as_long_as_its_slowest_rank_and_other_work_is_done_before_its_manifest(
    comm, mpi_tmp_path, monkeypatch
):
    """Such as to force to the disk what must not be older than the checkpoint."""
    preceded(monkeypatch, tensor_files, "write_tensors", lambda: time.sleep(0.3 * (comm.rank == comm.size - 1)))
    seen = []
    with saving(comm, mpi_tmp_path) as saver:
        saver.save(1, beforehand=lambda: seen.append(checkpoint.newest(mpi_tmp_path)))
        saver.wait()
        assert seen == ([None] if comm.rank == 0 else [])
        assert comm.rank > 0 or saver.seconds > 0.3


def test_a_last_save_that_fails_while_a_job_leaves_is_told_of(comm, mpi_tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(tensor_files, "write_tensors", raising(FULL))
    with Preemption(comm, signals="none", time_limit=1e-3, say=str) as preemption:
        assert preemption.due()
        with pytest.raises(SystemExit), saving(comm, mpi_tmp_path) as saver:
            saver.save(1)
            preemption.leave("as it says")
    assert checkpoint.newest(mpi_tmp_path) is None
    assert ("No space left on device" in caplog.text) == (comm.rank == 0)


@pytest.mark.long
def test_a_save_into_the_folder_of_one_that_was_given_up_waits_for_its_thread(comm, mpi_tmp_path, monkeypatch):
    """As where a rank dies behind the last step: the others save it again."""
    original, opened, threads = os.fsync, threading.Event(), []

    def fsync(descriptor):
        here = threading.current_thread()
        if here is not threading.main_thread():
            threads.append(here)
            if here is threads[0]:
                assert opened.wait(PATIENCE)
            elif len(set(threads)) == 2:
                time.sleep(0.5)  # the first one would rename the file meanwhile
        original(descriptor)

    owned = owner.take_folder(mpi_tmp_path, group_of(comm), folders.explained)  # as a training does: both share it
    monkeypatch.setattr(os, "fsync", fsync)
    with Mesh(comm) as mesh:
        stages, optimizer = trained(mesh)
        with pytest.raises(RuntimeError), checkpoint.Saver(mpi_tmp_path, mesh, stages, optimizer) as saver:
            saver.save(1)
            while not threads:
                time.sleep(1e-3)
            raise RuntimeError("on each rank for itself")
    with Mesh(comm) as mesh:  # as the ranks that are left make one
        change(stages, optimizer)
        expected = values(stages, optimizer)
        threading.Timer(0.3, opened.set).start()
        with checkpoint.Saver(mpi_tmp_path, mesh, stages, optimizer) as saver:
            saver.save(1)
        fresh, other = trained(mesh, seed=9)
        checkpoint.load(mpi_tmp_path, mesh, fresh, other)
        got = values(fresh, other)
        assert all(np.array_equal(got[name], array) for name, array in expected.items())
    owned.release()
