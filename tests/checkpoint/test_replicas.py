"""What must be equal is compared: a flipped bit in one array of one rank is found and named, and nothing else is."""

import os
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support import saved_model
from support.saved_model import HEAD, MODEL
from support.small_training import config_in

from mpipipe import Mesh, arrays, checkpoint, nn, optim
from mpipipe.attention import Local
from mpipipe.checkpoint import contents, replicas
from mpipipe.checkpoint.replicas import hash_of
from mpipipe.errors import MismatchError, ReplicaError
from mpipipe.language.models import GPT
from mpipipe.train import train
from mpipipe.train.trainer import Trainer

EMBEDDING = "0.weight"


def trained(mesh, chunks=1):
    """(stages, optimizer) of this rank, with tied parameters and a state, which are equal on replicas."""
    stages, optimizer = saved_model.trained(mesh, chunks)
    return stages, saved_model.fill(optimizer)


def flip(array, item, bit):
    """Change one bit of one item, as a cosmic ray does."""
    host = np.array(arrays.download(array))
    host.reshape(-1).view(np.uint8)[item * host.itemsize + bit // 8] ^= 1 << bit % 8
    arrays.upload(host, out=array) if arrays.is_device(array) else array.__setitem__(..., host)


@pytest.mark.parametrize("pipe", [1, 2, 4])
def test_equal_replicas_and_tied_places_pass(comm, pipe):
    if comm.size % pipe:
        pytest.skip(f"needs a multiple of {pipe} ranks")
    for chunks in (1, 2):
        with Mesh(comm, pipe=pipe) as mesh:
            checkpoint.check_replicas(mesh, *trained(mesh, chunks))
            checkpoint.check_replicas(mesh, trained(mesh, chunks)[0])


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize(("kind", "bit"), [("parameters", 0), ("first", 31), ("second", 7)])
@pytest.mark.parametrize("victim", [0, 3])
def test_one_flipped_bit_of_one_rank_is_found_and_named(comm, victim, kind, bit):
    """Pipe 2 x data 2: two replicas of each stage, so the error names both sides."""
    with Mesh(comm, pipe=2) as mesh:
        stages, optimizer = trained(mesh)
        held = contents.contents_of(stages, optimizer)
        names = [name for name in held if name.startswith(kind) and EMBEDDING not in name and HEAD not in name]
        name = comm.bcast(names[-1] if comm.rank == victim else None, victim)
        if comm.rank == victim:
            flip(held[name], held[name].size - 1, bit)
        with pytest.raises(ReplicaError) as caught:
            checkpoint.check_replicas(mesh, stages, optimizer)
        error = caught.value
        pair = (0, 1) if victim == 0 else (2, 3)
        assert error.message == f"replicas differ in {name}"
        assert re.fullmatch(
            rf"{re.escape(name)} is [0-9a-f]{{16}} on rank {pair[0]}, [0-9a-f]{{16}} on rank {pair[1]}", error.found
        )
        assert os.uname().nodename in error.remedy
        assert error.agreed and comm.allgather(error.reported_elsewhere).count(False) == 1
        if comm.rank == victim:
            flip(held[name], held[name].size - 1, bit)
        checkpoint.check_replicas(mesh, stages, optimizer)  # the ranks can go on


@pytest.mark.mpi(min_size=3)
def test_the_odd_one_of_three_replicas_is_blamed(comm):
    with Mesh(comm, pipe=1) as mesh:
        stages, optimizer = trained(mesh)
        if comm.rank == 1:
            flip(stages[0].parameters["1.layer.1.qkv"], 0, 3)
        with pytest.raises(ReplicaError) as caught:
            checkpoint.check_replicas(mesh, stages, optimizer)
    rest = "0, 2" if comm.size == 3 else f"0, 2-{comm.size - 1}"
    assert caught.value.rank == 1 and "parameters/1.layer.1.qkv" in caught.value.message
    assert "on rank 1, " in caught.value.found and f"on ranks {rest}" in caught.value.found
    assert f"processor of rank 1: {os.uname().nodename}" in caught.value.remedy


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", ["parameters", "second"])
def test_a_tied_parameter_that_differs_between_stages_is_named_with_both_places(comm, kind):
    """One pipeline over all ranks, so that there is no other replica to compare with."""
    with Mesh(comm, pipe=comm.size) as mesh:
        stages, optimizer = trained(mesh)
        if comm.rank == comm.size - 1:
            flip(contents.contents_of(stages, optimizer)[f"{kind}/{HEAD}"], 5, 2)
        with pytest.raises(ReplicaError) as caught:
            checkpoint.check_replicas(mesh, stages, optimizer)
    assert caught.value.message == f"replicas differ in {kind}/{EMBEDDING} = {kind}/{HEAD}"
    assert "on rank 0, " in caught.value.found and f"on rank {comm.size - 1}" in caught.value.found


def test_a_place_of_a_tied_parameter_that_no_optimizer_has_is_compared_without_state(comm):
    layers = MODEL.build(Local())
    stages = [nn.Stage(layers[:2], seed=1), nn.Stage(layers[2:], seed=1, first=2)]
    with Mesh(comm) as mesh:
        checkpoint.check_replicas(mesh, stages, optim.AdamW(stages[:1], 0.1))
        stages[1].parameters[HEAD][0, 0] += 1
        with pytest.raises(ReplicaError) as caught:
            checkpoint.check_replicas(mesh, stages, optim.AdamW(stages[:1], 0.1))
    assert caught.value.message == f"replicas differ in parameters/{EMBEDDING} = parameters/{HEAD}"


@pytest.mark.mpi(min_size=2)
def test_ranks_that_share_a_sequence_are_compared_and_optimizers_of_other_steps_told(comm):
    with Mesh(comm, seq=comm.size) as mesh:
        stages = [nn.Stage([nn.Linear(4, 4)], seed=1 + (comm.rank == comm.size - 1))]
        with pytest.raises(ReplicaError, match=r"differ in parameters/0\.weight"):
            checkpoint.check_replicas(mesh, stages)
    with Mesh(comm) as mesh:
        stages = [nn.Stage([nn.Linear(4, 4)], seed=1)]
        optimizer = optim.SGD(stages, 0.1)
        optimizer.steps += comm.rank
        with pytest.raises(MismatchError, match="steps of the optimizer"):
            checkpoint.check_replicas(mesh, stages, optimizer)


def test_stages_of_ones_own_are_compared_with_those_of_the_same_place_alone(comm):
    stage = SimpleNamespace(parameters={"own": np.full(3, comm.rank)})  # every rank calls its parameter alike
    with Mesh(comm, pipe=comm.size) as mesh:
        checkpoint.check_replicas(mesh, [stage])
    if comm.size > 1:
        with Mesh(comm) as mesh, pytest.raises(ReplicaError, match="differ in parameters/own"):
            checkpoint.check_replicas(mesh, [stage])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gpu_and_the_host_have_the_same_hashes(gpu, comm, dtype, monkeypatch):
    monkeypatch.setattr(replicas, "PIECE_BYTES", 64)
    there, here = (nn.Stage([nn.Linear(7, 5)], seed=1, device=device, dtype=dtype) for device in ("cuda", "cpu"))
    for name, array in there.parameters.items():
        assert hash_of(array) == hash_of(here.parameters[name])
    if comm.size > 1:
        with Mesh(comm) as mesh:
            checkpoint.check_replicas(mesh, [there if comm.rank % 2 else here])
            if comm.rank == 0:
                flip(here.parameters["0.weight"], 34, 9)
            with pytest.raises(ReplicaError, match=r"0\.weight"):
                checkpoint.check_replicas(mesh, [there if comm.rank % 2 else here])


@pytest.mark.mpi(min_size=2)
def test_a_training_stops_before_it_saves_what_one_rank_has_alone(comm, mpi_tmp_path, monkeypatch):
    config = config_in(mpi_tmp_path, comm, steps=6, pipe=1, check_weights=2, save_every=2)()
    original = Trainer.step

    def step(self, number):
        made = original(self, number)
        if number == 3 and comm.rank == 1:
            flip(self.pipeline.stages[0].parameters["2.layer.1.down"], 11, 0)
        return made

    monkeypatch.setattr(Trainer, "step", step)
    with pytest.raises(ReplicaError, match="replicas differ in parameters/"):
        train(config, GPT, comm)
    assert checkpoint.newest(Path(config.out)).name == "step-00000002"
