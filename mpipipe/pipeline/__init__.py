"""The pipeline: a checked schedule, stages, and a mailbox, run step by step."""

from mpipipe.pipeline.branches import Branches
from mpipipe.pipeline.pipeline import Pipeline, StepResult

__all__ = ["Branches", "Pipeline", "StepResult"]
