"""Every module of kernels holds the functions that the interface states."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from mpipipe import arrays, nn
from mpipipe.errors import ArgumentError
from mpipipe.nn import kernels
from mpipipe.nn.kernels.host import any_dtype, full_precision

STATED = {name: member for name, member in vars(kernels.Kernels).items() if inspect.isfunction(member)}
STATED = {name: member for name, member in STATED.items() if not name.startswith("_")}


@pytest.mark.parametrize("name", STATED)
@pytest.mark.parametrize("module", [any_dtype, full_precision, kernels.cuda], ids=lambda module: module.__name__)
def test_a_module_has_each_stated_function(module, name):
    found = inspect.signature(getattr(module, name)).parameters.values()
    stated = list(inspect.signature(STATED[name]).parameters.values())[1:]
    assert [(p.name, p.kind) for p in found] == [(p.name, p.kind) for p in stated]


def test_modules_hold_no_more_than_is_stated():
    assert set(kernels.cuda.__all__) == set(full_precision.__all__) == set(STATED)


def test_kernels_are_chosen_by_device_and_dtype():
    assert kernels.of("cpu") is kernels.of("cpu", arrays.dtype("bfloat16")) is any_dtype
    assert kernels.of("cpu", np.dtype(np.float64)) is full_precision
    assert kernels.of("cuda") is kernels.of("cuda", np.dtype(np.float32)) is kernels.cuda
    assert kernels.of_array(np.zeros(1, np.float16)) is any_dtype
    assert nn.kernels.of_array(np.zeros(1)) is full_precision
    with pytest.raises(ArgumentError, match="not an array"):
        kernels.of_array([1.0])
