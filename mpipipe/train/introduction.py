"""The lines with which a training introduces itself."""

from __future__ import annotations

from pathlib import Path

from mpipipe.comm.mesh import Mesh
from mpipipe.train.config import TrainConfig
from mpipipe.train.data import Corpus
from mpipipe.train.training_plan import TrainingPlan


def introduction(
    config: TrainConfig, plan: TrainingPlan, mesh: Mesh, corpus: Corpus | None, place: str, out: Path
) -> str:
    """Return what is trained, on which ranks, and where metrics go; `place` is what computes: CPUs or GPUs."""
    text = "" if corpus is None else f", {len(corpus.train):,} bytes of text"
    return (
        f"mpipipe: {mesh.comm.size} ranks = pipe {mesh.pipe.size} x data {mesh.data.size} x seq {mesh.seq.size}; "
        f"{plan.schedule.name}, {plan.schedule.stages} stages, {plan.schedule.microbatches} micro-batches\n"
        f"mpipipe: {plan.model.parameters:,} parameters, {config.dtype} on {place}, batch {config.batch} x "
        f"{config.seq_len} bytes{text}; metrics in {out}"
    )
