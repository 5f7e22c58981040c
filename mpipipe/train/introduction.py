"""The lines with which a training introduces itself."""

from __future__ import annotations

from pathlib import Path

from mpipipe.comm.mesh import Mesh
from mpipipe.train.config import TrainConfig
from mpipipe.train.data import Source
from mpipipe.train.training_plan import TrainingPlan
from mpipipe.wording import counted


def introduction(
    config: TrainConfig, plan: TrainingPlan, mesh: Mesh, data: Source | None, unit: str, *, place: str, out: Path
) -> str:
    """Return what is trained, on which ranks, and where metrics go.

    `unit` is what a token is: bytes or tokens. `place` is what computes: CPUs or GPUs.
    """
    schedule = plan.schedule
    text = "" if data is None else f", {len(data.train):,} {unit} of text"
    return (
        f"mpipipe: {counted(mesh.comm.size, 'rank')} = "
        f"pipe {mesh.pipe.size} x data {mesh.data.size} x seq {mesh.seq.size}; "
        f"{schedule.name}, {counted(schedule.stages, 'stage')}, {counted(schedule.microbatches, 'micro-batch')}\n"
        f"mpipipe: {plan.model.parameters:,} parameters{_trained(plan)}, {config.dtype} on {place}, "
        f"batch {config.batch} x {config.seq_len} {unit}{text}\n"
        f"mpipipe: metrics in {out}"
    )


def _trained(plan: TrainingPlan) -> str:
    """Return how many parameters are trained, where that is not all of them."""
    tuning = plan.tuning
    if tuning.lora is not None:
        count = sum(entry.size for entry in tuning.trained(plan.model).values())
        return f" and {count:,} of adapters, which alone are trained"
    if tuning.freeze:
        sizes = {entry.tie or name: entry.size for name, entry in tuning.trained(plan.model).items()}
        return f" of which {sum(sizes.values()):,} are trained"
    return ""
