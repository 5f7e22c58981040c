"""Time, bubble and memory of schedules that are too large to simulate: found in smaller ones, by the part that repeats.

    ranks x micro-batches   4 x 2   6 x 3     8 x 4   10 x 5     16 x 8   18 x 9    ...    16384 x 8192
    makespan of 1F1B         15      24        33       42         69       78                73725
    of one step more             +9                +9                  +9

Sizes of a schedule form a line: its ranks and micro-batches grow by the same factor, or its micro-batches alone. The
search simulates pairs of neighbours on that line, each pair about twice as large as the pair before. A pair gives a
straight line through its makespans, and another through its peaks. Once four pairs in a row give the same lines, the
whole schedule is taken to lie on them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Real
from typing import NamedTuple

from mpipipe.errors import ArgumentError
from mpipipe.schedules.checks import counts
from mpipipe.schedules.registry import SEVERAL_STAGES, WITH_COSTS, by_name, names
from mpipipe.schedules.simulate import EQUAL_COSTS, Costs, Links, Timeline, bubbles, simulate
from mpipipe.text import counted

ENOUGH = 1 << 15  # F's and backwards of the largest schedule that is simulated, if a repetition is found by then
LARGEST = 1 << 18  # and of the largest one if not
AGREEING = 4  # pairs of sizes in a row that must give the same straight lines
BITS = 30  # of a cost: then sums of costs are exact


@dataclass(frozen=True)
class Repetition:
    """The result of `simulate_repeated`.

    Attributes
    ----------
    makespan, bubble_fraction, bubble_ratio : float
        As of a `Timeline`.
    peak_activations : int
        The largest number of chunk activations that any rank holds at once.
    sizes : tuple of (int, int)
        Ranks and micro-batches of each schedule that was simulated.
    """

    makespan: float
    bubble_fraction: float
    bubble_ratio: float
    peak_activations: int
    sizes: tuple[tuple[int, int], ...]
    efficiency = Timeline.efficiency


class _Line(NamedTuple):
    """Sizes first + i * step, i = 0 ... last, of (ranks, micro-batches); the last one is that of the whole schedule."""

    first: tuple[int, int]
    step: tuple[int, int]
    last: int

    def at(self, index: int) -> tuple[int, int]:
        return self.first[0] + index * self.step[0], self.first[1] + index * self.step[1]


def simulate_repeated(
    name: str,
    *,
    ranks: int,
    chunks: int = 1,
    microbatches: int,
    costs: Costs = EQUAL_COSTS,
    links: Links | None = None,
    message_bytes: float = 0,
    slices: int = 1,
) -> Repetition:
    """Simulate a schedule of any size by its repeated part.

    Smaller sizes of the schedule are simulated, in pairs of neighbours, until four pairs in a row lie exactly on one
    straight line. They have up to 2^15 actions, or up to 2^18 if no line shows before. The result is that of `simulate`
    if the line goes on. That is evidence and no proof: another line, steeper by very little, may take over later. Costs
    are rounded to 30 bits of the largest one, so that sums are exact. Whole numbers below 2^30 are not rounded.
    ArgumentError is raised where no repetition is found, costs differ between stages, or an argument does not fit.

    Parameters
    ----------
    name : str
        A schedule of `by_name` whose order does not depend on costs.
    ranks, chunks, microbatches : int
        P, V stages per rank, and M.
    costs : Costs, optional
        Times of the actions. Each is one number, the same for all stages.
    links : Links, optional
        Times of messages, in place of `costs.transfer`.
    message_bytes : float, optional
        Bytes of one micro-batch's activation between two stages, for `links`; with slices of one slice.
    slices : int, optional
        n, slices of each sequence, all of the same time.

    Examples
    --------
    >>> from mpipipe import schedules
    >>> found = schedules.simulate_repeated("interleaved_1f1b", ranks=16384, chunks=2, microbatches=8192)
    >>> found.makespan, found.peak_activations
    (122877.0, 16384)
    """
    ranks, chunks, microbatches, slices = counts(ranks=ranks, chunks=chunks, microbatches=microbatches, slices=slices)
    measure = _Measure(name, chunks, costs, links, message_bytes, slices)
    for line in _lines(name, ranks, chunks, microbatches, slices, 1 if links is None else links.node_size):
        end = _along(line, measure)
        if end is not None:
            return measure.result(ranks, microbatches, *end)
    near = max(1, round(microbatches / ranks)) * ranks
    raise ArgumentError(
        f"no part of the schedule {name} was found to repeat",
        found=f"{counted(ranks, 'rank')}, {counted(microbatches, 'micro-batch')}",
        expected="ranks and micro-batches with a large common factor, such as powers of 2",
        remedy=f"take {counted(near, 'micro-batch')}; or simulate it as a whole, by schedules.simulate",
    )


class _Measure:
    """Simulates one schedule in several sizes. Times are whole numbers of a unit, so that sums are exact."""

    def __init__(
        self, name: str, chunks: int, costs: Costs, links: Links | None, message_bytes: float, slices: int
    ) -> None:
        if name in WITH_COSTS:
            known = [other for other in [*names(chunks), "forward_only"] if other not in WITH_COSTS]
            raise ArgumentError(
                f"the orders of {name} follow from its costs, and need not repeat",
                found=name,
                expected="one of " + ", ".join(known),
            )
        costs.refuse_unequal_slices("a schedule repeats")
        values = {cost: getattr(costs, cost) for cost in ("forward", "input_grad", "weight_grad", "transfer")}
        for cost, value in values.items():
            if not isinstance(value, Real):
                raise ArgumentError(
                    "a schedule repeats where all stages have the same costs",
                    found=f"{cost}={value!r}",
                    expected="a number",
                    remedy="take the mean: costs.average(stages)",
                )
            costs.per_stage(cost, 1)  # refuses what is no cost
        self.name, self.chunks, self.links, self.message_bytes = name, chunks, links, message_bytes
        self.slices = slices
        times = [float(value) for value in values.values()]
        if links is not None:
            node = links.node_size
            times[3:] = {*links.times((0, node), message_bytes), *links.times((0, 1), message_bytes)}
        self.unit = 2.0 ** (math.frexp(max(times))[1] - BITS) if max(times) else 1.0
        self.own = [self._whole(values[cost]) for cost in ("forward", "input_grad", "weight_grad")]
        self.transfer = self._whole(values["transfer"])
        self.sizes: dict[tuple[int, int], tuple[int, int]] = {}

    def _whole(self, time: float) -> int:
        return round(float(time) / self.unit)

    def __call__(self, ranks: int, microbatches: int) -> tuple[int, int]:
        """Return the makespan in units, and the largest peak."""
        if (ranks, microbatches) not in self.sizes:
            sizes = dict(ranks=ranks, chunks=self.chunks, microbatches=microbatches, slices=self.slices)
            schedule = by_name(self.name, **sizes)  # type: ignore[arg-type]
            hops: int | list[int] = self.transfer
            if self.links is not None:
                hops = [*map(self._whole, self.links.times(schedule.placement, self.message_bytes))]
            forward, input_grad, weight_grad = self.own
            timeline = simulate(schedule, Costs(forward, input_grad, weight_grad, hops))
            self.sizes[ranks, microbatches] = int(timeline.makespan), max(timeline.peak_activations)
        return self.sizes[ranks, microbatches]

    def result(self, ranks: int, microbatches: int, makespan: int, peak: int) -> Repetition:
        """Add what follows from the makespan."""
        work = self.own[:1] if self.name == "forward_only" else self.own
        busy = ranks * self.chunks * microbatches * self.slices * sum(work)
        return Repetition(makespan * self.unit, *bubbles(ranks, makespan, busy), peak, tuple(self.sizes))


def _lines(name: str, ranks: int, chunks: int, microbatches: int, slices: int, node_size: int) -> Iterator[_Line]:
    """Yield the lines that end at the size of the whole schedule.

    Along a line the groups of units keep their sizes, and the last node keeps its number of ranks.
    """
    unit = math.gcd(ranks, microbatches)
    each = ranks // unit, microbatches // unit
    groups = max(1, microbatches * slices // ranks)
    step = math.lcm(node_size // math.gcd(node_size, each[0]), groups // math.gcd(groups, each[1] * slices))
    last, rest = divmod(unit - 1, step)
    first = rest + 1
    yield _Line((first * each[0], first * each[1]), (step * each[0], step * each[1]), last)
    grouped = name in SEVERAL_STAGES and name != "looped_bfs" and chunks > 1
    if not grouped or microbatches * slices % ranks == 0:
        last, rest = divmod(microbatches - 1, ranks)
        yield _Line((ranks, rest + 1), (0, ranks), last)


def _along(line: _Line, measure: _Measure) -> tuple[int, int] | None:
    """Return makespan and peak at the end of a line; None if no straight line was found."""

    def size(index: int) -> int:
        ranks, microbatches = line.at(index)
        return 2 * measure.chunks * ranks * microbatches * measure.slices

    if size(line.last) <= ENOUGH:
        return measure(*line.at(line.last))
    agreeing, index = 0, 1
    before: tuple[int, ...] = ()  # of the last pair: makespan at index 0 and its slope, peak at index 0 and its slope
    while size(index + 1) <= (LARGEST if agreeing < AGREEING else ENOUGH):
        here, there = measure(*line.at(index)), measure(*line.at(index + 1))
        straight = tuple(
            number for low, high in zip(here, there) for number in (low - index * (high - low), high - low)
        )
        agreeing = agreeing + 1 if straight == before else 1
        before, index = straight, 2 * index
    if agreeing < AGREEING:
        return None
    return before[0] + line.last * before[1], before[2] + line.last * before[3]
