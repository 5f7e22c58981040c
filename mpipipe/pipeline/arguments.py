"""What a pipeline may be given, checked on each rank before the ranks agree."""

from __future__ import annotations

from mpipipe import arrays
from mpipipe.errors import ArgumentError
from mpipipe.schedules import Schedule, check


def check_present(name, value, wanted, where):
    """Inputs and targets must be there on one rank, and nowhere else."""
    if wanted and value is None:
        raise ArgumentError(f"{name} are missing", found="None", expected=f"{name} on {where}")
    if not wanted and value is not None:
        raise ArgumentError(
            f"{name} on the wrong rank",
            found=type(value).__name__,
            expected=f"None here; {name} only on {where}",
            remedy=f"pass {name}=None on this rank",
        )


def device_of(stages) -> str:
    """Where the stages of this rank compute: "cpu" or "cuda", by their attribute `device`; "cpu" for those without.

    Raises ArgumentError where they differ.
    """
    devices = [getattr(stage, "device", "cpu") for stage in stages]
    kinds = {str(device).partition(":")[0] for device in devices}
    if len(kinds) > 1 or not kinds <= {"cpu", "cuda"}:
        raise ArgumentError(
            "the stages of one rank are on different devices",
            found=devices,
            expected="all 'cpu' or all 'cuda'",
            remedy="build all stages of a rank with the same device",
        )
    numbers = {stage.gpu for stage in stages if getattr(stage, "gpu", None) is not None}
    if numbers and numbers != {arrays.current_gpu()}:
        raise ArgumentError(
            "the stages of a rank are not all on its current GPU",
            found=f"stages on {sorted(numbers)}",
            expected=f"GPU {arrays.current_gpu()} alone",
            remedy="one GPU for each rank: mpipipe.select_device() once, and device='cuda' for all stages",
        )
    return kinds.pop()


def check_arguments(stages, schedule, loss, comm, replicas):
    """Raise ArgumentError or ScheduleError for arguments of Pipeline that are wrong on this rank."""
    if not isinstance(schedule, Schedule):
        raise ArgumentError("schedule", found=type(schedule).__name__, expected="a mpipipe.schedules.Schedule")
    if schedule.ranks != comm.size:
        raise ArgumentError(
            "the schedule has another number of ranks than the communicator",
            found=f"{schedule.ranks} ranks in the schedule",
            expected=f"{comm.size}, the size of the communicator",
            remedy="build the schedule for this communicator, or split the communicator with mpipipe.Mesh",
        )
    check(schedule)
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
    for number, stage in zip(numbers, stages):
        try:
            _check_stage(stage, schedule.splits_backward, replicas)
        except ArgumentError as error:
            error.rank, error.stage = comm.rank, number
            raise
    device_of(stages)
    if loss is not None and not callable(loss):
        raise ArgumentError(
            "loss", found=type(loss).__name__, expected="a function (output, target) -> (value, doutput)"
        )


def _check_stage(stage, splits_backward, replicas):
    needed = ["forward", "backward_input", "backward_weight"] if splits_backward else ["forward", "backward"]
    missing = [name for name in needed if not callable(getattr(stage, name, None))]
    if missing:
        raise ArgumentError(
            "a stage lacks methods that the schedule needs",
            found=f"{type(stage).__name__} without {', '.join(missing)}",
            expected=", ".join(needed),
        )
    gradients = getattr(stage, "gradients", None)
    if gradients is not None and not _is_flat(getattr(gradients, "flat", None)):
        raise ArgumentError(
            "the gradients of a stage",
            found=f"{type(gradients).__name__} without a one-dimensional contiguous array `flat`",
            expected="an object with `flat`, or None for a stage without parameters",
        )
    if replicas is not None and replicas.size > 1 and not hasattr(stage, "gradients"):
        raise ArgumentError(
            "a stage whose gradients cannot be summed over the replicas",
            found=f"{type(stage).__name__} without the attribute `gradients`",
            expected="an object with one contiguous array `flat` of all gradients, or None where there are none",
        )


def _is_flat(flat):
    return arrays.is_array(flat) and flat.ndim == 1 and flat.flags.c_contiguous
