"""NCCL: whether all ranks can use it, and sums in every case."""

import ml_dtypes
import numpy as np
import pytest
from gpu_emulator.fixture import own_gpus
from support.around import make

from mpipipe import arrays
from mpipipe.comm.nccl import sums
from mpipipe.comm.nccl.channel import Facts, NcclChoice, NcclTask, agree_on_nccl, judge
from mpipipe.comm.nccl.sums import NcclSums
from mpipipe.errors import BackendError
from mpipipe.job import inprocess
from mpipipe.job.group import RankGroup, group_of
from mpipipe.job.wait import wait_for

# -- choice ------------------------------------------------------------------------------------------------------------


def ranks(count, **changes):
    """Facts of ranks that can use NCCL; `changes` are {name: {rank: value}}."""
    everyone = []
    for rank in range(count):
        facts = Facts(rank, "auto", "", "a", f"gpu {rank}", "2.27.7")
        everyone.append(facts._replace(**{name: those[rank] for name, those in changes.items() if rank in those}))
    return everyone


def test_ranks_with_a_gpu_each_use_nccl():
    assert judge(ranks(4)) == NcclChoice(True, "each of the 4 ranks has a GPU of its own and NCCL 2.27.7")
    elsewhere = ranks(2, gpu={0: "gpu 0", 1: "gpu 0"}, host={1: "b"})
    assert judge(elsewhere).sums


@pytest.mark.parametrize(
    "changes, reason",
    [
        (dict(problem={1: "it computes on the CPU"}), "on rank 1: it computes on the CPU"),
        (dict(problem=dict.fromkeys(range(3), "MPIPIPE_NCCL=off")), "on rank 0: MPIPIPE_NCCL=off"),
        (dict(gpu={2: "gpu 0"}), "on rank 2: it shares GPU gpu 0 of a with rank 0"),
        (dict(version={1: "2.18.3"}), "on rank 1: it has NCCL 2.18.3, and others 2.27.7"),
    ],
)
def test_one_rank_in_the_way_keeps_nccl_out(changes, reason):
    assert judge(ranks(3, **changes)) == NcclChoice(False, reason)
    with pytest.raises(BackendError) as caught:
        judge(ranks(3, setting={0: "on"}, **changes))
    assert reason.partition(": ")[2] in str(caught.value)


def test_the_first_rank_in_the_way_is_named_and_one_rank_alone_needs_no_nccl():
    with pytest.raises(BackendError) as caught:
        judge(ranks(3, setting={0: "on"}, gpu={1: "gpu 0"}, problem={2: "CuPy does not find libnccl"}))
    assert caught.value.rank == 1 and caught.value.found == "it shares GPU gpu 0 of a with rank 0"
    assert judge(ranks(1)) == NcclChoice(False, "one rank has no other to talk to")


def test_threads_do_not_use_nccl():
    found = inprocess.run(2, lambda comm: agree_on_nccl([group_of(comm)], "cuda"))
    assert found == [NcclChoice(False, "on rank 0: the ranks are threads of one process")] * 2


def test_info_says_whether_and_why(emulated_gpu, launch):
    own = {**emulated_gpu.environment, "MPIPIPE_TEST_GPU_OWN": "1"}
    job = launch(2, ["-m", "mpipipe", "info"], env=own)
    assert job.returncode == 0, job.stderr
    said = " ".join(job.stdout.split())  # its lines are folded
    assert "NCCL sums over replicas: each of the 2 ranks has a GPU of its own and NCCL 2.27.7 " in said


# -- sums --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def own(comm, monkeypatch):
    monkeypatch.setenv("MPIPIPE_TIMEOUT", "60")
    with own_gpus(comm.rank) as device:
        yield device


@pytest.fixture
def group(own, comm):
    new = RankGroup(comm)
    yield new
    new.close()


@pytest.fixture
def adder(group):
    found = NcclSums(group)
    yield found
    found.close()


def total(adder, host):
    flat = arrays.upload(host)
    wait_for(adder.start(flat))
    return arrays.download(flat)


@pytest.mark.parametrize("kind", ["float32", "float64", "float16", "int64", "complex64"])
def test_exact_sums_and_what_is_not_finite_on_one_rank(adder, comm, kind):
    parts = [(np.arange(1000) % 7 + rank).astype(kind) for rank in range(comm.size)]
    if kind != "int64":
        parts[-1][:2] = np.inf, np.nan
    np.testing.assert_array_equal(total(adder, parts[comm.rank]), sum(parts).astype(kind))


def test_bfloat16_is_added_in_bfloat16(adder, comm):
    rng = np.random.default_rng(0)
    parts = rng.normal(size=(comm.size, 5000)).astype(ml_dtypes.bfloat16)
    found = total(adder, parts[comm.rank]).astype(np.float64)
    exact, size = parts.astype(np.float64).sum(0), np.abs(parts.astype(np.float64)).sum(0)
    assert (np.abs(found - exact) <= comm.size * 2.0**-8 * size).all()


def test_several_sums_in_buckets_whatever_is_waited_for_first(own, adder, comm, monkeypatch):
    monkeypatch.setattr(sums, "BUCKET_BYTES", 4000)
    flats = [arrays.upload(np.full(2501, float(comm.rank + k))) for k in range(3)]
    pending = [adder.start(flat) for flat in flats]
    for each in pending[::-1]:
        wait_for(each)
    for k, flat in enumerate(flats):
        assert (arrays.download(flat) == comm.size * (comm.size - 1) / 2 + comm.size * k).all()
    assert adder.is_empty


def test_a_sum_follows_the_work_before_it(adder, comm):
    flat = make(1, 1 << 12)
    wait_for(adder.start(flat))
    arrays.copy_into(flat, flat)
    assert (arrays.download(flat) == comm.size).all()


def test_what_nccl_cannot_add_is_not_taken(adder):
    assert not adder.takes(np.ones(3))
    assert not adder.takes(arrays.upload(np.ones(3, bool)))
    assert adder.takes(arrays.upload(np.ones(3, ml_dtypes.bfloat16)))
    assert total(adder, np.empty(0)).size == 0


def test_a_task_tells_what_it_raised(own):
    task = NcclTask(lambda: 1 // 0, "a division")
    wait_for(task)
    with pytest.raises(BackendError, match="a division failed") as caught:
        task.value()
    assert "ZeroDivisionError" in str(caught.value) and "MPIPIPE_NCCL=off" in str(caught.value)


# -- one rank, on which a real NCCL works as well ----------------------------------------------------------------------


@pytest.fixture
def alone(gpu, comm):
    try:
        arrays.nccl()
    except BackendError as error:
        pytest.skip(str(error))
    mine = comm.Split(comm.rank)
    group = RankGroup(mine)
    yield group
    group.close()
    mine.Free()


@pytest.mark.parametrize("kind", ["float32", "float64", "float16", ml_dtypes.bfloat16, "int64", "complex64"], ids=str)
def test_a_rank_alone_adds_nothing_to_its_values(alone, kind):
    mine = (np.arange(1000) % 7).astype(kind)
    adder = NcclSums(alone)
    for _ in range(2):
        np.testing.assert_array_equal(total(adder, mine), mine)
    adder.close()
