"""mpipipe generate: a trained model continues a text."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from mpipipe import processor, schedules
from mpipipe.comm import runtime
from mpipipe.comm.abort import run_or_abort
from mpipipe.comm.group import group_of
from mpipipe.comm.mesh import Mesh
from mpipipe.errors import ConfigError
from mpipipe.models import GPT
from mpipipe.train import limits, weights
from mpipipe.train.decoder import build_decoder
from mpipipe.train.outlet import Outlet
from mpipipe.train.output import shared_path
from mpipipe.train.sample import generate as continuation
from mpipipe.train.sample import readable
from mpipipe.train.training_plan import TrainingPlan


def generate(
    run: Annotated[str, typer.Argument(help="output folder of a training that ended", show_default=False)],
    prompt: Annotated[str, typer.Option(help="text to continue; default: a line break", show_default=False)] = "\n",
    count: Annotated[int, typer.Option("--bytes", min=1, help="bytes to generate")] = 200,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest byte")] = 0.8,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="of the draws")] = 0,
    seq: Annotated[int, typer.Option(min=1, help="ranks that share each cache of keys and values")] = 1,
) -> None:
    """Continue a text with a trained model (mpiexec -n 2 python -m mpipipe generate runs/first --prompt "def main(").

    The ranks are pipe x seq, however the training was cut. A text may be longer than the sequences of the training.
    Each layer then looks back over their length.
    """

    def work() -> None:
        processor.limit_blas_threads()
        comm = runtime.world()
        folder, start = weights.folder_of(shared_path(comm, run)), prompt.encode(errors="surrogateescape")
        with group_of(comm).together("generate: the mesh"):
            mesh = Mesh(comm, pipe=max(1, comm.size // seq), seq=seq)
        with mesh:
            plan, dtype = _prepare(folder, mesh)
            capacity = len(start) + count
            with build_decoder(plan, mesh, dtype, capacity, lambda stages: weights.load(folder, stages)) as pipeline:
                answer = continuation(pipeline, mesh, start, count, temperature=temperature, seed=seed)
            if mesh.rank == 0:
                Outlet(sys.stdout).write(readable(start + answer) + "\n")

    raise typer.Exit(run_or_abort(work))


def _prepare(folder: Path, mesh: Mesh) -> tuple[TrainingPlan, str]:
    """Return the plan and the dtype that rank 0 finds in the folder. All ranks raise the same error."""
    group = group_of(mesh.comm)
    found: weights.Description | None = None
    with group.together("generate: the description of the weights"):
        if mesh.rank == 0:
            found = weights.describe(folder)
    description: weights.Description = group.broadcast("generate: the description of the weights", found)
    with group.together("generate: the model"):
        try:
            model = GPT(**description.model)
        except TypeError as error:
            raise ConfigError(f"the sizes of the model are not those of a GPT: {error}", found=str(folder)) from error
        limits.check_counts(model.layers, mesh.pipe.size, 1, 1)
        schedule = schedules.forward_only(mesh.pipe.size, 1, 1)
        layer_ranges = schedules.partition(model.costs(), schedule.stages)
    return TrainingPlan(model, schedule, layer_ranges, rows=1), description.dtype
