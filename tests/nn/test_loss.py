"""Losses against closed forms."""

import tracemalloc

import numpy as np
import pytest
from support import dense
from support.small_gpt import MODEL, build, parts_of, text
from support.tolerance import bound, close, eps, largest, within

from mpipipe import Pipeline, arrays, nn
from mpipipe.errors import ArgumentError
from mpipipe.nn.layers.head_slices import TILE_BYTES, tile_rows

RANDOM = np.random.default_rng(7)


def test_a_float32_loss_is_summed_in_float64():
    output, target = np.full(3_000_000, 0.1, np.float32), np.zeros(3_000_000, np.float32)
    value, gradient = nn.mean_squared_error(output, target)
    # equal terms err alike, so that sqrt(n) does not hold: in float64 this is 7e-10, in float32 0.4
    close(value, float(np.float32(0.1)) ** 2, 1, output.size * float(np.float32(0.1)) ** 2, dtype=np.float64)
    assert gradient.dtype == np.float32


@pytest.mark.parametrize(
    "loss, output, target, match",
    [
        (nn.softmax_cross_entropy, (2, 3), np.array([0, 3]), "out of range"),
        (nn.softmax_cross_entropy, (2, 3), np.zeros(2), "must be integers"),
        (nn.softmax_cross_entropy, (2, 3), np.zeros(3, int), "one target"),
        (nn.mean_squared_error, (2, 3), np.zeros(3), "target of shape"),
        (nn.mean_squared_error, (0, 3), np.zeros((0, 3)), "target of shape"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(loss, output, target, match):
    with pytest.raises(ArgumentError, match=match):
        loss(np.zeros(output), target)


# -- The head's product within the loss, in tiles: the same as both apart, and never more logits than a tile ----------


DIM, VOCAB, ROWS = 6, 37, 11


def stage_of(dtype="float64", device="cpu", seed=3):
    return nn.Stage([nn.Embedding(VOCAB, DIM), nn.RMSNorm(DIM), nn.Head(DIM, VOCAB)], dtype, seed, device)


def batch(rows=ROWS, seed=1):
    random = np.random.default_rng(seed)
    return random.integers(0, VOCAB, (rows, 1)), random.integers(0, VOCAB, (rows, 1))


def step(comm, loss_of, schedule, dtype="float32", **options):
    """({name: gradient}, loss, losses, validation loss) with a loss for the last stage."""
    stages = build(schedule, comm.rank, dtype=dtype, tied=options.pop("tied", False))
    mine = dense.placed(schedule, comm.rank, *text(7))
    holds_last = comm.rank == schedule.placement[-1]
    loss = loss_of(stages[-1]) if holds_last else None
    with Pipeline(stages, schedule, comm, loss=loss, **options) as pipeline:
        result = pipeline.step(*mine)
        validation = pipeline.evaluate(*mine)
        logits = pipeline.forward(mine[0])
    if holds_last:
        assert logits.shape == (7, MODEL["seq_len"], MODEL["vocab"])
    found = {name: stage.gradients[name] for stage in stages for name in stage.gradients}
    return found, result.loss, result.losses, validation


def apart(_):
    return nn.softmax_cross_entropy


@pytest.mark.parametrize(
    "schedule, dtype, tied, recompute",
    [
        ("one_f_one_b", "float32", False, False),
        ("zero_bubble_h1", "float64", True, True),
        ("looped_bfs", "bfloat16", True, False),
    ],
)
def test_one_tile_has_the_bits_of_head_and_loss_apart(comm, schedule, dtype, tied, recompute):
    ranks = min(comm.size, 2)
    group = parts_of(comm, ranks)
    plan = dense.build(schedule, ranks, 2 if schedule == "looped_bfs" else 1, 3)
    options = dict(dtype=dtype, tied=tied, recompute=recompute)
    expected = step(group, apart, plan, **options)
    found = step(group, nn.HeadCrossEntropy, plan, **options)
    assert found[1:] == expected[1:]
    for name, gradient in found[0].items():
        assert gradient.tobytes() == expected[0][name].tobytes(), name
    group.Free()


ON_HOST = [("cpu", dtype, tile) for dtype in ("float64", "float16") for tile in (1, 4, 5)]
ON_GPU = [("cuda", dtype, tile) for dtype in ("float32", "bfloat16") for tile in (None, 4)]


@pytest.mark.parametrize("device, dtype, tile", ON_HOST + ON_GPU)
def test_tiles_equal_the_whole_on_the_host_to_rounding(gpu, device, dtype, tile):
    whole, stage, (ids, target) = stage_of(dtype), stage_of(dtype, device), batch()
    logits, saved = whole.forward(ids)
    value, dlogits = nn.softmax_cross_entropy(logits, target, 16.0)
    whole.backward(dlogits, saved)
    loss = nn.HeadCrossEntropy(stage, tile)
    with loss.taking_over():
        features, saved = stage.forward(ids)
    assert features.shape == (ROWS, 1, DIM)
    found, dfeatures = loss(features, target, 16.0)
    stage.backward(dfeatures, saved)
    wide = arrays.accumulator(arrays.dtype(dtype))
    # of dlogits, dx, and of what the norm makes of it; on a GPU also of what each computes by itself
    halves = (4 if device == "cpu" else 8) * eps(dtype) if arrays.is_half(arrays.dtype(dtype)) else 0
    found = arrays.download(found) if device == "cuda" else found
    within(found, value, bound(wide, VOCAB + ROWS, 1 + largest(logits)) + (4 * halves if device == "cuda" else 0))
    for name, gradient in whole.gradients.items():
        size = largest(gradient)
        allowed = bound(wide, VOCAB * ROWS, size) + halves * size
        within(arrays.download(stage.gradients[name]), gradient, allowed, name)


def test_logits_never_exist_as_a_whole():
    vocab, rows, tile = 20_000, 512, 16
    stage = nn.Stage([nn.Head(4, vocab)])
    loss, x = nn.HeadCrossEntropy(stage, tile), np.ones((rows, 4), np.float32)
    target = np.arange(rows)
    tracemalloc.start()
    loss(x, target)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    one_tile, a_piece, dx = tile * vocab * 4, (1 << 17) * 4, x.nbytes  # one piece of the gradient of the head
    assert peak < 1.1 * one_tile + a_piece + 2 * dx + 65536, f"{peak:,} bytes, a tile has {one_tile:,}"


def test_a_tile_fits_its_bytes():
    assert tile_rows(128_000, 4, "cpu") * 128_000 * 4 <= TILE_BYTES["cpu"]
    assert tile_rows(10**12, 4, "cpu") == 1


def test_heads_and_targets_that_do_not_fit_are_refused():
    with pytest.raises(ArgumentError, match=r"nn\.Head as the last layer"):
        nn.HeadCrossEntropy(nn.Stage([nn.Linear(3, 4)]))
    stage = stage_of()
    with pytest.raises(ArgumentError, match="tile"):
        nn.HeadCrossEntropy(stage, tile=0)
    loss = nn.HeadCrossEntropy(stage)
    for width, target, match in (
        (DIM, np.zeros(3, int), "one target"),
        (DIM, np.array([0, VOCAB]), "out of range"),
        (DIM + 1, np.zeros(2, int), "last axis"),
    ):
        with pytest.raises(ArgumentError, match=match):
            loss(np.zeros((2, width)), target)


@pytest.mark.parametrize("kind", ["int16", "bool", "float64"])
def test_targets_of_any_real_dtype_may_be_on_the_gpu(gpu, kind):
    """As a loss of one's own has them, which calls these."""
    output = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    target = np.random.default_rng(1).integers(0, 2, size=(3, 4)).astype(kind)
    expected = nn.mean_squared_error(output, target.astype(np.float32))
    value, gradient = nn.mean_squared_error(arrays.upload(output), arrays.upload(target))
    close(float(arrays.download(value)), expected[0], 12, dtype=np.float32)
    close(arrays.download(gradient), expected[1], 3, dtype=np.float32)
    if target.dtype.kind in "iu":
        labels = arrays.upload(target[:, 0])
        found = nn.softmax_cross_entropy(arrays.upload(output), labels)[0]
        close(float(arrays.download(found)), nn.softmax_cross_entropy(output, target[:, 0])[0], 12, dtype=np.float32)


def test_complex_targets_of_a_real_output_are_refused(gpu):
    output, target = np.ones((2, 2), np.float32), np.ones((2, 2), np.complex64)
    for place in (np.array, arrays.upload):
        with pytest.raises(ArgumentError, match="complex targets of real numbers"):
            nn.mean_squared_error(place(output), target)


@pytest.mark.parametrize("loss", [nn.mean_squared_error, nn.softmax_cross_entropy])
def test_no_loss_looks_past_a_mask(loss):
    output, target = np.ones((4, 3), np.float32), np.zeros((4, 3), np.float32)
    if loss is nn.softmax_cross_entropy:
        target = np.zeros(4, int)
    for given in ((np.ma.array(output), target), (output, np.ma.array(target))):
        with pytest.raises(ArgumentError, match="a masked array, whose mask would be lost"):
            loss(*given)
