"""Plans from measurements of the configured model: `mpipipe plan` and `train --plan auto`."""

from mpipipe.train.planner.finding import Found, find, planned
from mpipipe.train.planner.paper import plan_on_paper, predict_on_paper
from mpipipe.train.planner.scene import Scene
from mpipipe.train.planner.subject import Subject

__all__ = ["Found", "Scene", "Subject", "find", "plan_on_paper", "planned", "predict_on_paper"]
