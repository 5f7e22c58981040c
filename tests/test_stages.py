"""Flat arrays with names, where both are a user's own."""

from types import SimpleNamespace

import numpy as np
import pytest

from mpipipe import nn
from mpipipe.errors import ArgumentError
from mpipipe.stages import FlatView, as_stages


class Named(dict):
    flat = None


def test_names_lie_where_their_arrays_do():
    flat = np.arange(12.0)
    holder = Named(b=flat[8:12].reshape(2, 2), a=flat[1:4], none=flat[:0])
    holder.flat = flat
    view = FlatView.of(holder)
    assert view.offsets == {"b": 8, "a": 1, "none": 0}
    assert all(np.shares_memory(view[name], flat) for name in ("a", "b"))
    np.testing.assert_array_equal(view["b"], [[8, 9], [10, 11]])
    assert view.decay_ranges == [(0, 8, False), (8, 12, True)]  # matrices alone, and all of the array


def test_a_flat_array_without_names_has_one_and_decays():
    view = FlatView.of(SimpleNamespace(flat=np.zeros(5)))
    assert dict(view.offsets) == {"flat": 0} and view.decay_ranges == [(0, 5, True)]


def test_a_buffer_of_nn_has_the_offsets_that_it_had():
    buffer = nn.FlatBuffer({"w": (3, 2), "b": (3,)}, "float32")
    assert FlatView.of(buffer).offsets == buffer.offsets
    assert FlatView.of(buffer).decay_ranges == [(0, 16, True), (16, 32, False)]  # a line of 64 bytes each


@pytest.mark.parametrize(
    "array, what",
    [(np.zeros(3), "elsewhere"), (np.zeros(3, np.float32), "elsewhere"), ([0.0], "list")],
    ids=["another array", "another dtype", "no array"],
)
def test_a_named_array_that_lies_elsewhere_is_refused(array, what):
    holder = Named(w=array)
    holder.flat = np.zeros(8)
    with pytest.raises(ArgumentError, match="w does not lie in") as caught:
        FlatView.of(holder)
    assert what in str(caught.value)


@pytest.mark.parametrize("flat", [None, np.zeros((2, 2)), np.zeros(8)[::2], [0.0]])
def test_what_is_no_flat_array_is_refused(flat):
    with pytest.raises(ArgumentError, match="without a one-dimensional contiguous array"):
        FlatView.of(SimpleNamespace(flat=flat))


def test_gradients_are_as_large_as_their_parameters():
    view = FlatView.of(SimpleNamespace(flat=np.zeros(5)))
    with pytest.raises(ArgumentError, match="differ"):
        view.like(SimpleNamespace(flat=np.zeros(4)))
    with pytest.raises(ArgumentError, match="differ"):
        view.like(SimpleNamespace(flat=np.zeros(5, np.float32)))


@pytest.mark.parametrize("ranges", [[(0, 4, True)], [(0, 4, True), (5, 8, False)], [(0, 5, True), (4, 8, False)]])
def test_ranges_of_decay_hold_each_parameter_once(ranges):
    holder = SimpleNamespace(flat=np.zeros(8))
    stage = SimpleNamespace(parameters=holder, gradients=holder, decay_ranges=ranges)
    (adapted,) = as_stages([stage])
    with pytest.raises(ArgumentError, match="leave out parameters, or have some twice"):
        _ = adapted.decay_ranges
    stage.decay_ranges = [(0, 4, True), (4, 8, False)]
    assert adapted.decay_ranges == stage.decay_ranges
