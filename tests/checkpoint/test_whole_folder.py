"""A process is killed around each call that changes files: a whole checkpoint or folder is found each time."""

import os
import shutil
import threading

import pytest

from mpipipe import Mesh, checkpoint, files, nn, optim
from mpipipe.attention import Local
from mpipipe.checkpoint import contents, tensor_files, whole_folder
from mpipipe.errors import ArgumentError
from mpipipe.job import inprocess
from mpipipe.language.models import GPT, weights
from mpipipe.language.models.model_folder import open_model

MODEL = GPT(dim=8, layers=1, heads=2)
CALLS = [(os, name) for name in ("rename", "rmdir", "mkdir", "unlink", "fsync", "replace", "open")]


def stage_of(value):
    stage = nn.Stage(MODEL.build(Local()))
    stage.parameters.flat.fill(value)
    return stage


def save_weights(folder, value):
    def write(comm):
        with Mesh(comm) as mesh:
            weights.save(folder, MODEL, [stage_of(value)], mesh)

    inprocess.run(1, write)


def value_of_model(folder):
    """The one value of all parameters, as a reader finds them."""

    def read(comm):
        stage = stage_of(0)
        with Mesh(comm) as mesh:
            open_model(folder).load([stage], mesh)
        (value,) = {value for array in stage.parameters.values() for value in array.flat}
        return value

    return inprocess.run(1, read)[0]


def dying_at(moment, work, calls=CALLS):
    """Whether `work` came to its end in a process that is killed around its n-th of these calls, by any thread."""
    child = os.fork()
    if child == 0:
        left, leave, lock = [moment], os._exit, threading.Lock()

        def die():
            with lock:
                left[0] -= 1
                if left[0] == 0:
                    leave(9)

        def deadly(function):
            def call(*arguments, **keys):
                die()
                result = function(*arguments, **keys)
                die()
                return result

            return call

        files.open = open
        for owner, name in calls:
            setattr(owner, name, deadly(getattr(owner, name)))
        try:
            work()
        except BaseException:
            leave(1)
        leave(0)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert ended in (0, 9)
    return ended == 0


def on_two_ranks(work):
    """work(mesh, stages, optimizer, all their arrays) on each of two replicas; what it returns on rank 0."""

    def rank(comm):
        stages = [nn.Stage([nn.Linear(6, 5), nn.Linear(5, 3)], seed=1)]
        optimizer = optim.AdamW(stages, 0.1)
        with Mesh(comm) as mesh:
            return work(mesh, stages, optimizer, contents.contents_of(stages, optimizer))

    return inprocess.run(2, rank)[0]


def save_checkpoint(root, step):
    def save(mesh, stages, optimizer, arrays):
        for array in arrays.values():
            array[...] = step
        checkpoint.save(root, mesh, stages, optimizer, step=step, state={"step": step}, keep=1)

    on_two_ranks(save)


def step_of_checkpoint(root):
    def load(mesh, stages, optimizer, arrays):
        found = checkpoint.load(root, mesh, stages, optimizer)
        assert found.state == {"step": found.step} and all((array == found.step).all() for array in arrays.values())
        return found.step

    return on_two_ranks(load)


@pytest.mark.long
def test_a_save_that_is_killed_at_any_moment_leaves_a_whole_checkpoint(tmp_path, monkeypatch):
    """Also between pieces of arrays, and in each thread."""
    monkeypatch.setattr(tensor_files, "PIECE_BYTES", 32)
    seen, ended, calls = [], False, [*CALLS, (files, "open"), (tensor_files, "crc32")]
    save_checkpoint(tmp_path / "root", 1)
    while not ended:
        shutil.copytree(tmp_path / "root", tmp_path / "copy")
        ended = dying_at(2 * len(seen) + 1, lambda: save_checkpoint(tmp_path / "copy", 2), calls)
        seen.append(step_of_checkpoint(tmp_path / "copy"))
        shutil.rmtree(tmp_path / "copy")
    assert len(seen) > 30 and seen[0] == 1 and seen[-1] == 2


@pytest.mark.long
def test_a_save_that_is_killed_at_any_moment_leaves_the_old_model_or_the_new_one(tmp_path):
    folder, seen, moment, ended = tmp_path / "run" / "model", [], 0, False
    while not ended:
        moment += 2  # after a call the files are as before the next one
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        save_weights(folder, 1)
        ended = dying_at(moment, lambda: save_weights(folder, 2))
        seen.append(value_of_model(folder))
        if moment % 5 == 0 or ended:  # the next save cleans up
            save_weights(folder, 3)
            assert value_of_model(folder) == 3 and os.listdir(tmp_path / "run") == ["model"]
    assert moment > 20 and seen[0] == 1 and seen[-1] == 2 and seen == sorted(seen), seen


def test_between_the_two_renames_the_former_folder_is_found(tmp_path):
    """Both by those who read and by a training that begins anew."""
    target = tmp_path / "model"
    save_weights(target, 1)
    former = target.rename(tmp_path / "model.mpipipe-former")
    assert whole_folder.standing_folder(target) == former and value_of_model(target) == 1
    whole_folder.restore_folder(target)
    assert value_of_model(target) == 1 and os.listdir(tmp_path) == ["model"]


def test_a_model_that_is_replaced_between_two_files_is_no_mixture(tmp_path):
    """Some ranks have read the old one, others the new one."""
    folder = tmp_path / "model"
    save_weights(folder, 1)
    opened = open_model(folder)
    save_weights(folder, 2)

    def read(comm):
        with Mesh(comm) as mesh, pytest.raises(ArgumentError, match="replaced while it was read"):
            opened.load([stage_of(0)], mesh)

    inprocess.run(2, read)
    assert value_of_model(folder) == 2


def test_what_is_no_leftover_stays(tmp_path):
    names = ("model.md", "model.partial.md", "mine.partial", "model.12345678.partially", "model.notes678.partial")
    names += ("model.former", "model.partial")  # as people call folders
    for name in (*names, "model.mpipipe-former", "model.0123abcd.partial"):
        (tmp_path / name).mkdir()
    (tmp_path / "model").mkdir()
    whole_folder.restore_folder(tmp_path / "model")
    (tmp_path / "model").rmdir()
    whole_folder.restore_folder(tmp_path / "model")  # nor does one of them become the model
    assert sorted(os.listdir(tmp_path)) == sorted(names)


@pytest.mark.parametrize("place", [".", "..", "/"])
def test_a_folder_without_a_name_is_refused(tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError, match="has no name"):
        whole_folder.begin(whole_folder.Path(place), replaces=False)
    assert os.listdir(tmp_path) == []


def test_a_link_to_a_folder_stays_and_what_it_leads_to_is_replaced(tmp_path):
    """Such as one to a disk with more room."""
    folder, disk = tmp_path / "model", tmp_path / "disk"
    disk.mkdir()
    folder.symlink_to(disk / "model")
    for value in (1, 2, 3):
        save_weights(folder, value)
        assert value_of_model(folder) == value_of_model(disk / "model") == value
    (disk / "model").rename(disk / f"model{whole_folder.FORMER}")  # as a save does that is killed
    assert value_of_model(folder) == 3
    save_weights(folder, 4)
    assert folder.is_symlink() and os.listdir(disk) == ["model"] and sorted(os.listdir(tmp_path)) == ["disk", "model"]
