"""Halos and all-to-alls against the whole field on one process, their gradients, and what they refuse."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import dense
from support.gradcheck import check_split
from support.rings import refused
from support.tolerance import close

from mpipipe import Mesh, Pipeline, arrays, nn
from mpipipe.attention import Layout
from mpipipe.errors import ArgumentError, MismatchError, PeerError
from mpipipe.even_split import even_split
from mpipipe.exchange import AllToAll, HaloExchange
from mpipipe.job import inprocess
from mpipipe.schedules import zero_bubble_h1


def cut(whole, axis, lengths, rank):
    ends = np.cumsum([0, *lengths])
    return np.ascontiguousarray(whole.take(range(ends[rank], ends[rank + 1]), axis=axis))


def padded_indices(lengths, rank, before, after, periodic):
    """The place in the whole of each point of a rank's y; -1 beyond the ends."""
    start, total = sum(lengths[:rank]), sum(lengths)
    places = np.arange(start - before, start + lengths[rank] + after)
    return places % total if periodic else np.where((places < 0) | (places >= total), -1, places)


def halo_of_whole(whole, axis, places):
    y = whole.take(np.maximum(places, 0), axis=axis)
    y[(slice(None),) * axis + (places < 0,)] = 0
    return y


def inner(comm, one, other):
    """The inner product of two arrays that are spread over ranks."""
    return sum(comm.allgather(float((one * other).sum())))


def check_halo(comm, shape, axis, lengths, width, periodic, dtype=np.float64, place=lambda x: x):
    random = np.random.default_rng(5)
    shape = (*shape[:axis], sum(lengths), *shape[axis + 1 :])
    whole = random.integers(-9, 9, size=shape).astype(dtype)  # so that sums of float16 are exact
    layer = HaloExchange(comm, axis, width, periodic)
    nn.Stage([layer], dtype=dtype, device="cpu")
    before, after = (width, width) if isinstance(width, int) else width
    places = [padded_indices(lengths, rank, before, after, periodic) for rank in range(comm.size)]
    wanted = [halo_of_whole(whole, axis, each) for each in places]
    gradients = [random.integers(-9, 9, size=each.shape).astype(dtype) for each in wanted]
    dwhole = np.zeros((*shape[:axis], shape[axis] + 1, *shape[axis + 1 :]))  # the last row is what -1 adds to
    for each, dy in zip(places, gradients):
        np.add.at(dwhole, (slice(None),) * axis + (each,), dy.astype(float))
    x, dy = cut(whole, axis, lengths, comm.rank), gradients[comm.rank]
    for _ in range(2):
        y, saved = layer.forward(place(x))
        dx, pending = layer.backward_input(place(dy), saved)
        y, dx = arrays.download(y, dx)
        np.testing.assert_array_equal(y, wanted[comm.rank])
        expected = cut(dwhole, axis, [*lengths[:-1], lengths[-1] + 1], comm.rank)
        np.testing.assert_array_equal(dx, expected.take(range(lengths[comm.rank]), axis=axis))
        assert pending is None and y.dtype == dx.dtype == x.dtype
    if dtype == np.float64:
        assert inner(comm, y, dy) == inner(comm, x, dx), "the backward is the adjoint; small integers add up exactly"


@st.composite
def halos(draw):
    ranks = draw(st.integers(1, 5))
    lengths = draw(st.lists(st.integers(0, 5), min_size=ranks, max_size=ranks))
    width = draw(st.integers(0, 4) | st.tuples(st.integers(0, 7), st.integers(0, 7)))
    shape = draw(st.sampled_from([(1, 1), (2, 1, 3), (1, 1, 2, 2), (2, 1, 2, 2, 1)]))
    return ranks, shape, draw(st.integers(1, len(shape) - 1)), lengths, width, draw(st.booleans()) and sum(lengths) > 0


@settings(max_examples=40)
@given(halos(), st.booleans())
def test_any_halo_is_that_of_the_whole_and_its_backward_the_adjoint(case, synchronous):
    ranks, *case = case
    inprocess.run(ranks, lambda comm: check_halo(comm, *case), synchronous=synchronous)


@pytest.mark.parametrize("periodic", [False, True])
@pytest.mark.parametrize("width", [1, (0, 3), (5, 2), 40])
def test_halos_on_real_ranks(comm, monkeypatch, width, periodic):
    monkeypatch.setenv("MPIPIPE_SYNC_SENDS", "1")
    lengths = [4 + 3 * (rank % 2) for rank in range(comm.size)]
    check_halo(comm, (2, 1, 700, 3), 1, lengths, width, periodic)
    check_halo(comm, (1, 3, 1, 4), 2, lengths, width, periodic, np.float32)


