"""Which plan of a training is the fastest: predictions from measured costs, and a search. No MPI, no arrays."""

from mpipipe.planning.predict import Choice, Prediction, predict
from mpipipe.planning.profile import LayerCosts, Link, Profile, RankCosts, Sizes, parse_bytes
from mpipipe.planning.saved import SavedProfile
from mpipipe.planning.search import Plan, Space, find_plans

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
