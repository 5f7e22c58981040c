"""What checkpoints ask of stages and optimizers besides arrays; those of a user's own may leave each of it out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from mpipipe.arrays import Array

Announcements: TypeAlias = "list[Callable[[], object]]"  # called before anything is written to the arrays


def announcements_of(thing: Any) -> Announcements | None:
    """Return the list `before_write` of a stage or an optimizer; None if it does not tell of its writes."""
    found: Announcements | None = getattr(thing, "before_write", None)
    return found


def updates_all(optimizer: Any, stages: Sequence[Any]) -> bool:
    """Return whether all stages with something to train are those of the optimizer, as far as that says which it has.

    Others are stepped by somebody else: an optimizer of PyTorch, for example, which announces nothing.
    """
    known = getattr(optimizer, "stages", None)
    trained = [stage for stage in stages if getattr(stage, "gradients", None) is not None]
    rest = [stage for stage in trained if known is not None and not any(stage is each for each in known)]
    return not any(stage.gradients.flat.size for stage in rest)


def announced_by(stages: Sequence[Any], optimizer: Any) -> tuple[list[Announcements], bool]:
    """Return the lists of all that tell of their writes, and whether no write goes untold."""
    lists = [announcements_of(each) for each in (*stages, *([] if optimizer is None else [optimizer]))]
    known = [each for each in lists if each is not None]
    return known, optimizer is not None and len(known) == len(lists) and updates_all(optimizer, stages)


def arrays_of(stage: Any) -> Mapping[str, Array]:
    """Return what a checkpoint holds of a stage, by name: its `state_dict()` if it has one, else `parameters`."""
    give = getattr(stage, "state_dict", None)
    found: Mapping[str, Array] = stage.parameters if give is None else give()
    return found


def set_arrays(stage: Any, values: Callable[[str], Array]) -> None:
    """Let a stage with `load_state_dict` take the values by name; those of any other stage have been set in place."""
    take = getattr(stage, "load_state_dict", None)
    if take is not None:
        own = arrays_of(stage)  # complex ones were read as pairs of real ones
        take({name: values(name).view(array.dtype).reshape(array.shape) for name, array in own.items()})


def ties_of(stage: Any) -> Mapping[str, Sequence[str]]:
    """Return the names of the parameters that a stage shares, by the key of what is shared; none if it has none."""
    found: Mapping[str, Sequence[str]] = getattr(stage, "ties", {})
    return found


def renew_compute(stage: Any) -> None:
    """Let a stage renew the copy of its parameters that it computes with, where it has one."""
    renew = getattr(stage, "renew_compute", None)
    if renew is not None:
        renew()
