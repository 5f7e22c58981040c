"""Repeated parts against whole simulations, and what they refuse."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.tolerance import close

from mpipipe import schedules
from mpipipe.errors import ArgumentError
from mpipipe.schedules import Costs, Links, repeated, simulate, simulate_repeated

ONE = ["gpipe", "one_f_one_b", "zero_bubble_h1"]
SEVERAL = ["interleaved_1f1b", "interleaved_zero_bubble", "looped_bfs", "forward_only"]
RATIOS = [(1, 1), (2, 1), (1, 2), (3, 2), (2, 3), (1, 4), (4, 1)]
times = st.integers(0, 9)
links = st.builds(Links, times, st.just(1), st.sampled_from([1, 2, 4]), st.integers(0, 3), st.just(4))


@pytest.mark.long
@settings(max_examples=60)
@given(
    name=st.sampled_from([*ONE, *SEVERAL, "dualpipe_v"]),
    ratio=st.sampled_from(RATIOS),
    unit=st.integers(10, 24),
    costs=st.builds(Costs, times, times, times, times),
    network=st.none() | links,
)
def test_what_is_found_is_what_the_whole_simulation_finds(name, ratio, unit, costs, network):
    chunks = 1 if name in ONE else 2
    size = {"ranks": ratio[0] * unit, "chunks": chunks, "microbatches": ratio[1] * unit}
    assume(size["ranks"] * size["microbatches"] < 3000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repeated, "ENOUGH", 1 << 10)
        patch.setattr(repeated, "LARGEST", 1 << 12)
        try:
            found = simulate_repeated(name, **size, costs=costs, links=network, message_bytes=2)
        except ArgumentError as error:
            assert "was found to repeat" in str(error)
            return
    whole = schedules.by_name(name, **size)
    if network is not None:
        hops = network.times(whole.placement, 2)
        costs = Costs(costs.forward, costs.input_grad, costs.weight_grad, hops)
    timeline = simulate(whole, costs)
    assert (found.makespan, found.peak_activations) == (timeline.makespan, max(timeline.peak_activations))
    close([found.bubble_fraction, found.efficiency], [timeline.bubble_fraction, timeline.efficiency], 4)
    close(min(found.bubble_ratio, 1e9), min(timeline.bubble_ratio, 1e9), 4)


@pytest.mark.parametrize("ranks, microbatches", [(16384, 8192), (4096, 4096 * 3), (1 << 20, 1 << 21)])
def test_1f1b_has_its_closed_form_at_any_size(ranks, microbatches):
    found = simulate_repeated("one_f_one_b", ranks=ranks, microbatches=microbatches, costs=Costs(1.5, 1, 2))
    assert found.makespan == (microbatches + ranks - 1) * 4.5
    assert found.peak_activations == min(ranks, microbatches)
    close(found.bubble_ratio, (ranks - 1) / microbatches, 4)
    assert max(p * m for p, m in found.sizes) <= repeated.LARGEST / 2


def test_many_micro_batches_on_few_ranks_repeat_as_well():
    found = simulate_repeated("interleaved_1f1b", ranks=6, chunks=2, microbatches=6 * 10**6 + 6)
    assert found.makespan == (2 * (6 * 10**6 + 6) + 5) * 3
    assert found.sizes[-1][0] == 6 or found.sizes[-1] == (6, 6 * 10**6 + 6)


def test_transfers_between_nodes_alone_take_time():
    """GPipe: M + P - 1 forwards and as many backwards, and the way over all hops and back."""
    network = Links(latency=0.25, bandwidth=8, node_size=4)
    found = simulate_repeated("gpipe", ranks=1024, microbatches=1024, links=network, message_bytes=2)
    assert found.makespan == 3 * 2047 + 2 * 255 * 0.5


@pytest.mark.parametrize(
    "name, options, match",
    [
        ("v_half", {"chunks": 2}, "follow from its costs"),
        ("one_f_one_b", {"costs": Costs(forward=[1, 2])}, "same costs"),
        ("one_f_one_b", {"costs": Costs(forward=-1)}, "forward"),
        ("one_f_one_b", {"costs": Costs(forward=float("nan"))}, "forward"),
        ("one_f_one_b", {"chunks": 2}, "one stage per rank"),
        ("no such", {}, "unknown schedule"),
        ("one_f_one_b", {"ranks": 0}, "ranks is not a count"),
        (
            "interleaved_1f1b",
            {"ranks": 10007, "microbatches": 20011, "chunks": 2},
            "was found to repeat.*\n.*\n.*\n.*20014",
        ),
        ("one_f_one_b", {"links": Links(1, 1), "message_bytes": -1}, "message_bytes"),
    ],
)
def test_what_does_not_repeat_is_refused(name, options, match):
    with pytest.raises(ArgumentError, match=match):
        simulate_repeated(name, **{"ranks": 4096, "microbatches": 4096, **options})


def test_times_of_hops_follow_from_nodes():
    placement = (0, 1, 2, 3, 3, 2, 1, 0)
    network = Links.read("1,4,2,0.5,8")
    assert network == Links(1, 4, 2, 0.5, 8)
    assert network.times(placement, 8) == [0, 1.5, 3, 1.5, 0, 1.5, 3, 1.5]
    assert Links.read("1,inf").times(placement, 8) == [0, 1, 1, 1, 0, 1, 1, 1]


@pytest.mark.parametrize(
    "text", ["", "1", "1,2,3,4", "1,0", "-1,1", "1,1,0", "1,1,1.5", "nan,1", "1,nan", "a,b", "inf,1"]
)
def test_what_describes_no_links_is_refused(text):
    with pytest.raises(ArgumentError):
        Links.read(text)
