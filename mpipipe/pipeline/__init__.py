"""The pipeline: a checked schedule, stages, and a mailbox, run step by step."""

from mpipipe.pipeline.pending import PendingStep, StepResult
from mpipipe.pipeline.pipeline import Pipeline

__all__ = ["PendingStep", "Pipeline", "StepResult"]
