"""What a pipeline may be given, checked on each rank before the ranks agree."""

from __future__ import annotations

from mpipipe.errors import ArgumentError
from mpipipe.schedules import Schedule, check


def check_present(name, value, wanted, where):
    if wanted and value is None:
        raise ArgumentError(f"{name} are missing", found="None", expected=f"{name} on {where}")
    if not wanted and value is not None:
        raise ArgumentError(
            f"{name} on the wrong rank", found=type(value).__name__, expected=f"None here; {name} only on {where}",
            remedy=f"pass {name}=None on this rank",
        )


def check_arguments(stages, schedule, loss, comm):
    if not isinstance(schedule, Schedule):
        raise ArgumentError("schedule", found=type(schedule).__name__, expected="a mpipipe.schedules.Schedule")
    if schedule.ranks != comm.size:
        raise ArgumentError(
            "the schedule has another number of ranks than the communicator",
            found=f"{schedule.ranks} ranks in the schedule", expected=f"{comm.size}, the size of the communicator",
            remedy="build the schedule for this communicator, or split the communicator with mpipipe.Mesh",
        )
    check(schedule)
    numbers = schedule.stages_of(comm.rank)
    if not isinstance(stages, (list, tuple)) or len(stages) != len(numbers):
        count = len(stages) if isinstance(stages, (list, tuple)) else type(stages).__name__
        raise ArgumentError(
            "wrong number of stages on this rank", rank=comm.rank, found=count,
            expected=f"a list of {len(numbers)}: logical stages {', '.join(map(str, numbers))}",
            remedy="pass one stage for each chunk of this rank",
        )
    needed = ["forward", "backward"] if not schedule.splits_backward else ["forward", "backward_input", "backward_weight"]
    for number, stage in zip(numbers, stages):
        missing = [name for name in needed if not callable(getattr(stage, name, None))]
        if missing:
            raise ArgumentError(
                "a stage lacks methods that the schedule needs", rank=comm.rank, stage=number,
                found=f"{type(stage).__name__} without {', '.join(missing)}", expected=", ".join(needed),
            )
    if loss is not None and not callable(loss):
        raise ArgumentError("loss", found=type(loss).__name__, expected="a function (output, target) -> (value, doutput)")


def describe(facts):
    fingerprint, microbatches, recompute, name = facts
    return f"{name}, {microbatches} micro-batches, recompute {recompute}, fingerprint {fingerprint:x}"
