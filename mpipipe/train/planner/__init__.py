"""Plans from measurements of the configured model: `mpipipe plan` and `train --plan auto`."""

from mpipipe.train.planner.finding import Found, find_plan, plan_on_paper, planned, predict_on_paper
from mpipipe.train.planner.subject import Scene, Subject

__all__ = ["Found", "Scene", "Subject", "find_plan", "plan_on_paper", "planned", "predict_on_paper"]
