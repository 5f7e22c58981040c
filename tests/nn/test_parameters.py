"""Flat buffers, and parameters in them that are frozen."""

from functools import partial

import numpy as np
import pytest
from support.gradcheck import check_split
from support.gradients import gradient_norm

from mpipipe import arrays, nn, optim
from mpipipe.attention import Local
from mpipipe.errors import ArgumentError
from mpipipe.language.models import GPT
from mpipipe.nn.parameters import FlatBuffer, is_frozen

SHAPES = {"a": (3, 5), "b": (16,), "c": (0, 4), "d": (7,)}


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_each_array_starts_on_a_cache_line(dtype):
    buffer = FlatBuffer(SHAPES, arrays.dtype(dtype))
    assert {name: array.shape for name, array in buffer.items()} == SHAPES and len(buffer) == 4
    for name, array in buffer.items():
        if not array.size:
            continue
        assert array.ctypes.data % 64 == 0
        assert array.ctypes.data == buffer.flat.ctypes.data + buffer.offsets[name] * array.itemsize
    buffer["b"][...] = 1
    assert buffer.flat.astype(np.float64).sum() == 16


# -- Frozen parameters: no gradient, no part in what is trained, and the same gradients for all others ----------------


SIZES = dict(vocab=19, dim=8, layers=2, heads=2, kv_heads=1, hidden=12, seq_len=6)
IDS = np.random.default_rng(0).integers(0, 19, (3, 6))


def stage_of(*frozen, dtype="float64", device="cpu", **sizes):
    return nn.Stage(GPT(**{**SIZES, **sizes}).build(Local()), dtype, seed=2, device=device, frozen=frozen)


def gradients(stage, ids=IDS):
    y, saved = stage.forward(ids)
    stage.backward(np.cos(np.arange(y.size)).reshape(y.shape).astype(y.dtype), saved)
    return {name: gradient.copy() for name, gradient in stage.gradients.items()}


def test_the_last_pattern_that_fits_counts():
    assert is_frozen("3.layer.1.qkv", ["*"]) and not is_frozen("3.layer.1.qkv", ["*", "!3.*"])
    assert is_frozen("3.layer.1.qkv", ["!*", "*.qkv"]) and not is_frozen("3.layer.1.qkv", ["3", "*.QKV"])
    assert not is_frozen("0.weight", [])


@pytest.mark.parametrize(
    "patterns",
    [["0.*"], ["*.gain"], ["1.*", "3.*"], ["*", "!5.1.weight"], ["*", "!3.layer.1.out"], ["*.qkv", "*.down"], ["5.*"]],
)
def test_what_is_trained_has_the_gradients_it_has_without_frozen_ones(patterns):
    expected = gradients(stage_of())
    stage = stage_of(*patterns)
    names = [name for name in expected if is_frozen(name, patterns)]
    assert names and stage.frozen == set(names)
    assert list(stage.parameters) == list(expected), "all names, in their order"
    found = gradients(stage)
    assert set(found) == set(expected) - set(names)
    for name, gradient in found.items():
        assert gradient.tobytes() == expected[name].tobytes(), name
    assert stage.parameters.flat.size == stage.gradients.flat.size
    assert not any(np.shares_memory(stage.parameters[name], stage.parameters.flat) for name in names)


@pytest.mark.parametrize("patterns", [["1.*", "3.*"], ["*.qkv", "*.gain"]])
def test_the_split_backward_has_the_same_bits(patterns):
    stage = nn.Stage(GPT(**SIZES).build(Local())[1:5], "float64", first=1, frozen=patterns)
    x = np.random.default_rng(3).standard_normal((3, 6, 8))
    y, saved = stage.forward(x)
    dy = np.cos(y)
    stage.gradients.flat.fill(0)
    dx = stage.backward(dy, saved)
    check_split(stage, dy, saved, dx, stage.gradients.flat.copy())


def test_backwards_end_where_nothing_below_is_trained():
    stage = stage_of("*", "!4.*")
    y, saved = stage.forward(IDS)
    assert saved[:4] == [None] * 4 and saved[4] is not None, "what has no backward saves nothing"
    assert stage.backward(y, saved) is None
    inner = nn.Stage(GPT(**SIZES).build(Local())[1:3], "float64", first=1, frozen=["1.*"])
    y, saved = inner.forward(np.ones((1, 6, 8)))
    assert inner.backward(y, saved).shape == (1, 6, 8), "somebody may ask for the gradient of the input"
    inner.end_backward(True)
    y, saved = inner.forward(np.ones((1, 6, 8)))
    assert inner.backward(y, saved) is None and inner.gradients["2.layer.1.down"].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("make", [optim.AdamW, partial(optim.SGD, momentum=0.9)])
def test_a_training_leaves_frozen_parameters_as_they_are(make, dtype):
    stage = stage_of("0.*", "*.gain", "2.*", dtype=dtype)
    before = {name: array.copy() for name, array in stage.parameters.items()}
    optimizer = make([stage], 1e-2)
    assert set(optimizer.named_state()[next(iter(optimizer.named_state()))]) == set(stage.gradients)
    for _ in range(20):
        stage.gradients.flat.fill(0)
        gradients(stage)
        optim.clip_by_global_norm([stage], 1.0)
        optimizer.step()
        stage.refresh()
    for name, array in stage.parameters.items():
        assert (array.tobytes() == before[name].tobytes()) == (name in stage.frozen), name
        expected = array.astype(arrays.dtype(dtype))
        assert stage.compute[name].tobytes() == expected.tobytes(), "layers compute with the parameters"


def test_a_stage_without_anything_to_train():
    stage = stage_of("*")
    assert stage.parameters.flat.size == stage.gradients.flat.size == len(stage.gradients) == 0
    assert gradients(stage) == {}
    optim.AdamW([stage], 0.1).step()
    assert gradient_norm([stage]) == 0.0


def test_a_tied_parameter_is_frozen_in_all_places_or_in_none():
    assert stage_of("0.weight", "5.1.weight", tied=True).frozen == {"0.weight", "5.1.weight"}
    with pytest.raises(ArgumentError, match="tied parameter 'tokens' is frozen in some of its places"):
        stage_of("0.weight", tied=True)


class Both(nn.Layer):
    """A layer that does not look whether a gradient is None."""

    def __init__(self):
        one = nn.Parameter((3,), lambda _, shape: np.ones(shape))
        self.declared = {"first": one, "second": one}

    def forward(self, x):
        return x * self.first + self.second, x

    def backward_input(self, dy, saved):
        return dy * self.first, (dy, saved)

    def backward_weight(self, pending):
        dy, x = pending
        self.first_grad += (dy * x).sum(0)
        self.second_grad += dy.sum(0)


def test_a_layer_that_knows_nothing_of_it_is_frozen_as_a_whole():
    stage = nn.Stage([Both(), Both()], "float64", frozen=["1.*"])
    y, saved = stage.forward(np.ones((2, 3)))
    assert stage.backward(y, saved).shape == (2, 3)
    assert stage.gradients["0.first"].any() and "1.first" not in stage.gradients
