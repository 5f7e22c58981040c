"""What a notebook and a debugger show of the objects that users hold, and what cannot be copied says so."""

import copy
import pickle
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from mpipipe import attention, nn, optim, schedules
from mpipipe.attention import Layout
from mpipipe.errors import ArgumentError


def stage():
    return nn.Stage([nn.Linear(3, 2), nn.Residual(nn.Sequential([nn.LayerNorm(2), nn.Gelu()]))])


def test_objects_say_what_they_are():
    first, second = stage().layers
    assert repr(first) == "Linear(weight (2, 3), bias (2,))"
    assert repr(second) == "Residual(Sequential(LayerNorm(gain (2,), bias (2,)), Gelu()))"
    assert repr(nn.FlatBuffer({"a": (3,)}, "float32")) == "<FlatBuffer of 1 array in 16 numbers of float32>"
    assert repr(optim.AdamW([stage()], lr=0.1)) == "<AdamW of 1 stage, lr=0.1, 0 steps>"
    assert repr(Layout("zigzag", 2, 8)) == "Layout('zigzag', ranks=2, seq_len=8)"


@pytest.mark.parametrize("chunks", [1, 2])
def test_schedule_and_timeline_are_their_picture(chunks):
    schedule = schedules.by_name("interleaved_1f1b", ranks=3, chunks=chunks, microbatches=4)
    drawn = ElementTree.fromstring(schedule._repr_svg_())
    boxes = [part for part in drawn if part.tag.endswith("rect")]
    assert len(boxes) == 2 * 3 * chunks * 4
    assert max(float(box.get("x")) + float(box.get("width")) for box in boxes) == pytest.approx(720, abs=0.02)
    costs = schedules.Costs(forward=1, input_grad=5)
    assert schedules.simulate(schedule, costs)._repr_svg_() != schedule._repr_svg_()


def test_a_schedule_with_too_many_actions_has_no_picture():
    assert schedules.gpipe(8, 400)._repr_svg_() is None


def test_a_stage_can_be_called_as_a_module_is():
    made, x = stage(), np.ones((4, 3), np.float32)
    assert np.array_equal(made(x), made.forward(x)[0])


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_stage_and_its_optimizer_are_not_copied_and_say_what_to_do(copied):
    with pytest.raises(ArgumentError, match=r"parameters\.flat\[\.\.\.\] = "):
        copied(stage())
    with pytest.raises(ArgumentError, match="cannot be copied"):
        copy.deepcopy(optim.SGD([stage()], lr=0.1))


LAYERS = {
    "Linear": (lambda: nn.Linear(4, 4), (2, 8, 4)),
    "Conv": (lambda: nn.Conv(4, 4, (3,)), (2, 8, 4)),
    "SpectralConv": (lambda: nn.SpectralConv(4, 4, (2,)), (2, 8, 4)),
    "PreNormResidual": (lambda: nn.PreNormResidual(nn.RMSNorm(4), nn.Linear(4, 4)), (2, 8, 4)),
    "LearnedPositions": (lambda: nn.LearnedPositions(8, 4), (2, 8, 4)),
    "SelfAttention": (lambda: nn.SelfAttention(4, 2, attend=attention.Local()), (2, 8, 4)),
    "SwiGLU": (lambda: nn.SwiGLU(4, 8), (2, 8, 4)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_that_no_stage_has_can_be_copied(name):
    """The copies are layers of their own: one is bound and called, and then the other."""
    make, shape = LAYERS[name]
    layer = make()
    copies = [pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)]
    x = np.random.default_rng(0).standard_normal(shape, np.float32)
    expected, _ = nn.Stage([make()], seed=4).forward(x)
    for again in copies:
        found, _ = nn.Stage([again], seed=4).forward(x)
        assert np.array_equal(found, expected)
