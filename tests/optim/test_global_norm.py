"""The norm of gradients that ranks put together on their GPUs: same bits, no wait, and an end where a rank fails."""

import math

import pytest
from gpu_emulator.fixture import own_gpus
from support.device_pipelines import all_aborted
from support.gradients import contents, fill, gradient_norm, watched

from mpipipe import arrays, nn, optim
from mpipipe.errors import ArgumentError, MpipipeError, NonFiniteError, PeerError

OPTIMIZERS = {
    "AdamW": lambda stages: optim.AdamW(stages, 0.01, weight_decay=0.1),
    "SGD with momentum": lambda stages: optim.SGD(stages, 0.01, 0.9, 0.1),
}


@pytest.fixture(params=[False, True], ids=["streams", "one queue"])
def own(request, comm, monkeypatch):
    monkeypatch.setenv("MPIPIPE_TIMEOUT", "60")  # a deadlock is to be an error
    monkeypatch.setenv("MPIPIPE_NCCL", "auto")
    with own_gpus(comm.rank, request.param) as device:
        yield device


def made(rank, dtype="float32", device="cuda"):
    """One stage on rank 0, two on rank 1, and so on."""
    stages = [
        nn.Stage([nn.Linear(37, 13 + number), nn.RMSNorm(13 + number)], dtype, number, device, 100 * rank + 2 * number)
        for number in range(rank + 1)
    ]
    for number, stage in enumerate(stages):
        stage.index = 10 * rank + number
    return stages


# -- bits --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_have_the_bits_of_a_norm_that_mpi_gathers(own, comm, name, dtype):
    before, now = made(comm.rank, dtype), made(comm.rank, dtype)
    first, second = OPTIMIZERS[name](before), OPTIMIZERS[name](now)
    scaler, other = optim.LossScaler(1024.0), optim.LossScaler(1024.0)
    with optim.GlobalNorm(now, comm) as over:
        assert over.on_device
        for step, max_norm in enumerate((5.0, 1e9, 0.1, math.inf)):
            fill(before, step, 1024.0), fill(now, step, 1024.0)
            norm = optim.scaled_step(first, scaler, max_norm, lr=0.02, comm=comm)
            assert optim.scaled_step(second, other, max_norm, lr=0.02, over=over) == norm
            assert comm.allgather(norm) == [norm] * comm.size
            for stage in (*before, *now):
                stage.refresh()
            assert contents(now, second) == contents(before, first)
    assert second.steps == first.steps == 4 and other.good == 4


def test_clipping_has_the_bits_of_a_norm_that_mpi_gathers(own, comm):
    before, now = made(comm.rank), made(comm.rank)
    with optim.GlobalNorm(now, comm) as over:
        for max_norm in (3.0, 1e9, math.inf, 0.01):
            fill(before, 1, 4.0), fill(now, 1, 4.0)
            norm = optim.clip_by_global_norm(before, max_norm, comm, scale=4.0)
            assert optim.clip_by_global_norm(now, max_norm, scale=4.0, over=over) == norm
            assert contents(now) == contents(before)
    assert norm != gradient_norm(now, comm, scale=4.0)  # after the last clipping


# -- waits -------------------------------------------------------------------------------------------------------------


@pytest.mark.mpi(min_size=2)
def test_the_host_asks_for_the_step_before_it_knows_the_norm(own, comm):
    stages = made(comm.rank)
    optimizer = optim.AdamW(stages, 0.01)
    waits = watched(optimizer, own)
    with optim.GlobalNorm(stages, comm) as over:
        optim.scaled_step(optimizer, optim.LossScaler(1.0), 0.5, over=over)  # uploads its tables once
        fill(stages, 0)
        waits.clear()
        own.reset()
        crossed = own.crossing(lambda: optim.scaled_step(optimizer, optim.LossScaler(1.0), 0.5, over=over))
        launches = list(own.launches)
    assert waits == [[], []]
    total = sum(comm.allgather(sum(len(stage.gradients) for stage in stages)))
    assert crossed == {"to_device": 0, "to_host": 8 * total}
    order = [each for each in launches if each in ("clip_factor", "adamw") or each.startswith("nccl")]
    updates = sum(len(stage.decay_ranges) for stage in stages)
    assert [each.split()[0] for each in order] == ["ncclAllReduce", "clip_factor"] + ["adamw"] * updates


