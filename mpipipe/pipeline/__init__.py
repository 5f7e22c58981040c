"""The pipeline: a checked schedule, stages, and a mailbox, run step by step.

what a user holds        pipeline, pending
before the first step    construction, plan, ties, stage
one call                 engine, call_agreement, batch, weighing
one action               executor, messages, gradient_sums, graphs
what went wrong          check, flight, shortage
"""

from mpipipe.pipeline.messages import Branches
from mpipipe.pipeline.pending import PendingStep, StepResult
from mpipipe.pipeline.pipeline import Pipeline

__all__ = ["Branches", "PendingStep", "Pipeline", "StepResult"]
