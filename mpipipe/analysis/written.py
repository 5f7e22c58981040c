"""A trace that was written, read again: what pictures of it need."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median_low
from typing import Any

from mpipipe import files
from mpipipe.analysis.records import action_of
from mpipipe.errors import ArgumentError
from mpipipe.schedules import TIMES, Action, Costs, Schedule, check, from_csv, with_skips

SUMMARY, EVENTS = "summary.json", "trace.json"
MOST_BYTES = 1 << 30  # of a file
MICRO = 1e6  # times of events are in microseconds
Span = tuple[Action, float, float]  # with its start and end, in seconds


@dataclass(frozen=True)
class WrittenTrace:
    """What the folder of a trace says; `read_trace` reads it.

    Attributes
    ----------
    schedule : Schedule
        The schedule of the recorded steps.
    costs : schedules.Costs
        The measured costs, in seconds.
    parts : mapping of int to mapping of str to float
        For each rank the seconds of each part of the mean step.
    parts_of_steps : mapping of int to sequence of mappings
        The same for each recorded step.
    places : mapping of int to pair of int
        For each rank the number of its replica, and its rank in the pipeline of that replica.
    actions : mapping of int to sequence of sequences
        For each rank, for each step, what it computed: (action, start, end), in seconds on one clock.
    """

    schedule: Schedule
    costs: Costs
    parts: Mapping[int, Mapping[str, float]]
    parts_of_steps: Mapping[int, Sequence[Mapping[str, float]]]
    places: Mapping[int, tuple[int, int]]
    actions: Mapping[int, Sequence[Sequence[Span]]]

    @property
    def steps(self) -> int:
        """Number of steps."""
        return len(next(iter(self.parts_of_steps.values())))

    def middle_step(self) -> int:
        """Return the number of the step of median time on the first rank."""
        times = [sum(parts.values()) for parts in next(iter(self.parts_of_steps.values()))]
        return times.index(median_low(times))

    def pipeline(self, step: int, replica: int = 0) -> list[Sequence[Span]]:
        """Look at one step of the pipeline of one replica. Raises ArgumentError if there is no such step or replica.

        Returns
        -------
        list
            For each rank of the pipeline what it computed.
        """
        number_in("step", step, self.steps)
        number_in("replica", replica, 1 + max(number for number, _ in self.places.values()))
        ranks = sorted((place, rank) for rank, (number, place) in self.places.items() if number == replica)
        return [self.actions[rank][step] for _, rank in ranks]


def number_in(name: str, value: int, count: int) -> None:
    """Raise ArgumentError unless `value` is one of the numbers from 0 to `count` - 1."""
    if not 0 <= value < count:
        raise ArgumentError(f"the trace has no such {name}", found=f"{name} {value}", expected=f"0 to {count - 1}")


def facts(schedule: Schedule, costs: Costs, places: Mapping[int, tuple[int, int]]) -> dict[str, Any]:
    """Return what a summary has to say besides its parts, as plain values."""
    return {
        "order": schedule.to_csv(),
        "trained_from": schedule.trained_from,
        "skips": {name: [ends for other, *ends in schedule.skips if other == name] for name, _, _ in schedule.skips},
        "costs": asdict(costs),
        "places": {rank: list(place) for rank, place in places.items()},
    }


def read_trace(folder: str | Path) -> WrittenTrace:
    """Read what `Trace.write` and `train --trace DIR` have written: summary.json and trace.json of a folder.

    Raises ArgumentError where there is no such folder, or its files are not those of a trace.

    Examples
    --------
    >>> from mpipipe import analysis
    >>> trace = analysis.read_trace("runs/trace")  # doctest: +SKIP
    >>> trace.steps, sorted(trace.parts)  # doctest: +SKIP
    (16, [0, 1])
    """
    folder = Path(folder)
    summary, events = (_json(folder / name) for name in (SUMMARY, EVENTS))
    place = folder / SUMMARY
    try:
        read = from_csv(summary["order"])
        named = replace(read, name=str(summary["schedule"]), trained_from=summary["trained_from"])
        schedule = with_skips(named, summary.get("skips", {}))
        check(schedule)
        costs = Costs(**summary["costs"])
        for name in TIMES:
            costs.per_stage(name, schedule.stages)
        costs.per_slice(schedule.slices)
        parts = {int(rank): _seconds(of_rank) for rank, of_rank in summary["parts"].items()}
        of_steps = {int(rank): [_seconds(each) for each in steps] for rank, steps in summary["parts_of_steps"].items()}
        places = {int(rank): (int(replica), int(place)) for rank, (replica, place) in summary["places"].items()}
        counts = {len(steps) for steps in of_steps.values()}
        if not parts or not set(parts) == set(of_steps) == set(places) or len(counts) != 1 or 0 in counts:
            raise ValueError("ranks or steps are missing")
        place = folder / EVENTS
        return WrittenTrace(
            schedule, costs, parts, of_steps, places, _actions(events, places, counts.pop(), schedule.slices)
        )
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise ArgumentError(
            f"the folder holds no trace: {type(error).__name__}: {error}",
            found=str(place),
            expected="what `train --trace DIR` of this version writes",
        ) from error


def _json(path: Path) -> Any:
    expected = f"a folder with {SUMMARY} and {EVENTS}, as `train --trace DIR` writes it"
    with files.reading("a file of the trace", path, expected=expected, also=(ValueError, RecursionError)):
        return json.loads(files.read_text(path, MOST_BYTES))


def _seconds(parts: Mapping[str, Any]) -> dict[str, float]:
    return {part: float(seconds) for part, seconds in parts.items()}


def _actions(
    events: Sequence[Mapping[str, Any]], places: Mapping[int, object], steps: int, slices: int
) -> dict[int, list[list[Span]]]:
    """Take the measured actions out of the events for Perfetto."""
    found: dict[int, list[list[Span]]] = {rank: [[] for _ in range(steps)] for rank in places}
    for event in events:
        if event["ph"] == "X" and event["tid"] == 0 and event["cat"] == "compute":
            action = action_of(event["name"], slices)
            if action is not None:
                start, lasted = float(event["ts"]) / MICRO, float(event["dur"]) / MICRO
                found[event["pid"]][event["args"]["step"]].append((action, start, start + lasted))
    return found