# -- gradients that are not finite -------------------------------------------------------------------------------------


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_an_overflow_on_one_rank_changes_nothing_on_any(own, comm, value):
    stages = made(comm.rank, "float16")
    optimizer, scaler = optim.AdamW(stages, 0.01), optim.LossScaler(8.0)
    for stage in stages:
        stage.optimizer_writes_compute()
    guilty = comm.size - 1
    with optim.GlobalNorm(stages, comm) as over:
        fill(stages, 0)
        assert optim.scaled_step(optimizer, scaler, 1.0, over=over) is not None
        fill(stages, 1, bad=value if comm.rank == guilty else None)
        start = contents(stages, optimizer)
        assert optim.scaled_step(optimizer, scaler, 1.0, over=over) is None
        assert contents(stages, optimizer) == start
        assert (scaler.scale, scaler.skipped, optimizer.steps) == (4.0, 1, 1)
        fixed = optim.LossScaler(4.0, dynamic=False)
        for call in (
            lambda: optim.scaled_step(optimizer, fixed, 1.0, over=over),
            lambda: optim.clip_by_global_norm(stages, 1.0, over=over),
        ):
            with pytest.raises(NonFiniteError, match=rf"rank {guilty}, stage {11 * guilty}: .*{102 * guilty}\.bias"):
                call()
            assert contents(stages, optimizer) == start
        assert optimizer.steps == 1 and fixed.skipped == 0
        fill(stages, 2)
        assert optim.scaled_step(optimizer, scaler, 1.0, over=over) == gradient_norm(stages, comm, scale=4.0)


# -- where MPI gathers -------------------------------------------------------------------------------------------------


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("why", ["off", "missing on one rank", "stages of the host", "another replica has no GPU"])
def test_all_ranks_let_mpi_gather_where_nccl_cannot_be_used(own, comm, monkeypatch, why):
    device, pipe, replicas, rank = "cuda", comm, None, comm.rank
    if why == "off":
        monkeypatch.setenv("MPIPIPE_NCCL", "off")
    elif why == "missing on one rank":
        if comm.rank == 1:
            monkeypatch.setattr(arrays.nccl(), "get_version", None)
    elif why == "stages of the host":
        device = "cpu" if comm.rank else "cuda"
    else:
        if comm.size % 2:
            pytest.skip("needs an even number of ranks")
        half = comm.size // 2
        pipe, replicas = comm.Split(comm.rank // half, comm.rank), comm.Split(comm.rank % half, comm.rank)
        device, rank = "cuda" if comm.rank < half else "cpu", pipe.rank
    stages = made(rank, device=device)
    for stage in stages:
        stage.gradients.flat.fill(1) if device == "cpu" else fill([stage], 0)
    expected = gradient_norm(stages, pipe)
    with optim.GlobalNorm(stages, pipe, replicas=replicas) as over:
        assert not any(comm.allgather(over.on_device)) or pipe.size == 1
        assert optim.clip_by_global_norm(stages, math.inf, over=over) == expected


# -- misuse and failures -----------------------------------------------------------------------------------------------


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("why", ["other stages", "other parameters", "a failure"])
def test_a_rank_that_cannot_take_part_ends_all_of_them(own, comm, why):
    mine = comm.Split(0, comm.rank)  # a group that fails is not to be that of other tests
    stages = made(comm.rank)
    fill(stages, 0)
    over = optim.GlobalNorm(stages, mine)
    optim.clip_by_global_norm(stages, 1.0, over=over)
    comm.Barrier()  # a rank still waiting for this norm would hear of the failure there
    given, guilty = stages, comm.rank == comm.size - 1
    expected = ArgumentError if why != "a failure" else ZeroDivisionError
    if guilty and why == "other stages":
        given = stages[::-1]
    elif guilty and why == "other parameters":
        stages[0].tied_copies.add(next(iter(stages[0].gradients)))
    elif guilty:

        class Broken:
            def sums_of_squares(self, flat, pieces, out):
                raise ZeroDivisionError("broken on purpose")

        stages[0].kernels = Broken()
    with pytest.raises(expected if guilty else PeerError):
        optim.clip_by_global_norm(given, 1.0, over=over)
    all_aborted(own.machine)
    with pytest.raises(MpipipeError, match="an earlier call of these ranks has failed"):
        optim.clip_by_global_norm(stages, 1.0, over=over)
