"""What schedules refuse: sizes, costs and limits that do not fit or are no numbers, each with what was expected."""

import math
from functools import partial

import numpy as np
import pytest
from support.any_schedule import NAMES

from mpipipe import schedules
from mpipipe.errors import ArgumentError
from mpipipe.schedules import Costs, Links, advise, by_name, lower_bound, registry, simulate, simulate_flows

PLAIN, SLICED = schedules.one_f_one_b(2, 4), schedules.one_f_one_b(2, 2, slices=3)
AGAIN = schedules.with_recompute(PLAIN, memory_limit=1)
NO_NUMBERS = ["2", [2], (2, 2), True, np.True_, math.nan, 2j, object()]
TAKERS = [
    partial(by_name, "gpipe", ranks=2, microbatches=4), partial(schedules.zero_bubble_2p, 2, 4),
    partial(schedules.with_recompute, PLAIN), partial(lower_bound, PLAIN), partial(lower_bound, AGAIN),
]  # fmt: skip
COSTS = [-1, math.nan, math.inf, [1, 2, 3], "fast", ["a", "b"], None]
TIMES = [(1, 2), (1, 2, 3, 4), (1, 0, 2), (1, -1, 2), (1, "a", 2), 3, (1, math.nan, 2)]
RECOMPUTED = [
    (dict(activation=-1), "activation"), (dict(activation=[1, 2, 3]), "activation"),
    (dict(kept_input=math.nan), "kept_input"), (dict(activation=[4, 1], kept_input=2), "kept_input=2, activation=1"),
    (dict(costs=Costs(forward=-1)), "forward"),
]  # fmt: skip
LEAST = [(PLAIN, 1), (schedules.looped_bfs(2, 3, 2), 3), (schedules.v_min(2, 4), 2), (SLICED, 3)]
PARTS = [([1, 2], 0), ([], 1), ([1, -1], 1), ([1, math.nan], 1), ([1, "x"], 2), ([1, 2], 1.5)]
WRONG = [
    *((partial(take, memory_limit=limit), "memory_limit is no number") for take in TAKERS for limit in NO_NUMBERS),
    *((partial(by_name, name, ranks=0, microbatches=1), "ranks") for name in NAMES),
    *((partial(by_name, name, ranks=1, microbatches=0), "microbatches") for name in NAMES),
    *((partial(advise, *sizes), r"at least 1|integer") for sizes in [(0,), (2, 0), (2, 1, 0), (2, 0, 4), (2, 1, 1.5)]),
    *((partial(by_name, name, ranks=2, chunks=3, microbatches=4), r"two stages(.|\n)*leave chunks out")
      for name in registry.TWO_STAGES),
    (partial(by_name, "gpipe", ranks=2, chunks=2, microbatches=4), r"one stage per rank(.|\n)*interleaved_1f1b"),
    (partial(schedules.gpipe, 3, 3, backward="random"), "random"),
    *((partial(by_name, name, ranks=128, chunks=2, microbatches=4096),
       r"too large(.|\n)*4,096 microbatches(.|\n)*at most 262,144 forwards") for name in ("interleaved_1f1b", "v_min")),
    *((partial(by_name, name, ranks=2, microbatches=2, slices=slices), "slices is not a count")
      for name in NAMES for slices in (0, -1, 1.5, "2", None)),
    *((partial(simulate, PLAIN, Costs(forward=cost)), "forward") for cost in COSTS),
    *((partial(simulate, SLICED, Costs(slices=times)), "times of slices do not fit") for times in TIMES),
    *((partial(lower_bound, SLICED, Costs(slices=times)), "times of slices do not fit") for times in TIMES),
    (partial(schedules.peak_memory, SLICED, slices=(1, 2)), "lengths of slices do not fit"),
    *((partial(schedules.with_recompute, PLAIN, **options), what) for options, what in RECOMPUTED),
    *((partial(schedules.with_recompute, schedules.zero_bubble_h1(4, 8), memory_limit=limit),
       rf"{limit}(.|\n)*at least 4, which rank") for limit in (0, -1, 3.9)),
    *((partial(lower_bound, made, memory_limit=limit), f"at least {least}")
      for made, least in LEAST for limit in (-1, 0, 0.5)),
    (partial(schedules.zero_bubble_2p, 4, 8, memory_limit=0.5), "at least 1"),
    (partial(schedules.zero_bubble_2p, 2, 2, memory_limit=2, slices=3), "at least 3"),
    (partial(schedules.zero_bubble_2p, 4, 8, kept=1.5), "0 to 1"),
    *((partial(schedules.partition, costs, stages), "the cost of layer 1|stages") for costs, stages in PARTS),
    *((partial(schedules.with_frozen, schedules.gpipe(2, 1), frozen), "do not fit the schedule")
      for frozen in ({0, 1}, {2}, {-1})),
    *((partial(PLAIN.forward_only_part, microbatches), "microbatches=") for microbatches in (0, 8, "2")),
    (partial(Links, 0, 1, node_size=8, nic_ranks=3), "does not hold the ranks of whole NICs"),
    *((partial(simulate_flows, schedules.gpipe(2, 1), Costs(), Links(1, 1), places), "the ranks of the schedule")
      for places in ([(0,)], [(0, 1, 2)])),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_what_does_not_fit_is_refused_with_what_was_expected(number):
    call, match = WRONG[number]
    with pytest.raises(ArgumentError, match=match) as refusal:
        call()
    assert refusal.value.expected


@pytest.mark.parametrize(("schedule", "least"), LEAST, ids=repr)
def test_the_least_limit_that_works_is_named(schedule, least):
    lower_bound(schedule, memory_limit=least)
