"""How a training leaves before its end: what it catches, and what it says of how to go on."""

from __future__ import annotations

from pathlib import Path

from mpipipe import checkpoint
from mpipipe.comm.mesh import Mesh
from mpipipe.comm.preemption import Preemption
from mpipipe.comm.time_limit import parse_duration
from mpipipe.stop_signals import parse_signals
from mpipipe.train import resume
from mpipipe.train.config import TrainConfig
from mpipipe.train.report import NullReporter, Reporter


def preemption_of(config: TrainConfig, mesh: Mesh, reporter: Reporter | NullReporter) -> Preemption:
    """Return what says when the job has to leave, as configured; collective."""
    return Preemption(
        mesh.comm,
        signals=config.preempt_signals,
        time_limit=config.time_limit,
        grace=config.preempt_grace,
        say=reporter.say,
    )


def may_save(config: TrainConfig) -> bool:
    """Whether this training may save a checkpoint: at steps that are configured, or where it has to leave."""
    limited = config.time_limit is None or parse_duration(config.time_limit) > 0  # None: SLURM may set a limit
    return config.save_every > 0 or bool(parse_signals(config.preempt_signals)) or limited


def whereabouts(done: int, steps: int, out: Path) -> str:
    """Return after which step the training is, and in a second line how to go on: with the folder it may be long."""
    saved, place = checkpoint.newest(resume.checkpoints_of(out)), f"after step {done} of {steps}"
    if saved is None and done == 0:
        return f"before step 1 of {steps}; there is nothing to save\n--resume auto --out {out} begins"
    if saved is None:
        return f"{place}; nothing is saved to go on from\nmetrics are in {out}"
    return f"{place}\n--resume auto --out {out} goes on from {saved.name}"
