"""Halos and all-to-alls against the whole field on one process, their gradients, and what they refuse."""

import threading
import time
from functools import partial

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
from mpipipe.exchange import AllToAll, HaloConv, HaloExchange
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
        for batch in (1, 2):  # parts of one field are received where they belong
            shape = batch, 3, 6, 3
            check_halo(comm, shape, axis, lengths, (2, 1), periodic, arrays.dtype(dtype), arrays.upload)
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


# -- convolutions -----------------------------------------------------------------------------------------------------


def check_conv(comm, axis, lengths, width, place=lambda x: x, dtype="float64", batch=2, inputs=4, **options):
    """Output, gradient of the input, and gradients of weights added over ranks are those of the whole field."""
    random = np.random.default_rng(7)
    space, step = [6, 8, 6][: len(width)], options.get("stride", 1)
    space[axis - 1] = sum(lengths)
    device = arrays.device_of(place(np.zeros(1)))
    whole = random.standard_normal((batch, *space, inputs))
    dense_stage = nn.Stage([nn.Conv(inputs, 6, width, **options)], dtype="float64", seed=1)
    y, saved = dense_stage.forward(whole)
    dy = random.standard_normal(y.shape)
    dx = dense_stage.backward(dy, saved)
    outputs = np.diff(-(-np.cumsum([0, *lengths]) // step)).tolist()
    kind = arrays.dtype(dtype)
    stage = nn.Stage([HaloConv(comm, axis, nn.Conv(inputs, 6, width, **options))], dtype=dtype, seed=1, device=device)
    assert list(stage.parameters) == list(dense_stage.parameters)
    mine = [cut(whole, axis, lengths, comm.rank), cut(dy, axis, outputs, comm.rank)]
    mine = [place(x.astype(kind)) for x in mine]
    found, saved = stage.forward(mine[0])
    dfound = stage.backward(mine[1], saved)
    gradients = {name: arrays.download(stage.gradients[name]).astype(float) for name in stage.gradients}
    if device == "cpu":
        check_split(stage, mine[1], saved, dfound, stage.gradients.flat.copy())
    found, dfound = arrays.download(found, dfound)
    terms = np.prod(width) * inputs + 2
    size = [np.abs(x).max() for x in (whole, dy, dense_stage.parameters.flat)]
    close(found, cut(y, axis, outputs, comm.rank), terms, terms * size[0] * size[2], kind)
    close(dfound, cut(dx, axis, lengths, comm.rank), 6 * terms, 6 * terms * size[1] * size[2], kind)
    for name, wanted in dense_stage.gradients.items():
        gradient = sum(comm.allgather(gradients[name]))
        close(gradient, wanted, dy.size, dy.size / 6 * size[0] * max(size[1], 1), kind, name)


CONVS = [
    dict(width=(3,)), dict(width=(4,), padding="periodic"), dict(width=(5, 3), groups=2), dict(width=(1, 3)),
    dict(width=(3, 4), padding=("periodic", "same"), stride=2, bias=False), dict(width=(3, 2, 3), stride=2),
]  # fmt: skip


@pytest.mark.parametrize("options", CONVS, ids=str)
@pytest.mark.parametrize("lengths", [[8], [12, 14], [2, 6, 4], [4, 4, 2, 2], [2, 2, 2, 2]], ids=str)
def test_a_convolution_of_shards_is_that_of_the_whole_field(lengths, options):
    """Shards that are shorter than the window need several neighbours."""
    for axis in range(1, 1 + len(options["width"])):
        inprocess.run(len(lengths), partial(check_conv, axis=axis, lengths=lengths, **options))


def test_convolutions_of_device_arrays(gpu, comm):
    for dtype, options in (("float32", CONVS[2]), ("bfloat16", CONVS[4])):
        check_conv(
            comm, 1, [4 + 4 * (rank % 2) for rank in range(comm.size)], **options, place=arrays.upload, dtype=dtype
        )


@pytest.mark.mpi(min_size=2)
def test_a_convolution_that_does_not_fit_its_shards(comm):
    odd, x = comm.rank == 1, np.zeros((1, 3, 4, 2))

    def conv(axis=1, shards=x, **options):
        layer = HaloConv(comm, axis, nn.Conv(2, 2, options.pop("width", (3, 3)), **options))
        nn.Stage([layer], dtype="float64")
        return layer.forward(shards)

    for match, kind, build in (
        ("is padded", ArgumentError, lambda: conv(axis=3)),
        ("is padded", ArgumentError, lambda: HaloConv(comm, 1, nn.Linear(2, 2))),
        ("differ in convolution", MismatchError, lambda: conv(stride=2 if odd else 1)),
        ("does not fit the shards", ArgumentError, lambda: conv(stride=2)),
        ("does not fit the shards", ArgumentError, lambda: conv(width=(40, 1), padding="periodic")),
        ("does not fit the field", ArgumentError, lambda: conv(width=(3, 9), padding=("same", "valid"))),
        ("last axis of the input", ArgumentError, lambda: conv(shards=x[..., :1])),
        ("not a field", ArgumentError, lambda: conv(shards=x[0])),
        ("does not fit the field", ArgumentError, lambda: conv(shards=x[:, :0] if odd else x)),
        (r"layer 0 \(HaloConv\): the input", ArgumentError, lambda: conv(2, x[0, 0, 0] if odd else x)),
        (r"layer 0 \(HaloConv\): the input", ArgumentError, lambda: conv(2, x[0, 0] if odd else x)),
    ):
        refused(comm, kind, match, build)


# -- in a pipeline ----------------------------------------------------------------------------------------------------


def net(comm, layers, periodic):
    """Layers, three by three: a halo, a convolution that needs it, and one that brings its own."""
    made = []
    for number in range(layers):
        halo = HaloExchange(comm, 1, (number % 2 + 1, 2), periodic)
        conv = nn.Conv(3, 3, (3,), padding="periodic" if periodic else "same")
        made += [halo, nn.Conv(3, 3, (number % 2 + 4,), padding="valid"), HaloConv(comm, 1, conv)]
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
    assert len(gradients) == 16


# -- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.mpi(min_size=2)
def test_mistakes_are_one_error_on_all_ranks(comm):
    odd = comm.rank == 1
    x = np.zeros((2, 4, 3, 2))

    def laid(*layout):
        return HaloExchange(comm, 1, 1, layout=Layout(*layout))

    for match, kind, build in (
        ("axes of x", ArgumentError, lambda: HaloExchange(comm, 0, 1)),
        ("width of a halo", ArgumentError, lambda: HaloExchange(comm, 1, -1)),
        ("differ in axis", MismatchError, lambda: HaloExchange(comm, 1 + odd, 1)),
        ("differ in periodic", MismatchError, lambda: HaloExchange(comm, 1, 1, periodic=odd)),
        ("in the order of the ranks", ArgumentError, lambda: laid("zigzag", comm.size, 8)),
        ("in the order of the ranks", ArgumentError, lambda: laid("contiguous", comm.size, 8, (5, 3))),
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
        ("different calls", MismatchError, lambda: (other if odd else halo).forward(x)),
        ("far wider", ArgumentError, lambda: HaloExchange(comm, 1, 2**62, True).forward(x)),
        ("far wider", ArgumentError, lambda: HaloExchange(comm, 1, 2**62).forward(x)),
        ("far wider", ArgumentError, lambda: HaloExchange(comm, 1, 1, True).forward(x[:, :0])),
        ("not this rank's shard", ArgumentError, lambda: laid("contiguous", comm.size, 9).forward(x)),
    ):  # fmt: skip
        refused(comm, kind, match, build)
    saved = [halo.forward(x) for _ in range(2)]
    dy = saved[0][0]
    for match, kind, build in (
        ("gradient of the output", ArgumentError, lambda: halo.backward_input(dy[:, 1:] if odd else dy, saved[0][1])),
        ("differ in forward", MismatchError, lambda: halo.backward_input(dy, saved[odd][1])),
        ("different calls", MismatchError, lambda: halo.forward(x) if odd else halo.backward_input(dy, saved[0][1])),
    ):
        refused(comm, kind, match, build)
    np.testing.assert_array_equal(halo.forward(x)[0], dy)  # and all goes on


@pytest.mark.parametrize("make", [lambda comm: HaloExchange(comm, 1, 1), lambda comm: AllToAll(comm, 2, 1)])
def test_a_rank_that_raises_ends_the_others(make):
    """Within seconds, in the next forward; no rank waits for the one that is gone."""
    begin, kinds, lock = time.monotonic(), {}, threading.Lock()

    def on_each_rank(comm):
        layer = make(comm)
        try:
            for number in range(3):
                if number == 1 and comm.rank == 1:
                    raise ValueError("planted")
                layer.forward(np.ones((1, 3, 3, 1)))
        except Exception as error:
            with lock:
                kinds[comm.rank] = type(error)
            raise

    with pytest.raises(Exception, match="planted"):
        inprocess.run(3, on_each_rank)
    assert kinds == {0: PeerError, 1: ValueError, 2: PeerError} and time.monotonic() - begin < 20
