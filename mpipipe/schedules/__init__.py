"""Pipeline schedules as data: built by name, proven, simulated. No MPI, no arrays."""

from mpipipe.schedules.action import INPUT_GRAD, Action
from mpipipe.schedules.bounds import lower_bound
from mpipipe.schedules.building_blocks import v_half, v_min, zero_bubble_2p
from mpipipe.schedules.checks import MOST_UNITS
from mpipipe.schedules.classic import forward_only, gpipe, interleaved_1f1b, looped_bfs, one_f_one_b
from mpipipe.schedules.csv_text import from_csv, from_file, is_path
from mpipipe.schedules.draw import COLUMNS, timeline
from mpipipe.schedules.flows import simulate_flows
from mpipipe.schedules.partition import partition, with_frozen
from mpipipe.schedules.proof import check, grid
from mpipipe.schedules.recompute import before_backwards, with_recompute
from mpipipe.schedules.registry import PER_RANK, Advice, advise, by_name, full_name, names
from mpipipe.schedules.replay import source
from mpipipe.schedules.schedule import Schedule, Skip, with_skips
from mpipipe.schedules.simulate import (
    FORM,
    Costs,
    Links,
    Timeline,
    activations,
    peak_memory,
    simulate,
)
from mpipipe.schedules.zero_bubble import (
    dualpipe_v,
    interleaved_zero_bubble,
    zero_bubble_h1,
    zero_bubble_v,
)

__all__ = [
    "Action",
    "Costs",
    "Links",
    "Schedule",
    "Timeline",
    "advise",
    "by_name",
    "check",
    "from_csv",
    "gpipe",
    "interleaved_1f1b",
    "lower_bound",
    "one_f_one_b",
    "partition",
    "peak_memory",
    "simulate",
    "simulate_flows",
    "timeline",
    "with_frozen",
    "with_recompute",
    "with_skips",
    "zero_bubble_h1",
]
__dir__ = __all__.copy
