"""Trace: what all ranks did in some steps, where their time went, and how to look at it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path

from mpipipe import files
from mpipipe.errors import ArgumentError
from mpipipe.options import Values
from mpipipe.schedules import Costs, Schedule, simulate
from mpipipe.text import counted
from mpipipe.tracing import efficiency, perfetto
from mpipipe.tracing.efficiency import Efficiencies, mean_parts
from mpipipe.tracing.records import RankRecord, on_one_clock
from mpipipe.tracing.segments import measured_costs, parts_of_steps, segments

SUMMARY = "summary.json"
EVENTS = "trace.json"


class Trace:
    """What all ranks did in some steps; `recording` makes one.

    Parameters
    ----------
    schedule : Schedule
        Of the pipeline.
    records : sequence of RankRecord
        What each rank did, by its own clock; at least one step.

    Attributes
    ----------
    schedule : Schedule
        The same.
    records : list of RankRecord
        The records by the clock of rank 0.
    costs : schedules.Costs
        Mean costs of each stage in the recorded steps, and median times of messages: what
        `schedules.simulate` takes.

    Raises
    ------
    ArgumentError
        There is no step that all ranks have recorded, or the records are not those of whole
        pipelines.
    """

    def __init__(self, schedule: Schedule, records: Sequence[RankRecord]) -> None:
        check_places([(record.replica, record.position) for record in records], schedule.ranks)
        steps = min(len(record.steps) for record in records)
        if steps == 0:
            raise ArgumentError(
                "there is no step that all ranks have recorded",
                found="none on one of them",
                expected="at least one training step",
            )
        self.schedule = schedule
        same_steps = []
        for record in records:
            same_steps.append(record._replace(steps=record.steps[:steps]))
        self.records = on_one_clock(same_steps)
        self.costs: Costs = measured_costs(self.records, schedule.stages, schedule.slices)
        self._pieces = segments(self.records)
        self._parts = parts_of_steps(self.records, self._pieces, schedule, self.costs)

    def parts(self) -> dict[int, dict[str, float]]:
        """Divide the time of the mean step.

        Returns
        -------
        dict
            For each rank the seconds of each part, which add up to the time of the mean step:
            compute, bubble, imbalance, late sender, transfer, sums, optimizer, overhead, reading.
        """
        return {rank: mean_parts(steps) for rank, steps in self.parts_of_steps().items()}

    def parts_of_steps(self) -> dict[int, list[dict[str, float]]]:
        """Divide the time of each step.

        Returns
        -------
        dict
            For each rank a list of the seconds of each part, by step.
        """
        return {record.rank: steps for record, steps in zip(self.records, self._parts)}

    def efficiencies(self) -> Efficiencies:
        """Compute the efficiencies of the POP project.

        parallel = load_balance * serialisation * transfer.
        """
        return efficiency.efficiencies(self.parts())

    def advice(self) -> str:
        """Say in one sentence what to change first."""
        return efficiency.advice(self.parts(), self.schedule, self.costs)

    def table(self) -> str:
        """Draw a table of the parts, with efficiencies and advice below it."""
        found = self.efficiencies()
        below = (
            f"parallel efficiency {found.parallel:.3f} = load balance {found.load_balance:.3f} x "
            f"serialisation {found.serialisation:.3f} x transfer {found.transfer:.3f}"
        )
        return "\n".join([efficiency.table(self.parts()), below, self.advice()])

    def events(self) -> list[Values]:
        """Turn the trace into events for Perfetto, with predicted spans next to the measured ones.

        Returns
        -------
        list of dict
            ``json.dumps`` of it is what they read.
        """
        return perfetto.events(self.records, self._pieces, simulate(self.schedule, self.costs))

    def summary(self) -> Values:
        """Put the results together as plain values.

        Returns
        -------
        dict
            schedule, steps, parts, parts of each step, efficiencies, advice and costs.
        """
        return {
            "schedule": self.schedule.name,
            "steps": len(self.records[0].steps),
            "parts": self.parts(),
            "parts_of_steps": self.parts_of_steps(),
            "efficiencies": self.efficiencies()._asdict(),
            "advice": self.advice(),
            "costs": asdict(self.costs),
        }

    def write(self, folder: str | Path) -> None:
        """Write the trace into a new folder.

        summary.json has what `summary` gives, and trace.json is for Perfetto. Raises ArgumentError
        where the folder exists, and OSError.
        """
        check_new(folder)
        folder = Path(folder)
        folder.mkdir(parents=True)
        (folder / SUMMARY).write_text(json.dumps(self.summary(), indent=1) + "\n")
        (folder / EVENTS).write_text(json.dumps(self.events()))


def check_places(places: Sequence[tuple[int, int]], ranks: int) -> None:
    """Raise ArgumentError unless these are all ranks of some pipelines, each once.

    A place is (replica, rank in its pipeline).
    """
    replicas = sorted({replica for replica, _ in places})
    if sorted(places) != list(product(replicas, range(ranks))):
        raise ArgumentError(
            "the recorded ranks are not those of whole pipelines",
            found=f"{counted(len(places), 'rank')} of {counted(len(replicas), 'pipeline')}",
            expected=f"each of the {ranks} ranks of every pipeline once",
            remedy="hand in the communicator of one pipeline, or of all replicas of pipelines that "
            "were made with replicas=",
        )


def check_new(folder: str | Path) -> None:
    """Raise ArgumentError for a folder that exists: no trace overwrites another."""
    if files.exists(folder) or Path(folder).is_symlink():
        raise ArgumentError(
            "the folder for a trace exists",
            found=str(folder),
            expected="the name of a new folder",
            remedy="choose another one, or move the old trace away",
        )
