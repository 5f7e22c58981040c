"""An optimizer whose state is a share on each replica: the bits of one without shares, 1/D of its state."""

import math
import weakref
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from gpu_emulator.fixture import own_gpus
from support import dense, gradients
from support.gradients import fill, small_stages
from support.small_gpt import build, text

from mpipipe import Mesh, Pipeline, arrays, nn, optim
from mpipipe.comm import allreduce
from mpipipe.errors import ArgumentError, MismatchError, MpipipeError, PeerError
from mpipipe.job import inprocess
from mpipipe.schedules import interleaved_1f1b, one_f_one_b

GROUPS = [optim.Group("*.bias", lr=2), optim.Group("*.gain", lr=0.5, weight_decay=0.3)]
OPTIMIZERS = gradients.OPTIMIZERS | {
    "AdamW in groups": lambda stages, **keys: optim.AdamW(stages, 0.01, weight_decay=0.1, groups=GROUPS, **keys),
    "SGD with momentum": lambda stages, **keys: optim.SGD(stages, 0.01, 0.9, 0.1, groups=GROUPS, **keys),
}


# the second is smaller than a block for each replica
made = partial(small_stages, sizes=((37, 13), (5, 3), (100, 60)))


def on_host(array):
    return np.array(arrays.download(array))


def parameters(stages, optimizer):
    """What layers compute with, and the parameters, put together where they are divided; collective."""
    copies = computed(stages)
    with optimizer.whole_parameters():
        assert computed(stages) == copies
        return copies + [on_host(stage.parameters.flat).tobytes() for stage in stages]


def computed(stages):
    return [on_host(stage.compute.flat).tobytes() for stage in stages]


def state(optimizer):
    """All arrays of the state by kind and name, put together where they are sharded; collective."""
    return {
        (kind, name): (array.whole() if isinstance(array, optim.StateShard) else on_host(array)).tobytes()
        for kind, named in optimizer.named_state().items()
        for name, array in named.items()
    }


def steps_alike(comm, name, dtype, device="cpu", count=6):
    """Make steps with and without shares; some are clipped, and some left out for an overflow."""
    whole, cut = made(dtype, device), made(dtype, device)
    first, second = OPTIMIZERS[name](whole), OPTIMIZERS[name](cut, replicas=comm)
    scalers = [optim.LossScaler(1024.0, interval=2) for _ in range(2)]
    for stage in (*whole, *cut):
        stage.optimizer_writes_compute()
    for step in range(count):
        bad = math.inf if step == 2 else None
        for stages, optimizer, scaler in ((whole, first, scalers[0]), (cut, second, scalers[1])):
            fill(stages, step, scaler.scale, bad)
            max_norm = (5.0, 1e9, math.inf)[step % 3]
            norm = optim.scaled_step(optimizer, scaler, max_norm, lr=0.02)
            assert (norm is None) == (step == 2)
        assert computed(cut) == computed(whole)
        assert {stage.parameters.is_divided for stage in cut} == {comm.size > 1 and dtype in arrays.HALVES}
    assert parameters(cut, second) == parameters(whole, first)
    assert first.steps == second.steps == count - 1 and scalers[0].scale == scalers[1].scale
    assert state(second) == state(first)
    assert len(set(comm.allgather(str(parameters(cut, second))))) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_have_the_bits_of_an_optimizer_without_shares(comm, name, dtype):
    steps_alike(comm, name, dtype)


@pytest.mark.parametrize("name, dtype", [("AdamW in groups", "bfloat16"), ("SGD with momentum", "float32")])
def test_so_they_have_on_gpus(comm, monkeypatch, name, dtype):
    monkeypatch.setattr(allreduce, "BUCKET_BYTES", 4000)
    with own_gpus(comm.rank):
        replicas = comm.Dup()
        steps_alike(replicas, name, dtype, "cuda", count=4)
        replicas.Free()


