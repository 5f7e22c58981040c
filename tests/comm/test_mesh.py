"""The mesh: coordinates, communicators, errors."""

from itertools import product

import pytest

from mpipipe import Mesh
from mpipipe.errors import ArgumentError
from mpipipe.job import inprocess


def facts(comm, **extents):
    with Mesh(comm, **extents) as mesh:
        return tuple(mesh.coords), mesh.pipe.size, mesh.data.size, mesh.seq.size, mesh.replicas.size


def test_seq_varies_fastest_then_data_then_pipe():
    found = inprocess.run(8, lambda comm: facts(comm, pipe=2, seq=2))
    assert [coords for coords, *_ in found] == [*product(range(2), repeat=3)]
    assert all(sizes == [2, 2, 2, 4] for _, *sizes in found)


@pytest.mark.parametrize("order", ["pipe,data,seq", "data,pipe,seq", "seq,data,pipe"])
def test_rank_of_is_the_inverse_of_coords_of(order):
    def check(comm):
        with Mesh(comm, pipe=3, seq=2, order=order) as mesh:
            assert mesh.pipe.rank == mesh.coords.pipe and mesh.seq.rank == mesh.coords.seq
            assert mesh.replicas.rank == mesh.coords.data * 2 + mesh.coords.seq
            return [mesh.rank_of(*mesh.coords_of(rank)) for rank in range(12)]

    assert inprocess.run(12, check)[0] == list(range(12))


def test_neighbours_are_stages_of_a_pipeline_in_the_other_order():
    found = inprocess.run(6, lambda comm: facts(comm, pipe=3, order="data,pipe,seq"))
    assert [coords for coords, *_ in found] == [(p, d, 0) for d, p in product(range(2), range(3))]


def test_mesh_on_real_ranks(comm):
    coords, pipe, data, seq, replicas = facts(comm, pipe=comm.size)
    assert (coords, pipe, data, seq, replicas) == ((comm.rank, 0, 0), comm.size, 1, 1, 1)
    coords, pipe, data, seq, replicas = facts(comm)
    assert (coords, pipe, data, seq, replicas) == ((0, comm.rank, 0), 1, comm.size, 1, comm.size)


def test_extents_are_counts_that_fill_the_communicator(comm):
    for extents in ({"pipe": 7}, {"pipe": 2, "data": 7}, {"seq": 9}):
        with pytest.raises(ArgumentError, match="does not fit"):
            Mesh(comm, **extents)
    with pytest.raises(ArgumentError, match="no order of the axes"):
        Mesh(comm, order="pipe,data")
    for extents in ({"pipe": 0}, {"seq": -1}, {"data": 0}, {"pipe": "2"}):
        with pytest.raises(ArgumentError, match="at least 1"):
            Mesh(comm, **extents)


def test_one_process_is_told_how_to_start_several(monkeypatch):
    monkeypatch.setattr("sys.orig_argv", ["python", "-m", "mpipipe", "train", "my task.py", "--pipe", "4"])

    def refused(comm, **extents):
        with pytest.raises(ArgumentError) as refusal:
            Mesh(comm, **extents)
        return refusal.value.remedy

    command = "python -m mpipipe train 'my task.py' --pipe 4"
    assert inprocess.run(1, lambda comm: refused(comm, pipe=4))[0].endswith(f"mpiexec -n 4 {command}")
    assert inprocess.run(1, lambda comm: refused(comm, pipe=2, data=3))[0].endswith(f"mpiexec -n 6 {command}")
    assert "mpiexec" not in inprocess.run(2, lambda comm: refused(comm, pipe=4))[0]
    assert "--seq-len 4096" in inprocess.run(2, lambda comm: refused(comm, seq=4096))[0]


def test_closing_twice_is_allowed(comm):
    mesh = Mesh(comm)
    mesh.close()
    mesh.close()