@pytest.mark.parametrize("override", ["0", "1"], ids=["staged", "direct"])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_halos_of_device_arrays(gpu, comm, monkeypatch, dtype, override):
    if override == "1" and gpu.real:
        pytest.skip("this MPI may not take device memory")
    monkeypatch.setenv("MPIPIPE_GPU_DIRECT", override)
    lengths = [4 + 3 * (rank % 2) for rank in range(comm.size)]
    for axis, periodic in ((1, False), (2, True)):
        check_halo(comm, (2, 3, 6, 3), axis, lengths, (2, 1), periodic, arrays.dtype(dtype), arrays.upload)
    check_all_to_all(comm, 2, 1, lengths, 5, arrays.upload)


def test_gradients_of_halos_are_rounded_once():
    """In bfloat16 256 + 1 is 256, and so is that + 1; but 256 + 2 is 258."""

    def on_each_rank(comm):
        layer = HaloExchange(comm, 1, 1, periodic=True)
        _, saved = layer.forward(np.ones((1, 1, 1), arrays.dtype("bfloat16")))
        dy = np.array([1, 256, 1]).reshape(1, 3, 1).astype(arrays.dtype("bfloat16"))
        return float(layer.backward_input(dy, saved)[0][0, 0, 0])

    assert inprocess.run(2, on_each_rank) == [258, 258]


# -- all-to-all -------------------------------------------------------------------------------------------------------


def check_all_to_all(comm, scatter, gather, lengths, across, place=lambda x: x):
    shape = [2, 3, 3, 2]
    shape[scatter], shape[gather] = across, sum(lengths)
    random = np.random.default_rng(6)
    whole, dwhole = random.standard_normal((2, *shape))
    parts = [len(part) for part in even_split(across, comm.size)]
    layer = AllToAll(comm, scatter, gather)
    nn.Stage([layer], dtype="float64")
    x = cut(whole, gather, lengths, comm.rank)
    y, saved = layer.forward(place(x))
    dx, _ = layer.backward_input(place(cut(dwhole, scatter, parts, comm.rank)), saved)
    y, dx = arrays.download(y, dx)
    np.testing.assert_array_equal(y, cut(whole, scatter, parts, comm.rank))
    np.testing.assert_array_equal(dx, cut(dwhole, gather, lengths, comm.rank))


@pytest.mark.parametrize("scatter, gather", [(1, 2), (2, 1), (3, 1), (1, 3)])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("across", [8, 5, 2])  # fewer points than ranks leave some without
def test_all_to_all_exchanges_the_axis_that_is_cut(ranks, scatter, gather, across):
    inprocess.run(ranks, lambda comm: check_all_to_all(comm, scatter, gather, [3, 0, 2, 5][:ranks], across))


def test_all_to_all_on_real_ranks(comm):
    check_all_to_all(comm, 2, 1, [301 + rank for rank in range(comm.size)], 17)


# -- in a pipeline ----------------------------------------------------------------------------------------------------


class Taps(nn.Layer):
    """y[i] = sum over k of w[k] x[i + k] along axis 1: a convolution without padding."""

    def __init__(self, taps):
        self.declared = {"w": nn.Parameter((taps,), lambda generator, shape: generator.standard_normal(shape))}

    def forward(self, x):
        points = x.shape[1] - len(self.w) + 1
        return sum(w * x[:, k : k + points] for k, w in enumerate(self.w)), x

    def backward_input(self, dy, saved):
        dx = np.zeros_like(saved)
        for k, w in enumerate(self.w):
            dx[:, k : k + dy.shape[1]] += w * dy
        return dx, (dy, saved)

    def backward_weight(self, pending):
        dy, x = pending
        self.w_grad += [float((dy * x[:, k : k + dy.shape[1]]).sum()) for k in range(len(self.w))]


def net(comm, layers, periodic):
    """(layers, halo and taps in turn), with a product between."""
    made = []
    for number in range(layers):
        made += [HaloExchange(comm, 1, (number % 2 + 1, 2), periodic), Taps(number % 2 + 4), nn.Linear(3, 3)]
    return made


def one_step(mesh, whole, target, periodic):
    layout = Layout("contiguous", mesh.seq.size, whole.shape[1])
    schedule = zero_bubble_h1(mesh.pipe.size, 4)
    layers, rank, count = net(mesh.seq, 4, periodic), mesh.pipe.rank, 12 // mesh.pipe.size
    stage = nn.Stage(layers[rank * count : (rank + 1) * count], first=rank * count, dtype="float64", seed=3)
    weight = layout.weight(mesh.seq.rank)

    def loss(y, t):
        return float(((y - t) ** 2).mean()), 2 * (y - t) / y.size, weight

    mine = [layout.shard(x, mesh.seq.rank) for x in (whole, target)]
    with Pipeline([stage], schedule, mesh.pipe, loss, replicas=mesh.replicas) as pipeline:
        for _ in range(2):
            value = pipeline.step(*dense.placed(schedule, rank, *mine)).loss
    return value, {name: stage.gradients[name].copy() for name in stage.gradients}


