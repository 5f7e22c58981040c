"""ZB-H1, and the same with several chunks, against its published makespans and closed forms."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tolerance import close

from mpipipe import schedules
from mpipipe.schedules import Costs, simulate


@pytest.mark.parametrize("ranks, microbatches, makespan", [(2, 4, 13), (4, 8, 27), (4, 4, 15)])
def test_makespan_is_the_published_one(ranks, microbatches, makespan):
    timeline = simulate(schedules.zero_bubble_h1(ranks, microbatches))
    assert timeline.makespan == makespan
    assert timeline.peak_activations == [ranks] * ranks
    close(timeline.bubble_fraction, (ranks - 1) / makespan, 4)


def test_weight_gradients_trail_their_input_gradients_by_the_rank():
    order = " ".join(f"{op}{mb}" for _, op, mb in schedules.zero_bubble_h1(3, 5).orders[1])
    assert order == "F0 F1 I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4"


@given(
    ranks=st.integers(1, 8),
    microbatches=st.integers(1, 25),
    weight_grad=st.integers(0, 4),
    more=st.tuples(st.integers(0, 3), st.integers(0, 3)),
)
def test_bubble_and_peaks_have_their_closed_form(ranks, microbatches, weight_grad, more):
    forward, input_grad = weight_grad + more[0], weight_grad + more[1]  # W is not above F or I
    timeline = simulate(schedules.zero_bubble_h1(ranks, microbatches), Costs(forward, input_grad, weight_grad))
    filled = min(microbatches, ranks) - 1
    bubble = (ranks - 1) * (forward + input_grad) - filled * weight_grad
    assert timeline.makespan == microbatches * (forward + input_grad + weight_grad) + bubble
    assert timeline.peak_activations == [min(microbatches, ranks)] * ranks


@given(ranks=st.integers(1, 8), microbatches=st.integers(1, 25))
def test_never_slower_than_1f1b(ranks, microbatches):
    costs = Costs(2, 2, 2)
    split = simulate(schedules.zero_bubble_h1(ranks, microbatches), costs)
    assert split.makespan <= simulate(schedules.one_f_one_b(ranks, microbatches), costs).makespan


@given(
    ranks=st.integers(1, 8),
    chunks=st.integers(1, 4),
    microbatches=st.integers(1, 25),
    weight_grad=st.integers(0, 4),
    more=st.tuples(st.integers(0, 3), st.integers(0, 3)),
)
def test_interleaved_bubble_and_peaks_have_their_closed_form(ranks, chunks, microbatches, weight_grad, more):
    forward, input_grad = weight_grad + more[0], weight_grad + more[1]  # W is not above F or I
    schedule = schedules.interleaved_zero_bubble(ranks, chunks, microbatches)
    timeline = simulate(schedule, Costs(forward, input_grad, weight_grad))
    groups = max(1, microbatches // ranks)
    largest = -(-microbatches // groups)
    assert max(timeline.peak_activations) <= min(microbatches * chunks, (chunks - 1) * largest + ranks)
    if microbatches >= ranks:
        busy = microbatches * chunks * (forward + input_grad + weight_grad)
        assert timeline.makespan == busy + (ranks - 1) * (forward + input_grad - weight_grad)


def test_with_one_chunk_it_is_zb_h1():
    assert schedules.interleaved_zero_bubble(4, 1, 7).orders == schedules.zero_bubble_h1(4, 7).orders
