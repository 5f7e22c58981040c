"""The pipeline: a checked schedule, stages, and a mailbox, run step by step."""

from mpipipe.pipeline.branches import Branches
from mpipipe.pipeline.pending import PendingStep, StepResult
from mpipipe.pipeline.pipeline import Pipeline

__all__ = ["Branches", "PendingStep", "Pipeline", "StepResult"]
