"""What a pipeline may be given, checked on each rank before the ranks agree."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

from mpipipe import arrays
from mpipipe.comm.types import Communicator
from mpipipe.errors import ArgumentError
from mpipipe.pipeline.stage import StageAdapter
from mpipipe.schedules import Schedule
from mpipipe.schedules.distributed_proof import check_part
from mpipipe.wording import counted


def device_of(stages: Sequence[StageAdapter]) -> str:
    """Where the stages of this rank compute: "cpu" or "cuda", by their attribute `device`; "cpu" for those without.

    Raises ArgumentError if they differ.
    """
    devices = [stage.device for stage in stages]
    kinds = {device.partition(":")[0] for device in devices}
    if len(kinds) > 1 or not kinds <= {"cpu", "cuda"}:
        raise ArgumentError(
            "the stages of one rank are on different devices",
            found=devices,
            expected="all 'cpu' or all 'cuda'",
            remedy="build all stages of a rank with the same device",
        )
    numbers = {stage.gpu for stage in stages if stage.gpu is not None}
    if numbers and numbers != {arrays.current_gpu()}:
        raise ArgumentError(
            "the stages of a rank are not all on its current GPU",
            found=f"stages on {sorted(numbers)}",
            expected=f"GPU {arrays.current_gpu()} alone",
            remedy="one GPU for each rank: mpipipe.select_device() once, and device='cuda' for all stages",
        )
    return kinds.pop()


def check_arguments(
    stages: Any, schedule: Any, loss: Any, comm: Communicator, replicas: Communicator | None
) -> list[StageAdapter]:
    """Return this rank's stages; raise ArgumentError or ScheduleError for arguments of Pipeline that are wrong."""
    if not isinstance(schedule, Schedule):
        raise ArgumentError("schedule", found=type(schedule).__name__, expected="a mpipipe.schedules.Schedule")
    if schedule.ranks != comm.size:
        raise ArgumentError(
            "the schedule has another number of ranks than the communicator",
            found=f"{counted(schedule.ranks, 'rank')} in the schedule",
            expected=f"{comm.size}, the size of the communicator",
            remedy="build the schedule for this communicator, or split the communicator with mpipipe.Mesh",
        )
    check_part(schedule, comm.rank)
    numbers = schedule.stages_of(comm.rank)
    if not isinstance(stages, (list, tuple)) or len(stages) != len(numbers):
        count = len(stages) if isinstance(stages, (list, tuple)) else type(stages).__name__
        raise ArgumentError(
            "wrong number of stages on this rank",
            rank=comm.rank,
            found=count,
            expected=f"a list of {len(numbers)}: logical stages {', '.join(map(str, numbers))}",
            remedy="pass one stage for each chunk of this rank",
        )
    adapters = [StageAdapter(stage) for stage in stages]
    ops = {action.op for action in schedule.orders[comm.rank]}
    for number, stage in zip(numbers, adapters):
        try:
            stage.check(ops, replicas is not None and replicas.size > 1)
            _check_skips(schedule, number, stage)
            if not schedule.has_backward(number) and stage.has_parameters:
                raise ArgumentError(
                    "a stage has parameters to train, and the schedule has no backward for it",
                    found=f"trained_from = {schedule.trained_from}",
                    expected="stages before that whose parameters are all frozen",
                    remedy="freeze them: nn.Stage(frozen=['*']), or give schedules.with_frozen the frozen stages",
                )
        except ArgumentError as error:
            error.rank, error.stage = comm.rank, number
            raise
    device_of(adapters)
    if replicas is not None and replicas.size > 1:
        _check_own_gradients(numbers, adapters)
    if loss is not None and not callable(loss):
        raise ArgumentError(
            "loss", found=type(loss).__name__, expected="a function (output, target) -> (value, doutput)"
        )
    return adapters


def _check_own_gradients(numbers: Sequence[int], stages: Sequence[StageAdapter]) -> None:
    """Refuse stages with gradients in one memory: replicas sum those of each stage, one stage after the other."""
    for (number, stage), (other, beside) in combinations(zip(numbers, stages), 2):
        if any(arrays.shares_memory(flat, there) for flat in stage.gradients for there in beside.gradients):
            raise ArgumentError(
                "two stages of a rank have their gradients in the same memory, which replicas would sum twice",
                stage=other,
                found=f"{beside.name} with gradients of stage {number}",
                expected="gradients of its own",
                remedy="give each an array of its own; nn.Stage ties a parameter of several stages (tie=...)",
            )


def _check_skips(schedule: Schedule, number: int, stage: StageAdapter) -> None:
    """Refuse a stage that has skips and takes one tree alone; a class says so by `takes_branches`."""
    own = [skip.name for skip in schedule.skips if number in (skip.source, skip.target)]
    if own and not getattr(stage.given, "takes_branches", True):
        raise ArgumentError(
            "a stage with skips whose forward knows nothing of them",
            found=f"{stage.name} at {', '.join(own)}",
            expected="a stage of your own, which takes or returns mpipipe.Branches",
            remedy="call an nn.Stage in the forward and backward of your own, and list it in inner_stages; give "
            "torch_stage and jax_stage the names of the skips: gives=(...), takes=(...)",
        )
