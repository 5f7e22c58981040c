"""Gradients of a step start from zero, whatever they were before."""

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


@pytest.mark.parametrize("device, dtype", [("cpu", "float64"), ("cuda", "bfloat16")])
def test_gradients_are_those_that_are_added_to_zeros(gpu, device, dtype):
    head = Extra if device == "cpu" else nn.Linear
    expected = summed(nn.Stage(layers(head), dtype, device=device))
    expected["0.weight"] = expected["4.weight"] = expected["0.weight"] + expected["4.weight"]
    found = gradients(nn.Stage(layers(head), dtype, device=device), before=np.nan)
    assert not found["3.layer.weight"].any() and not found["3.layer.bias"].any()
    for name, array in found.items():
        np.testing.assert_array_equal(array, expected[name], name)


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
