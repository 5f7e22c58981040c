"""The classic schedules: gpipe, one_f_one_b, interleaved_1f1b, looped_bfs, forward_only.

Stages loop over the ranks: chunk v of rank r is the logical stage r + v * ranks. In every schedule
the backwards of a stage come in ascending order of the micro-batches, except for gpipe with
backward="lifo". So all schedules add up the same gradients in the same order, to the last bit.

In the pictures time runs to the right. A forward takes one cell, a backward two, and dots are idle
time. F0 is the forward of micro-batch 0; small letters are a rank's second chunk. The bubble is the
idle time of a rank. It is given in f and b, the times of the forward and of the full backward of
one chunk. P is `ranks`, V `chunks` and M `microbatches`; a count below 1 raises ArgumentError. With
`slices` n above 1 each micro-batch passes as n slices of its sequences (see slices.py), M n units
in all: f and b are those of a slice, M n stands for M in the formulas, and a rank with one stage
holds n - 1 units more where it does not hold all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from mpipipe.errors import ArgumentError
from mpipipe.even_split import even_split
from mpipipe.schedules.action import BACKWARD, FORWARD, Action
from mpipipe.schedules.checks import sizes
from mpipipe.schedules.schedule import Schedule, looped_placement
from mpipipe.schedules.slices import backward_unit, in_slices


#     rank 0  F0 F1 F2 F3 .  .  .  .  .  .  B0--- B1--- B2--- B3---
#     rank 1  .  F0 F1 F2 F3 .  .  .  B0--- B1--- B2--- B3--- .  .
#     rank 2  .  .  F0 F1 F2 F3 B0--- B1--- B2--- B3--- .  .  .  .
def gpipe(ranks: int, microbatches: int, backward: str = "fifo", *, slices: int = 1) -> Schedule:
    """Build GPipe: all forwards, then all backwards.

    Bubble (P-1)(f+b); every rank holds M activations.
    Source: Huang et al. 2019, arXiv:1811.06965.

    Parameters
    ----------
    ranks, microbatches : int
    backward : {"fifo", "lifo"}, optional
        "lifo" takes the last micro-batch first, as reverse differentiation does, and so sums
        gradients in reverse.
    slices : int, optional

    Examples
    --------
    >>> from mpipipe import schedules
    >>> print(schedules.gpipe(2, 2).to_csv(), end="")
    0F0,0F1,0B0,0B1
    1F0,1F1,1B0,1B1
    """
    if backward not in ("fifo", "lifo"):
        raise ArgumentError(
            "unknown order of backwards",
            found=f"backward={backward!r}",
            expected="'fifo' or 'lifo'",
        )

    def order(line: Line) -> list[Action]:
        units: Iterable[int] = range(line.units)
        forwards = actions_of(line.rank, FORWARD, units)
        if backward == "lifo":
            # `in_slices` turns the slices of each sequence around.
            units = [backward_unit(number, line.slices) for number in reversed(range(line.units))]
        return forwards + actions_of(line.rank, BACKWARD, units)

    return looped("gpipe", ranks, 1, microbatches, order, slices=slices)


#     rank 0  F0 F1 F2 .  .  .  .  B0--- F3 B1--- F4 B2--- .  B3--- .  B4---
#     rank 1  .  F0 F1 .  .  B0--- F2 B1--- F3 B2--- F4 B3--- .  B4--- .  .
#     rank 2  .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- F4 B4--- .  .  .  .
def one_f_one_b(ranks: int, microbatches: int, *, slices: int = 1) -> Schedule:
    """Build 1F1B: as soon as the first micro-batch is back, one forward and one backward in turn.

    Bubble (P-1)(f+b) as GPipe's, but rank r holds only min(M, P-r) activations. M may be below P.
    With slices it is Seq1F1B: rank r holds min(Mn, P-r+n-1) units, so rank 0 at most 1 + (P-1)/n
    sequences. Source: Narayanan et al. 2019 (PipeDream), arXiv:1806.03377; synchronous form: Fan et
    al. 2021 (DAPPLE), arXiv:2007.01045; slices: Sun et al. 2024, arXiv:2406.03488.

    Parameters
    ----------
    ranks, microbatches, slices : int

    Examples
    --------
    >>> from mpipipe import schedules
    >>> print(schedules.one_f_one_b(2, 3).to_csv(), end="")
    0F0,0F1,0B0,0F2,0B1,0B2
    1F0,1B0,1F1,1B1,1F2,1B2
    """

    def order(line: Line) -> list[Action]:
        ranks, _, units, rank, _ = line
        warm_up = min(ranks - 1 - rank, units)
        actions = []
        for unit in range(warm_up):
            actions.append(Action(rank, FORWARD, unit))
        # The steady state: one forward and one backward in turn.
        for unit in range(warm_up, units):
            actions.append(Action(rank, FORWARD, unit))
            actions.append(Action(rank, BACKWARD, unit - warm_up))
        # The cool-down: the backwards that are left.
        for unit in range(units - warm_up, units):
            actions.append(Action(rank, BACKWARD, unit))
        return actions

    return looped("one_f_one_b", ranks, 1, microbatches, order, slices=slices)


#     rank 0  F0 F1 f0 f1 F2 .  b0--- F3 b1--- f2 B0--- f3 B1--- .  b2--- .  b3--- B2--- B3---
#     rank 1  .  F0 F1 f0 b0--- f1 b1--- F2 B0--- F3 B1--- f2 b2--- f3 b3--- B2--- B3--- .  .
def interleaved_1f1b(ranks: int, chunks: int, microbatches: int, *, slices: int = 1) -> Schedule:
    """Build interleaved 1F1B: a group of micro-batches passes one chunk of a rank at a time.

    Bubble (P-1)(f+b), where f and b are those of a chunk: 1/V of 1F1B's. With g the size of the
    first group, rank r holds min(MV, (V-1)g + 2(P-1-r) + 1) chunk activations. Source: Narayanan et
    al. 2021, arXiv:2104.04473. For M % P == 0 the order is that of Megatron-LM.

    Parameters
    ----------
    ranks, chunks, microbatches, slices : int
        M is free: the groups are an even split, the bigger ones first. This keeps the bubble ideal
        for all M >= P and excludes deadlock; a short last group would not.

    Examples
    --------
    >>> from mpipipe import schedules
    >>> print(schedules.interleaved_1f1b(2, 2, 2).to_csv(), end="")
    0F0,0F1,2F0,2F1,2B0,2B1,0B0,0B1
    1F0,1F1,3F0,3B0,3F1,3B1,1B0,1B1
    """

    def order(line: Line) -> list[Action]:
        forwards = line.in_groups(FORWARD)
        backwards = line.in_groups(BACKWARD)
        warm_up = line.forwards_ahead(step=2)
        actions = forwards[:warm_up]
        for forward, backward in zip(forwards[warm_up:], backwards):
            actions += [forward, backward]
        actions += backwards[len(forwards) - warm_up :]
        return actions

    return looped("interleaved_1f1b", ranks, chunks, microbatches, order, slices=slices)


#     rank 0  F0 F1 F2 F3 f0 f1 f2 f3 .  .  .  b0--- b1--- b2--- b3--- B0--- B1--- B2--- B3---
#     rank 1  .  F0 F1 F2 F3 f0 f1 f2 f3 b0--- b1--- b2--- b3--- B0--- B1--- B2--- B3--- .  .
def looped_bfs(ranks: int, chunks: int, microbatches: int, *, slices: int = 1) -> Schedule:
    """Build the breadth-first schedule: a chunk takes all micro-batches before the next begins.

    The gradients of a chunk are complete early, which leaves time to communicate them.
    Source: Lamy-Poirier 2023, arXiv:2211.05953.

    Parameters
    ----------
    ranks, chunks, microbatches, slices : int
        For M >= P the bubble is (P-1)(f+b) of a chunk, as interleaved 1F1B's, but every rank holds
        all MV activations.
    """

    def order(line: Line) -> list[Action]:
        actions = []
        for stage in line.stages:
            actions += actions_of(stage, FORWARD, range(line.units))
        for stage in reversed(line.stages):
            actions += actions_of(stage, BACKWARD, range(line.units))
        return actions

    return looped("looped_bfs", ranks, chunks, microbatches, order, slices=slices)


#     rank 0  F0 F1 f0 f1 F2 F3 f2 f3 .
#     rank 1  .  F0 F1 f0 f1 F2 F3 f2 f3
def forward_only(ranks: int, chunks: int, microbatches: int, *, slices: int = 1) -> Schedule:
    """Build a schedule for inference: forwards only, in the order of interleaved 1F1B.

    Parameters
    ----------
    ranks, chunks, microbatches, slices : int
        For M >= P the bubble is (P-1)f of a chunk.
    """

    def order(line: Line) -> list[Action]:
        return line.in_groups(FORWARD)

    return looped("forward_only", ranks, chunks, microbatches, order, slices=slices)


# -- What schedules have in common whose stages loop over the ranks --------------------------------


class Line(NamedTuple):
    """One rank of a schedule, all of whose stages run all units."""

    ranks: int
    chunks: int
    units: int
    rank: int
    slices: int

    @property
    def stages(self) -> range:
        """The stages of the rank."""
        return range(self.rank, self.chunks * self.ranks, self.ranks)

    @property
    def groups(self) -> list[range]:
        """The units, cut evenly into groups of at least as many as there are ranks, if they can."""
        return even_split(self.units, max(1, self.units // self.ranks))

    def in_groups(self, op: str) -> list[Action]:
        """List all of one op: a group of units passes all chunks, then the next group does.

        Backwards pass the chunks from the last to the first.
        """
        stages = self.stages
        if op != FORWARD:
            stages = stages[::-1]
        actions = []
        for group in self.groups:
            for stage in stages:
                actions += actions_of(stage, op, group)
        return actions

    def forwards_ahead(self, step: int) -> int:
        """Count the forwards before the first backward: `step` fewer from rank to rank."""
        ahead = (self.chunks - 1) * len(self.groups[0]) + step * (self.ranks - 1 - self.rank)
        return min(ahead, self.chunks * self.units)


def actions_of(stage: int, op: str, units: Iterable[int]) -> list[Action]:
    """List one action of a stage for each unit."""
    return [Action(stage, op, unit) for unit in units]


def looped(
    name: str,
    ranks: int,
    chunks: int,
    microbatches: int,
    order: Callable[[Line], list[Action]],
    *,
    slices: int,
) -> Schedule:
    """Build a schedule from `order`, which gives the actions of a rank."""
    ranks, chunks, microbatches, slices = sizes(
        ranks=ranks, chunks=chunks, microbatches=microbatches, slices=slices
    )
    units = microbatches * slices
    orders = [tuple(order(Line(ranks, chunks, units, rank, slices))) for rank in range(ranks)]
    return in_slices(Schedule(name, looped_placement(ranks, chunks), units, orders), slices)
