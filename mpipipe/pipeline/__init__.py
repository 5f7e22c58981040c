"""The pipeline: a checked schedule, stages, and a mailbox, run step by step."""

from mpipipe.pipeline.pipeline import Pipeline, StepResult

__all__ = ["Pipeline", "StepResult"]
