"""Which plan of a training is the fastest: predictions from measured costs, and a search."""

from mpipipe.planning.find import PlanReport, find_plan
from mpipipe.planning.layer_plan import Cut, CutStage, LayerPlan, cut, name_ends
from mpipipe.planning.memory import peak, resident
from mpipipe.planning.network import ORDERS, read_links, seconds_of_orders
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
from mpipipe.planning.profile import LayerCosts, Link, Profile, RankCosts, Sizes
from mpipipe.planning.search import Space, find_plans
from mpipipe.planning.step_memory import RankBytes, rank_bytes

__all__ = ["cut"]
__dir__ = __all__.copy
