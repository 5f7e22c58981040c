"""Checkpoints of an optimizer that is sharded over replicas: the files of one that is not, for any mesh."""

import os

import numpy as np
import pytest
from support.saved_model import fill, saved, trained, values

from mpipipe import Mesh, arrays, checkpoint, nn, optim
from mpipipe.errors import ArgumentError, ReplicaError


def computed(stages):
    return [arrays.download(array).tobytes() for stage in stages for array in stage.compute.values()]


def parts(path):
    return {name: (path / name).read_bytes() for name in os.listdir(path) if name.startswith("part")}


@pytest.mark.parametrize(
    ("pipe", "chunks", "device", "dtype"),
    [(1, 1, "cpu", "float32"), (1, 1, "cuda", "bfloat16"), (2, 1, "cpu", "bfloat16"), (2, 2, "cpu", "bfloat16")],
)
def test_the_files_are_those_of_an_optimizer_that_is_not_sharded(
    request, comm, mpi_tmp_path, pipe, chunks, device, dtype
):
    if device == "cuda":
        request.getfixturevalue("gpu")
    if comm.size % pipe:
        pytest.skip(f"needs a multiple of {pipe} ranks")
    keys = {"chunks": chunks, "dtype": dtype, "device": device}
    whole, cut = (saved(comm, mpi_tmp_path / str(sharded), pipe, sharded=sharded, **keys) for sharded in (False, True))
    assert parts(cut) == parts(whole) != {}
    with Mesh(comm, pipe=pipe) as mesh:
        stages, optimizer = trained(mesh, **keys)
        right, copies = values(stages, fill(optimizer)), computed(stages)
        for sharded in (False, True):
            stages, optimizer = trained(mesh, seed=9, sharded=sharded, **keys)
            checkpoint.load(cut, mesh, stages, optimizer)
            got = values(stages, optimizer)
            assert computed(stages) == copies
            assert optimizer.steps == 7 and got.keys() == right.keys()
            for name, array in got.items():
                np.testing.assert_array_equal(array, right[name], name)


def test_a_save_goes_on_while_the_next_step_changes_the_state(comm, mpi_tmp_path):
    with Mesh(comm, pipe=1) as mesh:
        stages, optimizer = trained(mesh, sharded=True, dtype="bfloat16")
        for stage in stages:
            stage.gradients.flat[...] = 2
        optimizer.step()
        before = values(stages, optimizer)
        with checkpoint.Saver(mpi_tmp_path, mesh, stages, optimizer) as saver:
            saver.save(1)
            for stage in stages:
                stage.gradients.flat[...] = 1
            optimizer.step()
            with optimizer.whole_parameters():
                saver.save(2)
        assert values(stages, optimizer).keys() == before.keys()
        after, (first, second) = values(stages, optimizer), sorted(mpi_tmp_path.glob("step-*"))
        for folder, right in ((second, after), (first, before)):
            checkpoint.load(folder, mesh, stages, optimizer)
            for name, array in values(stages, optimizer).items():
                np.testing.assert_array_equal(array, right[name], name)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replicas_are_compared_by_their_parameters_alone(comm, dtype):
    """In half precision by those that layers compute with."""
    with Mesh(comm, pipe=1) as mesh:
        stages, optimizer = trained(mesh, sharded=True, dtype=dtype)
        fill(optimizer)
        checkpoint.check_replicas(mesh, stages, optimizer)
        if comm.rank == 1:
            stages[0].compute.flat[3] += 1
        with pytest.raises(ReplicaError, match="parameters/"):
            checkpoint.check_replicas(mesh, stages, optimizer)


@pytest.mark.mpi(min_size=2)
def test_shards_over_other_ranks_than_the_replicas_are_refused(comm, mpi_tmp_path):
    with Mesh(comm, pipe=1) as mesh:
        path = saved(comm, mpi_tmp_path, 1, sharded=True)
        turned = comm.Split(0, -comm.rank)
        stages = [nn.Stage([nn.Linear(40, 40)])]
        optimizer = optim.SGD(stages, 0.1, 0.9, replicas=turned)
        for call in (
            lambda: checkpoint.save(mpi_tmp_path / "other", mesh, stages, optimizer, step=1),
            lambda: checkpoint.load(path, mesh, stages, optimizer),
        ):
            with pytest.raises(ArgumentError, match=r"sharded over other ranks(.|\n)*mesh\.replicas"):
                call()
        turned.Free()
