"""The first gradient of a step replaces what is there; what no layer writes is zero at the end."""

from __future__ import annotations

import numpy as np
import pytest

from mpipipe import Pipeline, arrays, nn
from mpipipe.attention import Local
from mpipipe.job import inprocess
from mpipipe.schedules import gpipe

IDS, TARGETS = np.random.default_rng(0).integers(0, 11, size=(2, 4, 6))


class Extra(nn.Linear):
    """A Linear that adds to its gradient in a way of its own."""

    def backward_weight(self, pending):
        self.weight_grad += 1
        super().backward_weight(pending)


class Unused(nn.Layer):
    """Calls its layer in no backward."""

    def __init__(self, layer):
        self.children = {"layer": layer}

    def forward(self, x):
        return x, None

    def backward_input(self, dy, saved):
        return dy, None


def layers(head=nn.Linear):
    return [
        nn.Embedding(11, 8, tie="tokens"),
        nn.Residual(nn.Sequential([nn.RMSNorm(8), nn.SelfAttention(8, 2, attend=Local())])),
        nn.Residual(nn.Sequential([nn.LayerNorm(8), nn.SwiGLU(8, 20), nn.Linear(8, 8)])),
        Unused(nn.Linear(8, 8)),
        head(8, 11, bias=False, tie="tokens"),
    ]


def gradients(stage, before, steps=2, microbatches=2):
    """Gradients of a stage whose gradients were `before`, after some steps."""

    def run(comm):
        with Pipeline([stage], gpipe(1, microbatches), comm, loss=nn.softmax_cross_entropy) as pipeline:
            for array in stage.gradients.values():
                values = np.full(array.shape, before, array.dtype)
                arrays.copy_into(array, arrays.upload(values) if arrays.is_device(array) else values)
            for _ in range(steps):
                pipeline.step(IDS, TARGETS)
        return {name: arrays.download(array) for name, array in stage.gradients.items()}

    return inprocess.run(1, run)[0]


def summed(stage, microbatches=2):
    """The same by the layers alone, added to zeros; the tied matrix in two arrays."""
    for ids, targets in zip(np.split(IDS, microbatches), np.split(TARGETS, microbatches)):
        y, saved = stage.forward(ids)
        stage.backward(nn.softmax_cross_entropy(y, targets, factor=1 / microbatches)[1], saved)
    return {name: arrays.download(array) for name, array in stage.gradients.items()}


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_gradients_are_those_that_are_added_to_zeros(dtype):
    expected = summed(nn.Stage(layers(), dtype))
    expected["0.weight"] = expected["4.weight"] = expected["0.weight"] + expected["4.weight"]
    found = gradients(nn.Stage(layers(), dtype), before=np.nan)
    assert not found["3.layer.weight"].any() and not found["3.layer.bias"].any()
    for name, array in found.items():
        np.testing.assert_array_equal(array, expected[name], name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_on_a_device_are_those_that_are_added_to_zeros(gpu, dtype):
    expected = summed(nn.Stage(layers(), dtype, device="cuda"))
    expected["0.weight"] = expected["4.weight"] = expected["0.weight"] + expected["4.weight"]
    found = gradients(nn.Stage(layers(), dtype, device="cuda"), before=np.nan)
    for name, array in found.items():
        np.testing.assert_array_equal(array, expected[name], name)


def test_a_layer_that_adds_in_its_own_way_starts_from_zero():
    expected = summed(nn.Stage(layers(Extra)))
    found = gradients(nn.Stage(layers(Extra)), before=np.nan)
    np.testing.assert_array_equal(found["4.weight"], expected["0.weight"] + expected["4.weight"])


def test_a_stage_of_another_class_starts_from_zero():
    class Regularised(nn.Stage):
        def backward(self, dy, saved):
            self.gradients["2.layer.2.weight"][...] += 1
            return super().backward(dy, saved)

    expected = summed(Regularised(layers()))
    found = gradients(Regularised(layers()), before=np.nan)
    np.testing.assert_array_equal(found["2.layer.2.weight"], expected["2.layer.2.weight"])


def test_large_products_have_the_same_bits_in_place():
    """In pieces, as they are added."""
    rng = np.random.default_rng(0)
    dy, x = rng.normal(size=(5, 700)).astype(np.float32), rng.normal(size=(5, 300)).astype(np.float32)
    stage = nn.Stage([nn.Linear(300, 700)])
    added, set_ = np.zeros((700, 300), np.float32), np.full((700, 300), np.nan, np.float32)
    stage.kernels.linear_backward_weight(dy, x, added)
    stage.kernels.linear_backward_weight(dy, x, set_, False)
    np.testing.assert_array_equal(set_, added)


def test_no_memset_and_no_read_before_the_first_product(emulated_gpu):
    stage = nn.Stage([nn.LayerNorm(8), nn.Linear(8, 11)], device="cuda")
    x = np.ones((4, 8), np.float32)

    def run(comm):
        with Pipeline([stage], gpipe(1, 2), comm, loss=nn.softmax_cross_entropy) as pipeline:
            pipeline.step(x, IDS[0, :4])
            emulated_gpu.reset()
            pipeline.step(x, IDS[0, :4])
        return emulated_gpu.launches.count("memsetAsync")

    assert inprocess.run(1, run) == [0]


class Again(nn.Layer):
    """Applies another layer once more, and adds to its gradient before that layer does."""

    def __init__(self, other):
        self.other = other

    def forward(self, x):
        return x @ self.other.weight.T, x

    def backward_input(self, dy, saved):
        return dy @ self.other.weight, (dy, saved)

    def backward_weight(self, pending):
        dy, x = pending
        self.other.weight_grad += dy.T @ x


def test_what_a_layer_of_the_user_adds_to_the_gradient_of_another_is_kept():
    linear = nn.Linear(3, 3, bias=False)
    stage = nn.Stage([linear, Again(linear)], dtype="float64", seed=2)
    x, dy = np.random.default_rng(1).standard_normal((2, 5, 3))
    stage.begin_gradients()
    _, saved = stage.forward(x)
    stage.backward(dy, saved)
    stage.end_gradients()
    w = linear.weight
    expected = dy.T @ (x @ w.T) + (dy @ w).T @ x
    assert (
        np.abs(stage.gradients["0.weight"] - expected).max() <= 32 * np.finfo(np.float64).eps * np.abs(expected).max()
    )