@pytest.mark.parametrize("periodic", [False, True])
def test_two_pipelines_through_shards_equal_one_process(periodic):
    """pipe x seq = 2 x 2 with a schedule that splits the backward, and uneven shards: losses and all gradients."""
    random = np.random.default_rng(2)
    whole, target = random.standard_normal((2, 4, 21, 3))

    def on(comm, pipe, seq):
        with Mesh(comm, pipe=pipe, seq=seq) as mesh:
            return one_step(mesh, whole, target, periodic)

    ((value, gradients),) = inprocess.run(1, lambda comm: on(comm, 1, 1))
    for found, part in inprocess.run(4, lambda comm: on(comm, 2, 2)):
        close(found, value, 1000)
        for name, gradient in part.items():
            close(gradient, gradients[name], 1000, np.abs(gradients[name]).max(), what=name)
    assert len(gradients) == 12


def test_the_split_backward_has_the_bits_of_the_whole_one():
    def on_each_rank(comm):
        stage = nn.Stage(net(comm, 2, True), dtype="float64")
        x, dy = np.random.default_rng(comm.rank).standard_normal((2, 2, 5 + comm.rank, 3))
        _, saved = stage.forward(x)
        dx = stage.backward(dy, saved)
        check_split(stage, dy, saved, dx, stage.gradients.flat.copy())

    inprocess.run(3, on_each_rank)


# -- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.mpi(min_size=2)
def test_mistakes_are_one_error_on_all_ranks(comm):
    odd = comm.rank == 1
    x = np.zeros((2, 4, 3, 2))

    def laid(kind, ranks, points):
        return HaloExchange(comm, 1, 1, layout=Layout(kind, ranks, points))

    for match, kind, build in (
        ("axes of x", ArgumentError, lambda: HaloExchange(comm, 0, 1)),
        ("width of a halo", ArgumentError, lambda: HaloExchange(comm, 1, -1)),
        ("width of a halo", ArgumentError, lambda: HaloExchange(comm, 1, (1, 2, 3))),
        ("differ in axis", MismatchError, lambda: HaloExchange(comm, 1 + odd, 1)),
        ("differ in width", MismatchError, lambda: HaloExchange(comm, 1, 1 + odd)),
        ("differ in periodic", MismatchError, lambda: HaloExchange(comm, 1, 1, periodic=odd)),
        ("in the order of the ranks", ArgumentError, lambda: laid("zigzag", comm.size, 8)),
        ("in the order of the ranks", ArgumentError, lambda: laid("contiguous", 9, 8)),
        ("axes of x", ArgumentError, lambda: AllToAll(comm, 1, 1)),
        ("different calls", MismatchError, lambda: AllToAll(comm, 1, 2) if odd else HaloExchange(comm, 1, 1)),
    ):  # fmt: skip
        refused(comm, kind, match, build)
    halo, other = HaloExchange(comm, 1, 1), AllToAll(comm, 2, 1)
    nn.Stage([halo, other], dtype="float64")
    for match, kind, build in (
        ("the input", ArgumentError, lambda: halo.forward(x[0, 0, 0])),
        ("the input", ArgumentError, lambda: halo.forward(x.astype(int) if odd else x)),
        ("differ in shape", MismatchError, lambda: halo.forward(x[:, :, 1:] if odd else x)),
        ("differ in dtype", MismatchError, lambda: halo.forward(x.astype("f") if odd else x)),
        ("different calls", MismatchError, lambda: (other if odd else halo).forward(x)),
        ("without points", ArgumentError, lambda: HaloExchange(comm, 1, 1, True).forward(x[:, :0])),
        ("not this rank's shard", ArgumentError, lambda: laid("contiguous", comm.size, 9).forward(x)),
    ):  # fmt: skip
        refused(comm, kind, match, build)
    saved = [halo.forward(x) for _ in range(2)]
    dy = saved[0][0]
    refused(
        comm,
        ArgumentError,
        "gradient of the output",
        lambda: halo.backward_input(dy[:, 1:] if odd else dy, saved[0][1]),
    )
    refused(comm, MismatchError, "differ in forward", lambda: halo.backward_input(dy, saved[odd][1]))
    refused(
        comm, MismatchError, "different calls", lambda: halo.forward(x) if odd else halo.backward_input(dy, saved[0][1])
    )
    np.testing.assert_array_equal(halo.forward(x)[0], dy)  # and all goes on


def test_a_rank_that_raises_ends_the_others():
    """Within seconds, in the next forward; no rank waits for the one that is gone."""
    begin, kinds, lock = time.monotonic(), {}, threading.Lock()

    def on_each_rank(comm):
        layer = HaloExchange(comm, 1, 1)
        try:
            for number in range(3):
                if number == 1 and comm.rank == 1:
                    raise ValueError("planted")
                layer.forward(np.ones((1, 3, 1)))
        except Exception as error:
            with lock:
                kinds[comm.rank] = type(error)
            raise

    with pytest.raises(Exception, match="planted"):
        inprocess.run(3, on_each_rank)
    assert kinds == {0: PeerError, 1: ValueError, 2: PeerError} and time.monotonic() - begin < 20