# -- with a pipeline: sums over replicas, ties, frozen parameters, accumulation


def trained(mesh, schedule, steps, sharded, dtype="float16", frozen=()):
    """The parameters and the norms of a training of a GPT on a mesh, and the optimizer, for its state."""
    stages = build(schedule, mesh.pipe.rank, layers=3, tied=True, dtype=dtype, frozen=frozen)
    loss, norms = nn.softmax_cross_entropy, []
    scaler = optim.LossScaler(2.0**23, interval=7)
    rows = slice(4 * mesh.data.rank, 4 * mesh.data.rank + 4)
    with Pipeline(stages, schedule, mesh.pipe, loss=loss, replicas=mesh.replicas) as pipeline:
        optimizer = optim.AdamW(stages, 0.01, replicas=mesh.replicas if sharded else None)
        for stage in stages:
            stage.optimizer_writes_compute()
        for step in range(steps):
            batch = dense.placed(schedule, mesh.pipe.rank, *(each[rows] for each in text(4 * mesh.shape.data, step)))
            pipeline.step(*batch, scale=scaler.scale / 2)
            pipeline.step(*batch, scale=scaler.scale / 2, accumulate=True)
            norms.append(optim.scaled_step(optimizer, scaler, 0.5, comm=mesh.pipe))
    return parameters(stages, optimizer), norms, state(optimizer), optimizer


