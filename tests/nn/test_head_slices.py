"""Slices of a head against the head as a whole, written out in float64; on the host and on a GPU."""

import numpy as np
import pytest
from support.tolerance import close, largest

from mpipipe import Branches, arrays, nn
from mpipipe.errors import ArgumentError
from mpipipe.nn.layers import head_slices
from mpipipe.nn.parameters import SKIPPED, matrix, row_slices
from mpipipe.planning import name_ends

DIM, VOCAB, SHAPE = 6, 23, (3, 5)
RANDOM = np.random.default_rng(5)
H = RANDOM.standard_normal((*SHAPE, DIM)) * 3
LABELS = RANDOM.integers(0, VOCAB, SHAPE)
COUNTS = (1, 2, 3, 5)
UNITS = {"float64": 2**-52, "float32": 2**-23, "float16": 2**-10, "bfloat16": 2**-7}


def sliced(of, labels=True, dtype="float64", device="cpu", frozen=(), vocab=VOCAB):
    layers = [nn.HeadSlice(DIM, vocab, number, of, labels=labels, stream="head") for number in range(of)]
    return nn.Stage(layers, dtype, seed=2, device=device, frozen=frozen)


def whole(stage):
    """The weights of all slices, one above the other, in float64."""
    return np.concatenate([arrays.download(array).astype(np.float64) for array in stage.parameters.values()])


def written_out(h, labels, weight, slope):
    """(losses, gradient of h, of the weight) for gradients `slope` of the losses, from the definition."""
    logits = h @ weight.T
    top = logits.max(-1, keepdims=True)
    powers = np.exp(logits - top)
    sums = powers.sum(-1, keepdims=True)
    losses = (np.log(sums) + top)[..., 0] - np.take_along_axis(logits, labels[..., None], -1)[..., 0]
    dlogits = (powers / sums - np.eye(weight.shape[0])[labels]) * slope[..., None]
    return losses, dlogits @ weight, np.einsum("bsv,bsd->vd", dlogits, h)


