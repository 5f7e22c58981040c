"""ZB-H1, and the same with several chunks, against its published makespans and closed forms."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpipipe import schedules
from mpipipe.schedules import Costs, simulate


def test_weight_gradients_trail_their_input_gradients_by_the_rank():
    order = " ".join(f"{op}{mb}" for _, op, mb in schedules.zero_bubble_h1(3, 5).orders[1])
    assert order == "F0 F1 I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4"


@given(
    ranks=st.integers(1, 8),
    chunks=st.integers(1, 4),
    microbatches=st.integers(1, 25),
    weight_grad=st.integers(0, 4),
    more=st.tuples(st.integers(0, 3), st.integers(0, 3)),
)
def test_bubbles_and_peaks_have_their_closed_forms(ranks, chunks, microbatches, weight_grad, more):
    forward, input_grad = weight_grad + more[0], weight_grad + more[1]  # W is not above F or I
    costs, work = Costs(forward, input_grad, weight_grad), microbatches * (forward + input_grad + weight_grad)
    plain = simulate(schedules.zero_bubble_h1(ranks, microbatches), costs)
    bubble = (ranks - 1) * (forward + input_grad) - (min(microbatches, ranks) - 1) * weight_grad
    assert plain.makespan == work + bubble
    assert plain.peak_activations == [min(microbatches, ranks)] * ranks
    timeline = simulate(schedules.interleaved_zero_bubble(ranks, chunks, microbatches), costs)
    largest = -(-microbatches // max(1, microbatches // ranks))
    assert max(timeline.peak_activations) <= min(microbatches * chunks, (chunks - 1) * largest + ranks)
    if microbatches >= ranks:
        assert timeline.makespan == chunks * work + (ranks - 1) * (forward + input_grad - weight_grad)


# -- Schedules on a V, against closed forms and published shares of memory and bubble ----------------------------------


RANKS = [1, 2, 3, 4, 8]
CASES = [
    (ranks, microbatches)
    for ranks in RANKS
    for microbatches in sorted({1, 2, ranks, 2 * ranks - 1, 2 * ranks, 4 * ranks})
]
V_SHAPED = [schedules.zero_bubble_v, schedules.dualpipe_v, schedules.v_half, schedules.v_min]


@pytest.mark.parametrize("ranks, microbatches", CASES)
def test_schedules_on_a_v_have_their_closed_forms_and_published_shares(ranks, microbatches):
    """In units of a chunk's F, of which 1F1B waits 6 (P - 1)."""
    zero, dual, half, least = (simulate(build(ranks, microbatches)) for build in V_SHAPED)
    expected = [min(2 * ranks, microbatches + min(microbatches, rank + 1)) for rank in range(ranks)]
    assert zero.peak_activations == expected
    assert max(dual.peak_activations) <= 2 * ranks + 1
    assert max(half.peak_activations) <= 2 * ((ranks + 2) // 2)
    assert max(least.peak_activations) <= 2 * ((ranks + 4) // 3)
    if microbatches >= 2 * ranks:
        assert zero.makespan == dual.makespan == 6 * microbatches + ranks - 1
        longest = max(spans[-1][2] - spans[0][1] for spans in zero.spans)
        assert longest == 6 * microbatches  # no rank waits between its first action and its last
        assert dual.peak_activations == [2 * ranks + 1] * ranks
        assert half.makespan - 6 * microbatches <= 1 / 2 * 6 * (ranks - 1)
        assert least.makespan - 6 * microbatches <= 2 / 3 * 6 * (ranks - 1)


@pytest.mark.parametrize("build", [schedules.zero_bubble_v, schedules.v_half, schedules.v_min])
def test_other_costs_put_weight_gradients_elsewhere_and_are_never_slower_for_it(build):
    costs = Costs(forward=[1, 2, 1, 1, 1, 1, 1, 3], input_grad=1.5, weight_grad=0.5, transfer=0.25)
    adapted = simulate(build(4, 10, costs), costs)
    assert adapted.makespan <= simulate(build(4, 10), costs).makespan
    assert max(adapted.peak_activations) <= 8
    costs = Costs(1, 2, 0.5)
    assert simulate(build(4, 8, costs), costs).makespan < simulate(build(4, 8), costs).makespan