CUTS = {
    "replicas alone": (1, lambda pipe: one_f_one_b(pipe, 2)),
    "pipelines": (2, lambda pipe: one_f_one_b(pipe, 2)),
    "two chunks": (2, lambda pipe: interleaved_1f1b(pipe, 2, 2)),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("name", CUTS)
def test_a_training_with_ties_clipping_and_a_scale_has_the_same_bits(comm, name):
    steps = 4
    pipe, schedule_of = CUTS[name]
    if comm.size % (2 * pipe):
        pytest.skip(f"needs a multiple of {2 * pipe} ranks")
    with Mesh(comm, pipe=pipe) as mesh:
        schedule = schedule_of(pipe)
        *whole, _ = trained(mesh, schedule, steps, sharded=False)
        *cut, optimizer = trained(mesh, schedule, steps, sharded=True)
    assert cut == whole
    norms = whole[1]
    assert None in norms and len([norm for norm in norms if norm is not None and norm > 0.5]) > 0
    assert len({*comm.allgather(optimizer.steps)}) == 1 and optimizer.steps < steps


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_compute_with_the_adapters_that_all_replicas_have_stepped(comm, dtype):
    outputs = []
    for replicas in (None, comm):
        layers = nn.LoRA(4, 8.0, ["linear"]).apply([nn.Linear(50, 40), nn.Linear(40, 30)])
        stage = nn.Stage(layers, dtype, seed=4)
        stage.optimizer_writes_compute()
        optimizer = optim.AdamW([stage], 0.1, replicas=replicas)
        for step in range(3):
            fill([stage], step)
            optimizer.step()
        stage.refresh()
        outputs.append([stage.forward(np.ones((2, 50), stage.dtype))[0].tobytes(), state(optimizer)])
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("kind", ["float64", "complex64"])
def test_a_stage_of_ones_own_may_have_any_flat_buffers(comm, kind):
    ends = []
    for replicas in (None, comm):
        stage = SimpleNamespace()
        for key in ("parameters", "gradients"):
            buffer = nn.FlatBuffer({"w": (50, 30), "c": (7,)}, kind)
            buffer.flat[...] = np.random.default_rng(len(key)).standard_normal(buffer.flat.size)
            setattr(stage, key, buffer)
        stage.gradients.flat[...] *= 1 if kind == "float64" else 1j
        optimizer = optim.AdamW([stage], 0.1, groups=GROUPS, replicas=replicas)
        optimizer.step(scale=0.5)
        optimizer.step()
        ends.append((stage.parameters.flat.tobytes(), state(optimizer)))
    assert ends[0] == ends[1]


# -- parameters in float32 of stages that compute in half precision: a share on each replica


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_each_replica_keeps_its_part_of_the_originals_alone(request, comm, device):
    if device == "cuda":
        request.getfixturevalue("gpu")
    stages = made("bfloat16", device, sizes=((300, 200), (200, 400)))
    count = sum(stage.gradients.flat.size for stage in stages)
    memory = weakref.ref(stages[0].parameters.flat.base) if device == "cpu" else lambda: None
    optimizer = optim.AdamW(stages, 0.1, replicas=comm)
    for _ in range(2):
        held = sum(stage.buffers.nbytes for stage in stages)
        held += sum(array.nbytes for kinds in optimizer.state for array in kinds.values())
        assert held / count == pytest.approx(6 + 12 / comm.size, rel=0.01) and memory() is None
        with optimizer.whole_parameters():
            flat = stages[0].parameters.flat
        assert np.isnan(on_host(flat)).all()


@pytest.mark.mpi(min_size=2)
def test_what_is_not_here_is_neither_read_nor_written_but_is_whole_where_it_is_asked_for(comm):
    ends, right = [], np.random.default_rng(3).standard_normal(37 * 13).reshape(13, 37)
    for replicas in (None, comm):
        (stage,) = stages = made("float16", sizes=((37, 13),))
        stage.parameters["0.weight"][...] = right / 2  # before the optimizer
        old = stage.parameters["0.weight"]
        optimizer = optim.AdamW(stages, 0.1, replicas=replicas)
        if replicas is not None:
            assert np.isnan(old).all() and repr(stage).startswith("<Stage of 2 layers, 507 parameters")
            for use in (
                lambda stage: stage.parameters["0.weight"],
                lambda stage: stage.parameters.flat,
                lambda stage: dict(stage.parameters),
                lambda stage: optim.SGD([stage], 0.1),
            ):
                with pytest.raises(ArgumentError, match=r"shares on the replicas(.|\n)*optimizer\.whole_parameters"):
                    use(stage)
        for scale in (1, 2):
            fill(stages, scale)
            optimizer.step()
            with optimizer.whole_parameters(), optimizer.whole_parameters():
                stage.parameters["0.weight"][...] *= scale
                if replicas is None:
                    stage.sync_compute()
            stage.sync_compute()
        ends.append(computed(stages) + parameters(stages, optimizer) + [str(state(optimizer))])
    assert ends[0] == ends[1]


@pytest.mark.mpi(min_size=2)
def test_a_pipeline_of_tied_stages_is_built_where_they_are_whole(comm):
    schedule, tied = one_f_one_b(1, 2), nn.softmax_cross_entropy
    with Mesh(comm, pipe=1) as mesh:
        *_, optimizer = trained(mesh, schedule, 1, sharded=True, dtype="bfloat16")
        with pytest.raises(ArgumentError, match=r"whole_parameters\(\)"):
            Pipeline(optimizer.stages, schedule, mesh.pipe, loss=tied, replicas=mesh.replicas)
        with optimizer.whole_parameters(), Pipeline(optimizer.stages, schedule, mesh.pipe, loss=tied) as pipeline:
            assert math.isfinite(pipeline.step(*text(4, 0)).loss)
        optimizer.step()


@pytest.mark.mpi(min_size=2)
def test_parts_that_are_frozen_are_whole_on_each_replica(comm):
    ends = []
    for replicas in (None, comm):
        stages = [nn.Stage([nn.Linear(30, 40), nn.RMSNorm(40)], "bfloat16", frozen=("0.bias", "1.*"))]
        optimizer = optim.AdamW(stages, 0.1, replicas=replicas)
        fill(stages)
        optimizer.step()
        gain = stages[0].parameters["1.gain"]
        gain[...] = 3
        stages[0].sync_compute()
        ends.append([gain.tobytes(), *parameters(stages, optimizer), stages[0].compute["1.gain"].tobytes()])
    assert ends[0] == ends[1]


# -- what is refused, on all replicas


@pytest.mark.mpi(min_size=2)
def test_what_are_no_replicas_is_refused_on_all_ranks(comm):
    for stage in (
        nn.Stage([nn.Linear(5, 4 + (comm.rank == 1))]),
        nn.Stage([nn.Linear(5, 4)], first=comm.rank),  # the ranks of a pipe: stages of one shape
        nn.Stage([nn.Linear(5, 4)], "float64" if comm.rank else "float32"),
    ):
        with pytest.raises(MismatchError, match=r"the replicas of an optimizer differ(.|\n)*mesh\.replicas"):
            optim.SGD([stage], 0.1, replicas=comm)
    stage = nn.Stage([nn.Linear(5, 4)])
    if comm.rank == 0:
        halves = SimpleNamespace(flat=np.zeros(24, np.float16))
        stage = SimpleNamespace(parameters=halves, gradients=halves)
    with pytest.raises(ArgumentError, match="are in float16"):
        optim.SGD([stage], 0.1, replicas=comm)


@pytest.mark.mpi(min_size=2)
def test_an_optimizer_that_is_older_than_the_pipeline_is_refused_where_that_ties_parameters(comm):
    schedule = one_f_one_b(1, 2)
    with Mesh(comm, pipe=1) as mesh:
        stages = build(schedule, 0, layers=3, tied=True)
        optimizer = optim.SGD(stages, 0.1, replicas=mesh.replicas)
        with Pipeline(stages, schedule, mesh.pipe, loss=nn.softmax_cross_entropy, replicas=mesh.replicas):
            with pytest.raises(ArgumentError, match="build the pipeline first"):
                optimizer.step()
        assert optimizer.steps == 0


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "change, named",
    [
        (lambda stages, optimizer: setattr(optimizer, "steps", 7), "steps"),
        (lambda stages, optimizer: setattr(optimizer, "lr", 0.2), "lr 0.2"),
        (lambda stages, optimizer: stages[1].parameters.flat.fill(0), "sample of the parameters"),
        (lambda stages, optimizer: fill(stages, 1), "sample of the gradients"),
    ],
)
def test_replicas_that_differ_before_a_step_are_told(comm, change, named):
    """After it they would not: each share would come from another replica."""
    stages = made()
    optimizer = optim.AdamW(stages, 0.1, replicas=comm)
    fill(stages)
    optimizer.step()
    if comm.rank == 1:
        change(stages, optimizer)
    with pytest.raises(MismatchError, match=rf"{named}(.|\n)*Pipeline"):
        optimizer.step()


def test_a_failure_on_one_replica_ends_the_step_on_all():
    def on_each_rank(comm):
        stages = made()
        optimizer = optim.AdamW(stages, 0.1, replicas=comm)
        if comm.rank == 1:
            optimizer.before_write.append(lambda: 1 / 0)
        with pytest.raises((ZeroDivisionError, PeerError)):
            optimizer.step()
        with pytest.raises(MpipipeError):
            optimizer.step()

    inprocess.run(3, on_each_rank)


@pytest.mark.mpi(min_size=2)
def test_so_it_does_on_gpus(comm, monkeypatch):
    """One replica fails before its second share, while the others wait for the first."""
    monkeypatch.setenv("MPIPIPE_TIMEOUT", "60")
    with own_gpus(comm.rank):
        stages = made(device="cuda")
        optimizer = optim.AdamW(stages, 0.1, replicas=comm.Dup())  # never freed after a failure
        if comm.rank == 1:
            give = optimizer._shards.give
            monkeypatch.setattr(optimizer._shards, "give", lambda number: 1 / 0 if number else give(number))
        with pytest.raises(ZeroDivisionError if comm.rank == 1 else PeerError):
            optimizer.step()
