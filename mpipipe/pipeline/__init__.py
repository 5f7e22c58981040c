"""The pipeline: a checked schedule, stages, and a mailbox, run step by step.

what a user holds        pipeline, result, state
before the first step    construction, plan, ties, attached
one call                 batch, units, loss, evaluation, gradient_sums
one action               executor, messages, clock, graphs
what went wrong          check, diagnostics
"""

from mpipipe.pipeline.batch import LossFunction
from mpipipe.pipeline.graphs import StageGraphs
from mpipipe.pipeline.loss import Loss
from mpipipe.pipeline.messages import Branches
from mpipipe.pipeline.pipeline import Pipeline
from mpipipe.pipeline.plan import PlannedAction, receive_window
from mpipipe.pipeline.result import StepResult
from mpipipe.pipeline.units import merge, rows_of_any

__all__ = [
    "Branches",
    "Loss",
    "LossFunction",
    "Pipeline",
    "PlannedAction",
    "StageGraphs",
    "StepResult",
    "merge",
    "receive_window",
    "rows_of_any",
]
