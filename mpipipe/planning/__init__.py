"""Which plan of a training is the fastest: predictions from measured costs, and a search. No MPI, no arrays."""

from mpipipe.planning.cutting import Cut, CutStage, measured_costs
from mpipipe.planning.cutting import cut as cut
from mpipipe.planning.find import PlanReport as PlanReport
from mpipipe.planning.find import find_plan as find_plan
from mpipipe.planning.find import in_words as in_words
from mpipipe.planning.find import profile_of as profile_of
from mpipipe.planning.find import shown_seconds as shown_seconds
from mpipipe.planning.find import table as table
from mpipipe.planning.layer_plan import LayerPlan as LayerPlan
from mpipipe.planning.layer_plan import name_ends as name_ends
from mpipipe.planning.links import TrialSteps as TrialSteps
from mpipipe.planning.links import trial_steps as trial_steps
from mpipipe.planning.memory import check_memory as check_memory
from mpipipe.planning.memory import peak as peak
from mpipipe.planning.placement import compare_placements as compare_placements
from mpipipe.planning.predict import Choice, Prediction, predict
from mpipipe.planning.predict import completed as completed
from mpipipe.planning.problem import MeasuredRanks as MeasuredRanks
from mpipipe.planning.problem import PlanningProblem as PlanningProblem
from mpipipe.planning.problem import attentions as attentions
from mpipipe.planning.problem import declared as declared
from mpipipe.planning.problem import layers_with as layers_with
from mpipipe.planning.problem import parameters_of as parameters_of
from mpipipe.planning.profile import LayerCosts, Link, Profile, RankCosts, Sizes, parse_bytes
from mpipipe.planning.saved import SavedProfile
from mpipipe.planning.search import Plan, Space, find_plans
from mpipipe.planning.search import cuts_by_time as cuts_by_time
from mpipipe.planning.step_memory import RankBytes as RankBytes
from mpipipe.planning.step_memory import check_training as check_training
from mpipipe.planning.step_memory import layer_bytes as layer_bytes
from mpipipe.planning.step_memory import rank_bytes as rank_bytes

__all__ = [
    "Choice",
    "Cut",
    "CutStage",
    "LayerCosts",
    "Link",
    "Plan",
    "Prediction",
    "Profile",
    "RankCosts",
    "SavedProfile",
    "Sizes",
    "Space",
    "find_plans",
    "measured_costs",
    "parse_bytes",
    "predict",
]