def run(stage, h, labels, slope, split):
    """(losses, gradient of h, of the weight), on the host."""
    place = arrays.upload if stage.device == "cuda" else np.asarray
    losses, saved = stage.forward(Branches(place(h), labels=labels))
    if split:
        dx, pending = stage.backward_input(place(slope), saved)
        stage.backward_weight(pending)
    else:
        dx = stage.backward(place(slope), saved)
    weight = np.concatenate([arrays.download(array) for array in stage.gradients.values()])
    return arrays.download(losses), arrays.download(dx.main), weight


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize(
    "device, of", [*(("cpu", of) for of in COUNTS), pytest.param("cuda", 3, marks=pytest.mark.gpu)]
)
def test_losses_and_gradients_are_those_of_the_whole_head(request, monkeypatch, device, dtype, of, kept):
    """Also where logits are computed again, a few rows at a time; and a split backward has the same bits.

    Logits are rounded once, as those of the whole head are. On a GPU there are more columns than a block has threads.
    """
    vocab = VOCAB
    if device == "cuda":
        request.getfixturevalue("gpu")
        vocab = 700
    monkeypatch.setitem(head_slices.KEPT_BYTES, device, (1 << 20) * kept)
    monkeypatch.setitem(head_slices.TILE_BYTES, device, 4 * VOCAB * 8)
    kind = arrays.dtype(dtype)
    h, labels = H.astype(kind), RANDOM.integers(0, vocab, SHAPE)
    slope = RANDOM.standard_normal(SHAPE).astype(arrays.accumulator(kind))
    stage, again = (sliced(of, dtype=dtype, device=device, vocab=vocab) for _ in range(2))
    found = run(stage, h, labels, slope, split=False)
    weight = whole(stage).astype(kind).astype(np.float64)
    expected = written_out(h.astype(np.float64), labels, weight, slope)
    size = largest(h.astype(np.float64) @ weight.T)
    assert [x.dtype for x in found] == [slope.dtype, kind, slope.dtype]
    for one, other in zip(found, expected):
        allowed = 8 * UNITS[dtype] * size * (1 + largest(other))
        np.testing.assert_allclose(one.astype(np.float64), other, rtol=0, atol=allowed)
    for one, other in zip(run(again, h, labels, slope, split=True), found):
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("of", COUNTS)
def test_without_labels_the_last_slice_gives_the_logits(of):
    stage = sliced(of, labels=False)
    logits, saved = stage.forward(H)
    np.testing.assert_allclose(logits, H @ whole(stage).T, rtol=1e-12, atol=1e-13)
    dy = RANDOM.standard_normal(logits.shape)
    dx, pending = stage.backward_input(dy, saved)
    stage.backward_weight(pending)
    np.testing.assert_allclose(dx, dy @ whole(stage), rtol=1e-12, atol=1e-13)
    expected = np.einsum("bsv,bsd->vd", dy, H)
    np.testing.assert_allclose(np.concatenate([*stage.gradients.values()]), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("tie", [None, "tokens"])
def test_slices_start_with_the_values_of_the_whole_head(monkeypatch, tie):
    head = nn.Stage([nn.Linear(DIM, DIM), nn.Head(DIM, VOCAB, tie=tie)], "float64", seed=4).parameters["1.weight"]
    monkeypatch.setattr("mpipipe.nn.parameters.SKIPPED", 3 * DIM)
    layers = [nn.HeadSlice(DIM, VOCAB, number, 4, tie, stream="1.weight") for number in range(4)]
    assert whole(nn.Stage(layers, "float64", seed=4)).tobytes() == head.tobytes()
    if tie:
        table = nn.Stage([nn.Embedding(VOCAB, DIM, tie=tie, slices=4)], "float64", seed=4)
        assert whole(table).tobytes() == head.tobytes()
        assert [*table.ties] == [*nn.Stage([nn.HeadSlice(DIM, VOCAB, k, 4, tie) for k in range(4)]).ties]
    assert {entry.stream for entry in row_slices(matrix(5, 1), 2, "a")} == {"a"} and SKIPPED > 1000


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_an_embedding_in_slices_is_the_whole_one(dtype):
    stages = [nn.Stage([nn.Embedding(VOCAB, DIM, tie="t", scale=2.0, slices=of)], dtype, seed=1) for of in (1, 5)]
    dy = RANDOM.standard_normal((*SHAPE, DIM)).astype(arrays.dtype(dtype))
    for ids in (LABELS, np.full(SHAPE, VOCAB - 1, np.int32)):
        (y, saved), (other, of_slices) = (stage.forward(ids) for stage in stages)
        assert y.tobytes() == other.tobytes() and y.dtype == other.dtype
        stages[0].backward(dy, saved)
        stages[1].backward(dy, of_slices)
    first, second = (np.concatenate([*stage.gradients.values()]) for stage in stages)
    assert first.tobytes() == second.tobytes()


def test_large_logits_do_not_overflow():
    stage = sliced(3)
    for array in stage.parameters.values():
        array *= 1e4
    losses, _ = stage.forward(Branches(H, labels=LABELS))
    expected = written_out(H, LABELS, whole(stage), np.ones(SHAPE))[0]
    close(losses, expected, VOCAB + DIM, largest(H @ whole(stage).T))


def test_a_frozen_slice_hands_gradients_on():
    stage, slope = sliced(3, frozen=("1.weight",)), np.ones(SHAPE)
    _, dx, _ = run(stage, H, LABELS, slope, split=False)
    np.testing.assert_allclose(dx, written_out(H, LABELS, whole(sliced(3)), slope)[1], rtol=1e-12, atol=1e-13)
    assert [*stage.gradients] == ["0.weight", "2.weight"]


def test_an_evaluation_keeps_no_logits():
    stage = sliced(2)
    for training, count in ((True, 1), (False, 0)):
        _, (saved, _) = stage.forward(Branches(H, labels=LABELS), nn.Position(training=training))
        assert [len(kept) for *_, kept in saved] == [count, count]


def test_what_does_not_fit_is_an_error():
    for bad in ((3, 0, 4), (3, 2, 2), (3, -1, 2), (0, 0, 1)):
        with pytest.raises(ArgumentError, match=r"slice|positive"):
            nn.HeadSlice(DIM, *bad)
    with pytest.raises(ArgumentError, match="more slices than rows"):
        nn.Embedding(3, DIM, slices=4)
    with pytest.raises(ArgumentError, match="out of range"):
        sliced(2).forward(Branches(H, labels=LABELS + VOCAB))
    with pytest.raises(ArgumentError, match="labels do not fit"):
        sliced(2).forward(Branches(H, labels=LABELS[:, :2]))
    for layers in ([nn.HeadSlice(DIM, VOCAB, 1, 2)], [nn.HeadSlice(DIM, VOCAB, 0, 2), nn.HeadSlice(DIM, VOCAB, 0, 2)]):
        with pytest.raises(ArgumentError, match="does not take what comes to it"):
            nn.Stage(layers, "float64").forward(H)
    with pytest.raises(ArgumentError, match="one loss for each target"):
        nn.mean_of_losses(np.zeros((2, 3)), np.zeros(6))
    for targets in (np.array([3, -100]), np.array([1.0, 0.0])):  # ignored ones, and weights
        with pytest.raises(ArgumentError, match=r"some targets are no labels(.|\n)*leave positions out"):
            nn.mean_of_losses(np.zeros(2), targets)


@pytest.mark.parametrize("places", [(0, 1, None), (1, 0), (0,), (None, 1), (0, None, 1)])
def test_slices_that_are_not_the_end_of_a_model_are_refused(places):
    """Before anything is built: the layers of all stages are looked at."""
    layers = [nn.Gelu() if k is None else nn.HeadSlice(DIM, VOCAB, k, 2) for k in places]
    with pytest.raises(ArgumentError, match="not the last layers of the model"):
        name_ends(layers)
    name_ends([nn.Gelu(), nn.HeadSlice(DIM, VOCAB, 0, 2), nn.Sequential([nn.HeadSlice(DIM, VOCAB, 1, 2)])])


def test_a_gpu_shows_labels_outside(gpu):
    stage, labels = sliced(2, device="cuda"), LABELS.copy()
    labels[1, 2] = VOCAB
    losses, _ = stage.forward(Branches(arrays.upload(H), labels=arrays.upload(labels)))
    assert np.flatnonzero(np.isnan(arrays.download(losses)).reshape(-1)).tolist() == [SHAPE[1] + 2]
