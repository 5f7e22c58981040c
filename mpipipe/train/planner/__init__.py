"""Plans from measurements of the configured model: `mpipipe plan` and `train --plan auto`."""

from mpipipe.train.planner.finding import Found, find, planned
from mpipipe.train.planner.scene import Scene

__all__ = ["Found", "Scene", "find", "planned"]
