"""Skips: data that a stage hands to a later one past those between, as the two arms of a U-Net do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from keyword import iskeyword
from typing import TYPE_CHECKING, Any, NamedTuple

from mpipipe.errors import ScheduleError

if TYPE_CHECKING:
    from mpipipe.schedules.schedule import Schedule


class Skip(NamedTuple):
    """An edge between two stages that do not follow each other.

    Attributes
    ----------
    name : str
        What the stages at both ends call it.
    source, target : int
        The stage that gives, and the stage that takes, at least two stages later.
    """

    name: str
    source: int
    target: int


#     stage    0     1     2     3
#     F        F --> F --> F --> F
#               \______________/      "residual": (0, 3); its gradient comes back the same way
def with_skips(schedule: Schedule, skips: Mapping[str, tuple[int, int]]) -> Schedule:
    """Give a schedule the skips of a model, in place of those that it has; its orders stay.

    Parameters
    ----------
    schedule : Schedule
        A schedule of any kind.
    skips : mapping of str to (int, int)
        For each name, an identifier of Python, the stage that gives and the later stage that takes. A stage may give
        and take several; two stages may have several. What a stage gives to the next one needs no skip: it returns a
        tuple or a dict.

    Returns
    -------
    Schedule
        The same orders with these skips, sorted by name. It is another schedule: its `fingerprint` differs. `to_csv`
        has the orders alone. `simulate` counts no time for skips, since they are sent some stages before they are
        needed, and `peak_memory` no bytes: add what they hold to `activation` of the stages at both ends.

    Raises
    ------
    ScheduleError
        A name is no identifier, there is no such stage, or a skip leads back, or to the next stage.

    Examples
    --------
    >>> from mpipipe import schedules
    >>> schedule = schedules.with_skips(schedules.one_f_one_b(4, 8), {"residual": (0, 3)})
    >>> schedule.skips
    (Skip(name='residual', source=0, target=3),)
    """
    if not isinstance(skips, Mapping):
        raise ScheduleError(
            "skips are not a mapping", found=type(skips).__name__, expected="a dict as in {'residual': (0, 3)}"
        )
    found = []
    for name, ends in skips.items():
        if not isinstance(ends, (tuple, list)) or len(ends) != 2:
            raise ScheduleError(f"skip {name!r} has no two ends", found=repr(ends), expected="(source, target)")
        found.append(Skip(name, *ends))
    check_skips(found, schedule.stages)
    return replace(schedule, skips=tuple(sorted(found)))


def check_skips(skips: Any, stages: int) -> None:
    """Raise ScheduleError if skips do not fit a chain of so many stages."""
    met = set()
    for skip in skips:
        if type(skip) is not Skip:
            raise ScheduleError("not a skip", found=repr(skip), expected="Skip(name, source, target)")
        name, source, target = skip
        if not isinstance(name, str) or not name.isidentifier() or iskeyword(name):
            raise ScheduleError("the name of a skip", found=repr(name), expected="an identifier, as in 'residual'")
        if name in met:
            raise ScheduleError(
                f"two skips are called {name!r}",
                found=", ".join(str((each.source, each.target)) for each in skips if each.name == name),
                expected="a name for each",
            )
        met.add(name)
        for end in (source, target):
            if type(end) is not int or not 0 <= end < stages:
                raise ScheduleError(
                    f"skip {name!r}: there is no stage {end!r}",
                    found=str((source, target)),
                    expected=f"stages from 0 to {stages - 1}",
                )
        if target < source + 2:
            raise ScheduleError(
                f"skip {name!r} does not lead past a stage",
                stage=source,
                found=str((source, target)),
                expected=f"a stage after {source + 1}",
                remedy="to the next stage: return a tuple or dict of arrays; to an earlier one: there is no way",
            )
