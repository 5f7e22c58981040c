"""Pipeline schedules as data: built by name, proven by `check`, timed by `simulate`. No MPI, no arrays."""

from mpipipe.schedules.action import BACKWARD as BACKWARD
from mpipipe.schedules.action import FORWARD as FORWARD
from mpipipe.schedules.action import INPUT_GRAD as INPUT_GRAD
from mpipipe.schedules.action import RECOMPUTE as RECOMPUTE
from mpipipe.schedules.action import WEIGHT_GRAD as WEIGHT_GRAD
from mpipipe.schedules.action import Action
from mpipipe.schedules.bounds import Gap, gap, lower_bound
from mpipipe.schedules.building_blocks import v_half, v_min, zero_bubble_2p
from mpipipe.schedules.classic import forward_only, gpipe, interleaved_1f1b, looped_bfs, one_f_one_b
from mpipipe.schedules.csv_text import from_csv
from mpipipe.schedules.csv_text import from_file as from_file
from mpipipe.schedules.csv_text import is_path as is_path
from mpipipe.schedules.draw import chrome_trace, timeline
from mpipipe.schedules.partition import partition, with_frozen
from mpipipe.schedules.proof import check, grid
from mpipipe.schedules.proof import check_part as check_part
from mpipipe.schedules.proof import digest as digest
from mpipipe.schedules.proof import logical_time_of as logical_time_of
from mpipipe.schedules.proof import recomputed_on as recomputed_on
from mpipipe.schedules.proof import trains as trains
from mpipipe.schedules.recompute import before_backwards as before_backwards
from mpipipe.schedules.recompute import with_recompute
from mpipipe.schedules.registry import ONE_STAGE as ONE_STAGE
from mpipipe.schedules.registry import SEVERAL_STAGES as SEVERAL_STAGES
from mpipipe.schedules.registry import TWO_STAGES as TWO_STAGES
from mpipipe.schedules.registry import WITH_COSTS as WITH_COSTS
from mpipipe.schedules.registry import Advice, advise, by_name
from mpipipe.schedules.registry import names as names
from mpipipe.schedules.registry import placement_of as placement_of
from mpipipe.schedules.repeated import Repetition, simulate_repeated
from mpipipe.schedules.replay import source as source
from mpipipe.schedules.schedule import Schedule, Skip, with_skips
from mpipipe.schedules.search.exact import Optimum, optimum
from mpipipe.schedules.search.memory_limited import search_with_recompute
from mpipipe.schedules.search.search import search
from mpipipe.schedules.simulate import EQUAL_COSTS as EQUAL_COSTS
from mpipipe.schedules.simulate import FORM as FORM
from mpipipe.schedules.simulate import TIMES as TIMES
from mpipipe.schedules.simulate import Costs, Links, Timeline, peak_memory, simulate
from mpipipe.schedules.simulate import activations as activations
from mpipipe.schedules.zero_bubble import dualpipe_v, interleaved_zero_bubble, zero_bubble_h1, zero_bubble_v

__all__ = [
    "Action",
    "Advice",
    "Costs",
    "Gap",
    "Links",
    "Optimum",
    "Repetition",
    "Schedule",
    "Skip",
    "Timeline",
    "advise",
    "by_name",
    "check",
    "chrome_trace",
    "dualpipe_v",
    "forward_only",
    "from_csv",
    "gap",
    "gpipe",
    "grid",
    "interleaved_1f1b",
    "interleaved_zero_bubble",
    "looped_bfs",
    "lower_bound",
    "one_f_one_b",
    "optimum",
    "partition",
    "peak_memory",
    "search",
    "search_with_recompute",
    "simulate",
    "simulate_repeated",
    "timeline",
    "v_half",
    "v_min",
    "with_frozen",
    "with_recompute",
    "with_skips",
    "zero_bubble_2p",
    "zero_bubble_h1",
    "zero_bubble_v",
]
