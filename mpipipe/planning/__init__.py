"""Which plan of a training is the fastest: predictions from measured costs, and a search."""

from mpipipe.planning.find import PlanReport, find_plan, in_words, shown_seconds, table
from mpipipe.planning.layer_plan import Cut, CutStage, LayerPlan, cut, name_ends
from mpipipe.planning.memory import check_memory, peak, resident
from mpipipe.planning.network import (
    NOTABLE,
    ORDERS,
    launch_lines,
    paper_costs,
    read_links,
    seconds_of_orders,
)
from mpipipe.planning.predict import Choice, Plan, completed, predict
from mpipipe.planning.problem import (
    MeasuredRanks,
    PlanningProblem,
    attentions,
    count_once,
    declared,
    layers_with,
    parameters_of,
)
from mpipipe.planning.profile import LayerCosts, Link, Profile, RankCosts, Sizes, parse_bytes
from mpipipe.planning.search import Space, find_plans
from mpipipe.planning.step_memory import RankBytes, check_training, rank_bytes

__all__ = ["cut"]
__dir__ = __all__.copy
