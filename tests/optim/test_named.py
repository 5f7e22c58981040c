"""The state of an optimizer by the names of parameters: views of its buffers, also where tied parameters share one."""

from __future__ import annotations

import numpy as np
import pytest

from mpipipe import Pipeline, nn, optim, schedules
from mpipipe.errors import ArgumentError
from mpipipe.job import inprocess


def tied():
    """Two stages on one rank that share one of their matrices."""
    embedding, head = nn.Embedding(5, 4, tie="t"), nn.Linear(4, 5, bias=False, tie="t")
    return [nn.Stage([embedding]), nn.Stage([nn.RMSNorm(4), head], first=1)]


def share(stages):
    def make(comm):
        with Pipeline(stages, schedules.interleaved_1f1b(1, 2, 2), comm, loss=nn.softmax_cross_entropy):
            pass

    inprocess.run(1, make)


@pytest.mark.parametrize("make", [optim.AdamW, lambda stages, lr: optim.SGD(stages, lr, momentum=0.9)])
@pytest.mark.parametrize("before", [False, True])  # whether the optimizer is made before parameters are shared
def test_state_has_the_names_and_shapes_of_parameters_and_setting_it_is_felt(make, before):
    stages = tied()
    optimizer = make(stages, 0.1) if before else None
    share(stages)
    optimizer = optimizer or make(stages, 0.1)
    shapes = {name: array.shape for stage in stages for name, array in stage.parameters.items()}
    state = optimizer.named_state()
    assert set(state) == set(optimizer.state[0])
    for kind, arrays in state.items():
        assert {name: array.shape for name, array in arrays.items()} == shapes
        assert np.shares_memory(arrays["0.weight"], arrays["2.weight"])  # the tied ones
        arrays["1.gain"][...] = 3
        offset = stages[1].parameters.offsets["1.gain"]
        np.testing.assert_array_equal(optimizer.state[1][kind][offset : offset + 4], 3)
        arrays["2.weight"][...] = 2
        np.testing.assert_array_equal(arrays["0.weight"], 2)
    gain = stages[1].parameters["1.gain"].copy()
    optimizer.step()
    assert (stages[1].parameters["1.gain"] != gain).all()  # gradients are zero: what moves it is the state


def test_sgd_without_momentum_has_none():
    assert optim.SGD(tied(), 0.1).named_state() == {}


def test_names_that_are_not_those_of_one_parameter_are_refused():
    stages = [nn.Stage([nn.RMSNorm(3)]), nn.Stage([nn.RMSNorm(3)])]
    with pytest.raises(ArgumentError, match=r"two stages of this rank have a parameter 0\.gain") as caught:
        optim.AdamW(stages, 0.1).named_state()
    assert "first" in caught.value.remedy


def test_a_parameter_that_lies_in_a_stage_of_nobody_is_refused():
    stages = tied()
    share(stages)
    with pytest.raises(ArgumentError, match=r"tied parameter 2\.weight belongs to a stage"):
        optim.AdamW(stages[1:], 0.1).named_state()
