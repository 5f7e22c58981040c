"""Checkpoints: saved by any mesh and loaded by any other, whole or absent, bit by bit what was saved."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from zlib import crc32

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file
from support.harness import on_rank_0
from support.saved_model import STATE, fill, saved, trained, values

from mpipipe import Mesh, arrays, checkpoint, nn, optim
from mpipipe.checkpoint import folders, tensor_files
from mpipipe.errors import ArgumentError, MismatchError


def loaded(comm, path, pipe, parameters_alone=False, **keys):
    """(values of this rank, what load returned, steps of the optimizer) after a load into a model of another seed."""
    with Mesh(comm, pipe=pipe) as mesh:
        stages, optimizer = trained(mesh, seed=9, **keys)
        found = checkpoint.load(path, mesh, stages, None if parameters_alone else optimizer)
        return values(stages, optimizer), found, optimizer.steps


def expected(comm):
    alone = comm.Split(comm.rank, 0)
    try:
        with Mesh(alone) as mesh:
            stages, optimizer = trained(mesh)
            return values(stages, fill(optimizer))
    finally:
        alone.Free()


CUTS = [(1, 1), (1, 3), (2, 1), (2, 2), (4, 1), (4, 2)]


@pytest.mark.parametrize(("pipe", "chunks"), CUTS)
def test_any_mesh_loads_what_any_other_saved(comm, mpi_tmp_path, pipe, chunks):
    """Parameters, moments and steps, with replicas that share the writing, and tied parameters in all places."""
    if comm.size % pipe:
        pytest.skip(f"needs a multiple of {pipe} ranks")
    path = saved(comm, mpi_tmp_path, pipe, chunks=chunks)
    assert path == Path(mpi_tmp_path) / "step-00000003"
    names = {f"part-{rank}.safetensors" for rank in range(comm.size)}
    assert set(os.listdir(path)) == {"manifest.json", *names}
    right, seen = expected(comm), set()
    for other in {1, 2, comm.size} & {1, 2, 4}:
        if comm.size % other:
            continue
        for count in (1, 2):
            got, found, steps = loaded(comm, mpi_tmp_path, other, chunks=count)
            assert (found.step, found.state, found.path, steps) == (3, STATE, path, 7)
            for name, array in got.items():
                np.testing.assert_array_equal(array, right[name], name)
                seen.add(name)
    assert {name for names in comm.allgather(seen) for name in names} == set(right)


def test_each_replica_writes_about_as_much_and_the_library_reads_it(comm, mpi_tmp_path):
    path = saved(comm, mpi_tmp_path, 1)
    sizes = [(path / f"part-{rank}.safetensors").stat().st_size for rank in range(comm.size)]
    right, together = expected(comm), {}
    largest = max(array.nbytes for array in right.values())
    assert max(sizes) - min(sizes) <= largest + 4096  # of headers
    for rank in range(comm.size):
        together |= load_file(path / f"part-{rank}.safetensors")
    assert together.keys() == right.keys()
    for name, array in together.items():
        np.testing.assert_array_equal(array, right[name], name)
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["step"] == 3 and manifest["format"] == 1 and manifest["optimizer_steps"] == 7


def test_arrays_of_every_dtype_and_of_any_size_come_back(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_files, "PIECE_BYTES", 64)  # so that arrays go in pieces
    rng = np.random.default_rng(0)
    content = {
        f"{dtype}/{shape}": (100 * rng.standard_normal(shape)).astype(
            arrays.dtype(dtype) if "float" in dtype else dtype
        )
        for dtype in tensor_files.DTYPES
        for shape in ((3, 5), (), (0, 4), (131,))
    }
    written = tensor_files.write_tensors(tmp_path / "part-0.safetensors", content)
    assert written.bytes == (tmp_path / "part-0.safetensors").stat().st_size
    with tensor_files.TensorFile(tmp_path / "part-0.safetensors", written) as file:
        for name, array in content.items():
            back = np.empty_like(array)
            assert file.read_summed(name, back) == written.arrays[name].checksum == f"{crc32(array.tobytes()):08x}"
            assert back.tobytes() == array.tobytes()
            assert written.arrays[name].start % array.dtype.itemsize == 0
    known = {name: array for name, array in content.items() if array.dtype != ml_dtypes.bfloat16}
    os.rename(tmp_path / "part-0.safetensors", tmp_path / "all")
    tensor_files.write_tensors(tmp_path / "part-1.safetensors", known)
    for name, array in load_file(tmp_path / "part-1.safetensors").items():
        np.testing.assert_array_equal(array, known[name], name)


def test_parameters_alone_are_loaded_without_an_optimizer_or_into_another_one(comm, mpi_tmp_path):
    saved(comm, mpi_tmp_path, comm.size)
    got, _, steps = loaded(comm, mpi_tmp_path, comm.size, parameters_alone=True)
    right = expected(comm)
    for name, array in got.items():
        if name.startswith("parameters/"):
            np.testing.assert_array_equal(array, right[name])
        else:
            assert not array.any()
    assert steps == 0
    for momentum, match in ((0.9, "has no array momentum/"), (0.0, "has an array that the model does not: first/")):
        with pytest.raises(ArgumentError, match=match):
            loaded(comm, mpi_tmp_path, comm.size, kind=lambda stages, lr, m=momentum: optim.SGD(stages, lr, momentum=m))


def test_old_checkpoints_are_removed_and_what_is_not_ours_stays(comm, mpi_tmp_path):
    root = Path(mpi_tmp_path)
    if comm.rank == 0:
        for name in ("step-00000000", "mine", "aside-step-00000001"):
            (root / name).mkdir()
        (root / "step-00000000" / "part-0.safetensors.partial").write_text("a save that was cut short")
        (root / "mine" / "manifest.json").write_text("")
    comm.Barrier()
    with Mesh(comm, pipe=comm.size) as mesh:
        stages, optimizer = trained(mesh)
        for step in (1, 2, 3):
            if step == 2 and comm.rank == 0:
                (root / "step-00000001" / "notes.txt").write_text("of a user")
            checkpoint.save(root, mesh, stages, optimizer, step=step, keep=1)
    comm.Barrier()
    assert sorted(os.listdir(root)) == ["aside-step-00000001", "mine", "step-00000001", "step-00000003"]
    assert os.listdir(root / "step-00000001") == ["notes.txt"]
    assert checkpoint.newest(root) == root / "step-00000003"


def test_what_is_being_saved_behind_a_checkpoint_is_not_taken_for_a_save_that_was_cut_short(tmp_path, monkeypatch):
    for name, files in (("1", 0), ("2", 1), ("3", 0), ("4", 0), ("9", 1)):
        (tmp_path / f"step-0000000{name}").mkdir()
        for file in ("part-0.safetensors", "manifest.json")[: 1 + files]:
            (tmp_path / f"step-0000000{name}" / file).write_text("")
    folders.prune(tmp_path, 2, just_saved=tmp_path / "step-00000002")
    assert sorted(path.name[-1] for path in tmp_path.iterdir()) == ["2", "3", "4", "9"]
    removed, original = [], Path.unlink
    monkeypatch.setattr(Path, "unlink", lambda path, **keys: removed.append(path.name) or original(path, **keys))
    folders.prune(tmp_path, 1, just_saved=tmp_path / "step-00000009")
    assert sorted(path.name[-1] for path in tmp_path.iterdir()) == ["9"]
    assert removed[0] == "manifest.json"  # what is removed is no checkpoint from the first file on


def test_a_save_of_the_same_step_replaces_one_of_more_ranks(comm, mpi_tmp_path):
    saved(comm, mpi_tmp_path, comm.size)
    alone = comm.Split(comm.rank, 0)
    if comm.rank == 0:
        saved(alone, mpi_tmp_path, 1)
        assert sorted(os.listdir(mpi_tmp_path / "step-00000003")) == ["manifest.json", "part-0.safetensors"]
    comm.Barrier()
    alone.Free()
    loaded(comm, mpi_tmp_path, comm.size)


@pytest.mark.parametrize("at", ["part", "manifest"])
def test_a_full_disk_leaves_the_older_checkpoint_whole_and_gets_its_room_back(comm, mpi_tmp_path, room, at):
    root = Path(mpi_tmp_path)
    first = saved(comm, root, comm.size)
    most = 1000 if at == "part" else max(path.stat().st_size for path in first.glob("part-*"))
    if comm.rank == (comm.size - 1 if at == "part" else 0):
        room(most)
    with pytest.raises(ArgumentError, match="cannot be written"):
        with Mesh(comm, pipe=comm.size) as mesh:
            stages, optimizer = trained(mesh)
            big = {"text": "x" * most} if at == "manifest" else STATE
            checkpoint.save(root, mesh, stages, optimizer, step=4, state=big, keep=1)
    room(None)
    comm.Barrier()
    assert checkpoint.newest(root) == first
    assert os.listdir(root) == [first.name]
    loaded(comm, root, comm.size)


def test_wrong_arguments_are_refused_on_every_rank_before_anything_is_written(comm, mpi_tmp_path):
    with Mesh(comm, pipe=comm.size) as mesh:
        stages = [nn.Stage([nn.Linear(2, 2)]), nn.Stage([nn.Linear(2, 2)])]
        strided = SimpleNamespace(parameters={"own": np.zeros((4, 4))[:, :2]})
        for keys, match in (
            (dict(stages=stages, step=1), "two stages of this rank have a parameter 0.weight"),
            (dict(stages=[stages[0]], step=-1), "step"),
            (dict(stages=[stages[0]], step=1, keep=0), "keep"),
            (dict(stages=[strided], step=1), "strided"),
            *(
                (dict(stages=stages[:1], step=1, state=state), "state is not plain")
                for state in ({1: 2}, {"a": [{"b": (1,)}]}, {"a": np.float64(1)}, {"a": np.zeros(3)})
            ),
        ):
            with pytest.raises(ArgumentError, match=match):
                checkpoint.save(mpi_tmp_path, mesh, **keys)
        if comm.size > 1:
            with pytest.raises(MismatchError, match="step"):
                checkpoint.save(mpi_tmp_path, mesh, stages[:1], step=comm.rank)
    assert os.listdir(mpi_tmp_path) == []


def test_another_model_is_refused_with_the_array_that_differs(comm, mpi_tmp_path):
    with Mesh(comm, pipe=comm.size) as mesh:
        make = lambda width, layers=1: [nn.Stage([nn.Linear(4, width)] * layers, first=mesh.rank)]  # noqa: E731
        checkpoint.save(mpi_tmp_path, mesh, make(4), step=1)
        with pytest.raises(ArgumentError, match=r"parameters/\d.weight does not fit the model") as caught:
            checkpoint.load(mpi_tmp_path, mesh, make(5))
        assert "F32[4, 4]" in caught.value.found and "F32[5, 4]" in caught.value.expected
        with pytest.raises(ArgumentError, match="has an array that the model does not: parameters"):
            checkpoint.load(mpi_tmp_path, mesh, [nn.Stage([nn.Linear(4, 4, bias=False)], first=mesh.rank)])
        with pytest.raises(ArgumentError, match="has no array parameters/"):
            checkpoint.load(mpi_tmp_path, mesh, [nn.Stage([nn.Linear(4, 4)], first=mesh.rank + 1)])


def test_a_file_that_one_rank_does_not_see_is_named_and_without_a_manifest_there_is_no_checkpoint(comm, mpi_tmp_path):
    path = saved(comm, mpi_tmp_path, comm.size)
    part = path / f"part-{comm.size - 1}.safetensors"
    on_rank_0(comm, part.unlink)
    with pytest.raises(ArgumentError, match=r"cannot be read") as caught:
        loaded(comm, path, comm.size)
    assert f"{part} on {os.uname().nodename}" in caught.value.found
    on_rank_0(comm, (path / "manifest.json").unlink)
    assert checkpoint.newest(mpi_tmp_path) is None
    for place in (path, mpi_tmp_path, mpi_tmp_path / "absent"):
        with pytest.raises(ArgumentError, match="no checkpoint is here"):
            loaded(comm, place, comm.size)


# -- stages of a user's own, by `parameters`, or by `state_dict` and `load_state_dict`


class Counting:
    """A stage with a matrix and a table that is no parameter; what it hands out nobody may write to."""

    def __init__(self, name, value):
        self.name, self.loaded = name, 0
        self.parameters, self.gradients = (nn.FlatBuffer({f"{name}.w": (3, 2)}, "float64") for _ in range(2))
        self.parameters.flat[:6] = value
        self.table = np.full(4, value, np.int32)

    def state_dict(self):
        found = {f"{self.name}.w": self.parameters[f"{self.name}.w"].copy(), f"{self.name}.table": self.table.copy()}
        for array in found.values():
            array.flags.writeable = False
        return found

    def load_state_dict(self, arrays):
        self.loaded += 1
        self.parameters[f"{self.name}.w"][...] = arrays[f"{self.name}.w"]
        self.table = arrays[f"{self.name}.table"].copy()


def test_a_state_dict_is_saved_and_loaded(pair, mpi_tmp_path):
    with Mesh(pair, pipe=2) as mesh:
        saved = Counting(f"part{pair.rank}", 5 + pair.rank)
        optimizer = optim.AdamW([saved], lr=0.1)
        saved.gradients.flat[:6] = 1
        optimizer.step()
        path = checkpoint.save(mpi_tmp_path, mesh, [saved], optimizer, step=1)
        other = Counting(f"part{pair.rank}", 0)
        again = optim.AdamW([other], lr=0.1)
        checkpoint.load(path, mesh, [other], again)
    np.testing.assert_array_equal(other.parameters.flat, saved.parameters.flat)
    np.testing.assert_array_equal(other.table, saved.table)
    np.testing.assert_array_equal(again.state[0]["second"], optimizer.state[0]["second"])
    assert other.loaded == 1 and again.steps == 1 and other.table.dtype == np.int32


def test_arrays_of_one_name_on_two_ranks_are_refused_before_anything_is_written(pair, mpi_tmp_path):
    """Such a checkpoint could be saved, and not be read again."""
    with Mesh(pair, pipe=2) as mesh:
        with pytest.raises(ArgumentError, match=r"ranks 0 and 1 have a parameter part\.table"):
            checkpoint.save(mpi_tmp_path, mesh, [Counting("part", 1)], step=1)
        assert not any(mpi_tmp_path.iterdir())
