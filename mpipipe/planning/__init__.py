"""Which plan of a training is the fastest: predictions from measured costs, and a search. No MPI, no arrays."""

from mpipipe.planning.choice import Choice
from mpipipe.planning.predict import Prediction, predict
from mpipipe.planning.profile import LayerCosts, Link, Profile, RankCosts, Sizes
from mpipipe.planning.saved import SavedProfile
from mpipipe.planning.search import Plan, Space, find_plans
from mpipipe.planning.sizes import parse_bytes

__all__ = [
    "Choice",
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
    "parse_bytes",
    "predict",
]
