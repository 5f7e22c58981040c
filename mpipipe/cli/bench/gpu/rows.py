"""A number that was measured, beside its peer: as a table for people, and as JSON for programs."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from typing import TextIO

from mpipipe.text_table import text_table


@dataclass(frozen=True)
class Row:
    """One measurement: a rate or a share, of which more is better unless `goal` says otherwise.

    Attributes
    ----------
    what : what was measured, with its sizes
    value, unit : measured here, now
    peer, peer_value : what the value is compared with, in the same unit; a published number says so in its name
    goal : for the ratio to the peer, or for the value where there is no peer
    """

    what: str
    value: float
    unit: str
    peer: str = ""
    peer_value: float | None = None
    goal: str = ""

    @property
    def ratio(self) -> float | None:
        """The value over that of the peer, None without a peer."""
        return None if self.peer_value is None else self.value / self.peer_value

    def facts(self) -> dict[str, str | float | None]:
        """Return all fields and the ratio, for JSON."""
        return {**asdict(self), "ratio": self.ratio}

    def __str__(self) -> str:
        beside = "" if self.ratio is None else f"; {self.peer} {self.peer_value:.4g}, ratio {self.ratio:.3f}"
        return f"{self.what}: {self.value:.4g} {self.unit}".rstrip() + beside + (f" ({self.goal})" if self.goal else "")


def show(title: str, rows: list[Row], notes: list[str], stream: TextIO | None = None) -> None:
    """Print the rows as a table, and below it a line for each note."""
    heads = ("measured", "value", "beside", "value", "ratio", "goal")
    cells = [
        (
            row.what,
            f"{row.value:.4g} {row.unit}",
            row.peer,
            "" if row.peer_value is None else f"{row.peer_value:.4g}",
            "" if row.ratio is None else f"{row.ratio:.3f}",
            row.goal,
        )
        for row in rows
    ]
    print(title, *text_table(heads, cells, left=(0, 2, 5)), *notes, sep="\n", file=stream or sys.stdout)
