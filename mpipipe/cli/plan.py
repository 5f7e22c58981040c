"""mpipipe plan: measures a model on these ranks, and finds the fastest way to train it, with the flags of train."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpipipe import files, processor
from mpipipe.cli.flags import Flag, Parameter
from mpipipe.cli.train import CONFIG, FIELDS
from mpipipe.comm import runtime
from mpipipe.comm.abort import run_or_abort
from mpipipe.comm.device import select_device
from mpipipe.comm.group import group_of
from mpipipe.comm.mesh import Mesh
from mpipipe.comm.types import Communicator
from mpipipe.errors import ConfigError
from mpipipe.models import GPT
from mpipipe.planning.table import table
from mpipipe.train import TrainConfig
from mpipipe.train.base import architecture_of, find_base
from mpipipe.train.config_checks import PLANNED
from mpipipe.train.config_file import read_keys, toml_line
from mpipipe.train.fine_tuning import find_tuning
from mpipipe.train.options.aliases import near
from mpipipe.train.outlet import Outlet
from mpipipe.train.planner import Found, Scene, find
from mpipipe.train.preparation import check_same_config, find_data

NOT_WRITTEN = ("plan", "memory_limit", "fixed", "config")


def plan(config: str | None = None, out: str | None = None, **flags: Any) -> int:
    """Find the fastest schedule, chunks, micro-batches, partition and recomputation for a training (mpiexec -n 4 ...).

    Takes the flags of train. What is given stays as it is; all else is chosen by measurements with all ranks at work.
    """

    def work() -> None:
        processor.prepare_process()
        comm = runtime.world()
        given: dict[str, Any] = {}
        with group_of(comm).together("plan: reading the configuration"):
            given = {**({} if config is None else read_keys(Path(config))), **flags}
            chosen = TrainConfig.load(config, **{**flags, "plan": "auto"})
            if comm.rank == 0 and out is not None:
                check_new(Path(out))
        found, mesh_sizes = make_plans(chosen, comm)
        with group_of(comm).together("plan: the result"):
            if comm.rank == 0:
                show(found)
                if out is not None:
                    write(Path(out), {**given, **mesh_sizes}, found)

    return run_or_abort(work)


def make_plans(config: TrainConfig, comm: Communicator) -> tuple[Found, dict[str, int]]:
    """Return the plans of a training on these ranks, and the sizes of the mesh; collective."""
    check_same_config(group_of(comm), config)
    config, base = find_base(config, comm)
    tuning = find_tuning(config, comm)
    pipe = max(1, comm.size // config.seq) if config.pipe is None else config.pipe
    with group_of(comm).together("plan: the mesh"):
        mesh = Mesh(comm, pipe=pipe, seq=config.seq)
    with mesh:
        place = select_device(config.device, comm)
        vocab = find_data(config, None, group_of(comm)).vocab
        scene = Scene.of(config, architecture_of(base, GPT), mesh, vocab, tuning)
        return find(scene, place), {"pipe": pipe, "seq": config.seq}


def show(found: Found) -> None:
    """Write the best plans to the standard output."""
    outlet = Outlet(sys.stdout)
    for line in table(found.plans):
        outlet.write(f"{line}\n")
    scale = found.profile.scale
    outlet.write(f"real steps take {scale:.3f} of what measured layers and messages add up to; that is counted above\n")
    if found.crowd:
        outlet.write(f"{found.crowd}\n")


def check_new(path: Path) -> None:
    """Raise ConfigError if no new file can be written."""
    if path.exists() or not path.parent.is_dir():
        raise ConfigError(
            "no plan can be written there",
            found=str(path),
            expected="a new file in a folder that exists",
            remedy="name another --out, or move the old plan away",
        )


def write(path: Path, given: Mapping[str, Any], found: Found) -> None:
    """Write a configuration with the best plan, for `train --config`. Raises ConfigError if it cannot be."""
    choice = found.choice
    keys = {name.rstrip("_"): value for name, value in given.items() if name not in (*NOT_WRITTEN, *PLANNED)}
    keys |= {
        "schedule": choice.schedule,
        "chunks": choice.chunks,
        "microbatches": choice.microbatches,
        "partition": ",".join(map(str, choice.partition)),
    }
    if choice.recompute:
        keys["recompute"] = True
    if choice.recompute_limit is not None:
        keys["recompute_limit"] = choice.recompute_limit
    content = "".join(toml_line(*key) for key in keys.items())
    try:
        files.write_whole(path, content.encode())
    except OSError as error:
        raise ConfigError(f"the plan cannot be written: {error.strerror}", found=str(path)) from error
    Outlet(sys.stdout).write(f"mpipipe: the plan is in {path}: python -m mpipipe train --config {path}\n")


OUT = Parameter("out", str, False, None, Flag("new file for the best plan, which train --config takes", metavar="FILE"))
plan.parameters = [  # type: ignore[attr-defined]
    CONFIG,
    OUT,
    *(entry for entry in FIELDS if entry.name not in ("out", "plan")),
]
plan.suggest = near  # type: ignore[attr-defined]
