"""What a pipeline says of a GPU that runs out of memory within a step, and of how far it is in a step."""

import re

import numpy as np
import pytest
from support import dense

from mpipipe import Pipeline, arrays, nn, schedules
from mpipipe.errors import PeerError, StageError
from mpipipe.job import inprocess
from mpipipe.schedules import gpipe

WIDTH, ROWS, MICROBATCHES = 32, 64, 8
ONE = ROWS * WIDTH * 4  # bytes of an activation between layers


@pytest.fixture
def machine(emulated_gpu):
    return emulated_gpu.machine


def run(comm, machine, room, recompute=False):
    """Make a step in which the last rank has `room` bytes more than after the first call; return its pipeline."""
    schedule = gpipe(comm.size, MICROBATCHES)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Gelu(), nn.Linear(WIDTH, WIDTH)]
    stage = nn.Stage(layers, first=3 * comm.rank, device="cuda")
    x = np.random.default_rng(0).normal(size=(ROWS * MICROBATCHES, WIDTH)).astype(np.float32)
    mine = dense.placed(schedule, comm.rank, x, x)
    with Pipeline([stage], schedule, comm, loss=nn.mean_squared_error, recompute=recompute) as pipeline:
        if comm.rank == comm.size - 1:
            machine.memory = machine.used_bytes + room
        pipeline.step(*mine)


def test_a_step_without_room_names_place_bytes_and_remedies(machine, comm):
    """Forwards of the first micro-batches fit, that of a later one does not."""
    with pytest.raises((StageError, PeerError)) as caught:
        run(comm, machine, 14 * ONE)
    error, last = caught.value, comm.size - 1
    text = str(error)
    assert f"rank {last}, stage {last}, micro-batch" in text and "ran out of memory on the GPU" in text
    if comm.rank == last:
        assert error.microbatch > 1 and isinstance(error.__cause__, MemoryError)
        found = re.fullmatch(r"([\d,]+) bytes asked for, ([\d,]+) bytes free of ([\d,]+)", error.found)
        asked, free, total = (int(part.replace(",", "")) for part in found.groups())
        assert asked == ONE > free and total == machine.memory
        assert "recompute=True" in error.remedy


def test_memory_beyond_the_limit_of_cupys_pool_is_not_free(machine):
    """CUPY_GPU_MEMORY_LIMIT sets it, or the program; the device itself has plenty."""
    pool, x = arrays.cupy().get_default_memory_pool(), arrays.empty((ONE,), np.uint8, "cuda")
    limit = machine.used_bytes + 1000
    pool.set_limit(size=limit)
    with pytest.raises(MemoryError, match=f"limit set to: {limit:,} bytes") as caught:
        arrays.empty((1001,), np.uint8, "cuda")
    assert arrays.memory_shortage(caught.value) == (1001, limit - machine.used_bytes, limit)
    pool.set_limit(size=0)
    assert arrays.memory_shortage(caught.value).total == machine.memory and x.nbytes == ONE


def test_recomputation_fits_where_the_step_did_not(machine, comm):
    with pytest.raises((StageError, PeerError)):
        run(comm, machine, 22 * ONE)
    machine.memory = 1 << 34
    run(comm, machine, 22 * ONE, recompute=True)


@pytest.mark.parametrize("status, says", [
    ("ALLOC_FAILED", "forward ran out of memory"), ("EXECUTION_FAILED", "CUBLAS_STATUS_EXECUTION_FAILED"),
])  # fmt: skip
def test_a_library_that_does_not_say_how_much_and_another_error(machine, comm, monkeypatch, status, says):
    """cuBLAS, cuDNN and the runtime fail in their own ways."""

    def refuse(*arguments):
        raise RuntimeError(f"CUBLAS_STATUS_{status}")

    if comm.rank == 0:
        monkeypatch.setattr(arrays.cupy().cuda.cublas, "gemmEx", refuse)
    with pytest.raises((StageError, PeerError), match=says) as caught:
        run(comm, machine, 1 << 30)
    if comm.rank == 0 and status == "ALLOC_FAILED":
        assert caught.value.found.startswith("an unknown number of bytes asked for")
    assert status == "ALLOC_FAILED" or "memory" not in str(caught.value)


# -- What a report of a hang tells of a pipeline, while a step runs and after it ---------------------------------------


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_account_names_the_action(request, device):
    """In the forward of micro-batch 1 of the second step, and after that step."""
    if device == "cuda":
        request.getfixturevalue("gpu")
    schedule = schedules.one_f_one_b(2, 2)

    def job(comm):
        stage, found = nn.Stage([nn.Linear(8, 8)], first=comm.rank, device=device), []
        mine = dense.placed(schedule, comm.rank, *np.ones((2, 8, 8), np.float32))
        with Pipeline([stage], schedule, comm, nn.mean_squared_error) as pipeline:
            forward = stage.forward
            stage.forward = lambda x: found.append(pipeline.state.snapshot()) or forward(x)
            for _ in range(2):
                pipeline.step(*mine)
            return found[3], pipeline.state.snapshot()

    for rank, (during, after) in enumerate(inprocess.run(2, job)):
        assert during.computes
        assert during.doing == f"forward of stage {rank}, micro-batch 1, in step (call 2) of pipeline 1 (one_f_one_b)"
        assert (after.doing, after.computes) == ("", False)
