"""How much a rank holds for its backwards, action by action; independent of costs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from mpipipe.errors import ArgumentError
from mpipipe.schedules.action import BACKWARD, FORWARD, INPUT_GRAD, RECOMPUTE, WEIGHT_GRAD, Action
from mpipipe.schedules.schedule import Schedule, one_per_stage


def peak_of(schedule: Schedule, order: Sequence[Action]) -> int:
    """Count the chunk activations that an order holds at once, at most."""
    if schedule.forwards_only:
        return 0
    trained_from = schedule.trained_from
    recomputed = {(stage, microbatch) for stage, op, microbatch in order if op == RECOMPUTE}
    alive = peak = 0
    for stage, op, microbatch in order:
        if op == FORWARD:
            alive += stage >= trained_from and (stage, microbatch) not in recomputed
            peak = max(peak, alive)
        elif op == RECOMPUTE:
            alive += 1
            peak = max(peak, alive)
        elif op != INPUT_GRAD:
            alive -= 1
    return peak


#     F        whole activation          without an R it stays until B or W
#     F R B    whole | input | whole     an F makes all of it, and drops all but the input where an R follows
def peak_memory(
    schedule: Schedule, activation: float | Sequence[float] = 1.0, kept_input: float | Sequence[float] = 0.0
) -> list[float]:
    """Sum up for each rank what its order holds at once for backwards, at most.

    Where an R follows, F leaves the input of the stage alone, and R brings the activation back. While such an F runs,
    its whole activation is there.

    Parameters
    ----------
    schedule : Schedule
        One that `check` accepts.
    activation : float or sequence of float, optional
        What a forward leaves for its backward, its input included: bytes, or any other unit; one number, or one per
        stage.
    kept_input : float or sequence of float, optional
        What is left of that where the forward is run again: the input of the stage.

    Returns
    -------
    list of float
        The peak of each rank, in that unit. By default activations: those that `Timeline.peak_activations` counts, and
        the one of each F in passing. A schedule of forwards only holds nothing.

    Raises
    ------
    ArgumentError
        A size is negative, not finite, or not one per stage; or an input is larger than its activation.

    Examples
    --------
    >>> from mpipipe import schedules
    >>> schedule = schedules.one_f_one_b(4, 8)
    >>> schedules.peak_memory(schedule, activation=10, kept_input=1)
    [40.0, 30.0, 20.0, 10.0]
    >>> schedules.peak_memory(schedules.with_recompute(schedule), activation=10, kept_input=1)
    [13.0, 12.0, 11.0, 10.0]
    """
    whole, kept = sizes_per_stage(schedule, activation, kept_input)
    if schedule.forwards_only:
        return [0.0] * schedule.ranks
    return [max(held(schedule, order, whole, kept)) for order in schedule.orders]


def sizes_per_stage(
    schedule: Schedule, activation: float | Sequence[float], kept_input: float | Sequence[float]
) -> tuple[list[float], list[float]]:
    """Return (size of an activation, size of its input) of each stage."""
    whole = one_per_stage("the size of an activation", "activation", activation, schedule.stages)
    kept = one_per_stage("the size of an input", "kept_input", kept_input, schedule.stages)
    for stage, (size, part) in enumerate(zip(whole, kept)):
        if part > size:
            raise ArgumentError(
                "the input of a stage is part of its activation",
                stage=stage,
                found=f"kept_input={part:g}, activation={size:g}",
                expected="an input that is not larger than its activation",
            )
    return whole, kept


def held(schedule: Schedule, order: Iterable[Action], whole: Sequence[float], kept: Sequence[float]) -> Iterator[float]:
    """Yield what a rank holds during each action of its order."""
    now = 0.0
    for stage, op, microbatch in order:
        if op == FORWARD and schedule.has_backward(stage):
            again = (stage, microbatch) in schedule.recomputed
            yield now + whole[stage]
            now += kept[stage] if again else whole[stage]
            continue
        if op == RECOMPUTE:
            now += whole[stage] - kept[stage]
        yield now
        if op in (BACKWARD, WEIGHT_GRAD):
            now -= whole[stage]
