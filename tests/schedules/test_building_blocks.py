"""ZB-2P: no waiting where memory allows, never slower than ZB-H1, and rates for costs of real models."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpipipe import schedules
from mpipipe.schedules import Costs, simulate


def waiting_share(schedule, costs, busy):
    """The share of the longest time from a rank's first action to its last in which it waits."""
    longest = max(spans[-1][2] - spans[0][1] for spans in simulate(schedule, costs).spans)
    return (longest - busy) / longest


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_no_rank_waits_where_two_pipelines_full_of_activations_fit(ranks):
    for microbatches in (2 * ranks - 1, 2 * ranks, 4 * ranks):
        for limit in (max(1, 2 * ranks - 1), 2 * ranks, None):
            schedule = schedules.zero_bubble_2p(ranks, microbatches, memory_limit=limit)
            timeline = simulate(schedule)
            assert timeline.makespan == 3 * microbatches + ranks - 1
            assert waiting_share(schedule, Costs(), 3 * microbatches) == 0
            assert max(timeline.peak_activations) <= (limit or 2 * ranks)


@settings(max_examples=30)
@given(st.integers(1, 6), st.integers(1, 16), st.tuples(*[st.integers(1, 4)] * 3), st.integers(1, 14))
def test_the_limit_is_kept_and_with_that_of_h1_it_is_never_slower(ranks, microbatches, times, limit):
    costs = Costs(*times, transfer=0.5)
    timeline = simulate(schedules.zero_bubble_2p(ranks, microbatches, costs, limit), costs)
    assert max(timeline.peak_activations) <= limit
    if limit >= ranks:
        by_hand = schedules.zero_bubble_h1(ranks, microbatches)
        assert timeline.makespan <= simulate(by_hand, costs).makespan + 1e-9


# -- Bubble rates of four models in the Zero Bubble paper (Qi et al. 2023, arXiv:2401.10241, appendix) -----------------


# P, M; times of F, I, W and a message in ms; hidden size, heads; rates of 1F1B, ZB-H1, ZB-H2, ZB-1p, ZB-2p
MODELS = {
    "1.5B": (8, 24, (18.522, 18.086, 9.337, 0.601), (2304, 24), (0.2431, 0.1585, 0.1083, 0.1585, 0.0433)),
    "6.2B": (8, 24, (29.718, 29.444, 19.927, 0.527), (4096, 32), (0.2347, 0.1323, 0.0698, 0.1323, 0.0029)),
    "14.6B": (16, 48, (11.347, 11.248, 8.132, 0.377), (5120, 40), (0.2552, 0.1397, 0.0672, 0.1397, 0.0066)),
    "28.3B": (32, 96, (10.419, 10.207, 7.715, 0.408), (6144, 48), (0.2646, 0.1421, 0.0641, 0.1421, 0.0038)),
}
NAMES = ("1F1B", "ZB-H1", "ZB-H2", "ZB-1p", "ZB-2p")


# The paper's rate is 1 - M (F + I + W) / span; the span is the longest time from a rank's first action to its last. Its
# limits count what is left of an activation after I: 32 h of 34 h + 5 a s numbers per token and layer.


def built(name, ranks, microbatches, costs, kept):
    if name == "1F1B":
        return schedules.one_f_one_b(ranks, microbatches)
    if name == "ZB-H1":
        return schedules.zero_bubble_h1(ranks, microbatches)
    if name == "ZB-H2":
        return schedules.zero_bubble_2p(ranks, microbatches, costs, 2 * ranks - 1)
    limit = ranks if name == "ZB-1p" else 2 * ranks
    return schedules.zero_bubble_2p(ranks, microbatches, costs, limit, kept)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("model", MODELS)
def test_the_rate_is_that_of_the_paper_or_better(model, name):
    ranks, microbatches, times, (hidden, heads), rates = MODELS[model]
    costs = Costs(*times)
    kept = 32 * hidden / (34 * hidden + 5 * heads * 1024)
    timeline = simulate(built(name, ranks, microbatches, costs, kept), costs)
    span = max(end - starts[0] for end, starts in zip(timeline.ends, timeline.starts))
    rate = 1 - microbatches * sum(times[:3]) / span
    assert round(rate, 4) <= rates[NAMES.index(name)]
