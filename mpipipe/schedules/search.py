"""The best schedule that can be found for given costs and memory.

It begins with all schedules of the package that keep the limit, so it is never slower than one of them. For many
micro-batches the search is made with few of them; what they do in the middle is repeated, and the begin and the end are
kept (Lin et al. 2023, Tessel, arXiv:2311.15269).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

from mpipipe.errors import ArgumentError
from mpipipe.schedules import building_blocks, classic, given, memory_limited, v_shaped, zero_bubble
from mpipipe.schedules.bounds import least_time
from mpipipe.schedules.improve import Budget, Improvement
from mpipipe.schedules.kinds import Ends, Form, Orders, kinds_of
from mpipipe.schedules.schedule import Schedule, at_least_one, looped_placement
from mpipipe.schedules.simulate import EQUAL_COSTS, Costs

MANY, FEW = 4, 3  # micro-batches per rank: more are made from so many
REPEATING = 0.6  # share of the budget for the repeated part


def search(
    placement: int | Sequence[int],
    microbatches: int,
    costs: Costs = EQUAL_COSTS,
    *,
    chunks: int = 1,
    memory_limit: float | None = None,
    seconds: float = 10.0,
    steps: int | None = None,
    seed: int = 0,
) -> Schedule:
    """Search for the fastest schedule; stop where none can be faster.

    Backwards are split into I and W. The result is not slower than any schedule of this package with the same stages on
    the same ranks that keeps the limit. `gap` tells how far it is from the best.

    Parameters
    ----------
    placement : int or sequence of int
        The number of ranks P, or the rank of each stage. For a number of ranks with two chunks the stages loop over the
        ranks or lie on a V, whichever is faster.
    microbatches : int
        M, at least 1.
    costs : Costs, optional
        Times of the stages; by default one unit for each of F, I and W.
    chunks : int, optional
        V, stages per rank, where `placement` is a number of ranks.
    memory_limit : float, optional
        Chunk activations that a rank may hold at once, at least its number of stages; by default there is no limit.
    seconds : float, optional
        Time to search, on one core.
    steps : int, optional
        Orders to try; where these end before the time, the result is the same on every machine.
    seed : int, optional
        Where the changes begin that are drawn at random.

    Returns
    -------
    Schedule
        The fastest that was found, with the name "search".

    Raises
    ------
    ArgumentError
        A count is below 1, a cost does not fit, no schedule keeps the limit, or there is no time.

    Examples
    --------
    >>> from mpipipe import schedules
    >>> costs = schedules.Costs(forward=[1, 1, 1, 1.5], transfer=0.1)
    >>> found = schedules.search(4, 8, costs, memory_limit=4, seconds=60, steps=200)
    >>> schedules.gap(found, costs, memory_limit=4).share < 0.03
    True
    """
    microbatches = at_least_one("microbatches", microbatches)
    given.check_time(seconds)
    budget, random = Budget(seconds, None if steps is None else at_least_one("steps", steps)), Random(seed)
    best: Improvement | None = None
    bounds = [(least_time(place, microbatches, costs, memory_limit), place) for place in placements(placement, chunks)]
    for number, (bound, place) in enumerate(sorted(bounds)):
        if best is None or bound < best.makespan:
            form = Form(place, microbatches, costs, memory_limit)
            found = _searched(form, costs, Improvement(form, bound, budget, random), (number + 1) / len(bounds))
            if best is None or found.makespan < best.makespan:
                best = found
    assert best is not None
    best.improve(1.0)  # with what is left where a placement cannot be faster
    return best.form.schedule("search", best.orders)


def published(placement: Sequence[int], microbatches: int, costs: Costs, limit: float) -> Iterator[Schedule]:
    """Yield the package's schedules of training with these stages on these ranks; some may not keep the limit."""
    ranks = max(placement) + 1
    chunks = len(placement) // ranks
    if tuple(placement) == looped_placement(ranks, chunks):
        yield classic.interleaved_1f1b(ranks, chunks, microbatches)
        yield classic.looped_bfs(ranks, chunks, microbatches)
        yield zero_bubble.interleaved_zero_bubble(ranks, chunks, microbatches)
        if chunks == 1:
            yield classic.gpipe(ranks, microbatches)
            yield classic.one_f_one_b(ranks, microbatches)
            yield memory_limited.zero_bubble_2p(ranks, microbatches, costs, limit)
    if tuple(placement) == v_shaped.v_placement(ranks):
        yield v_shaped.dualpipe_v(ranks, microbatches)
        for build in (v_shaped.zero_bubble_v, building_blocks.v_half, building_blocks.v_min):
            yield build(ranks, microbatches, costs)
            yield build(ranks, microbatches)


def placements(placement: int | Sequence[int], chunks: int) -> list[tuple[int, ...]]:
    """Return the placements to search, for a number of ranks or the ranks of stages."""
    if not isinstance(placement, Sequence):
        ranks, chunks = at_least_one("ranks", placement), at_least_one("chunks", chunks)
        looped = looped_placement(ranks, chunks)
        return list(dict.fromkeys([looped, v_shaped.v_placement(ranks)])) if chunks == 2 else [looped]
    named = set(placement)
    if not named or named != set(range(len(named))):
        raise ArgumentError(
            "the placement does not name ranks from 0 without a gap",
            found=f"{placement}",
            expected="as in (0, 1, 1, 0)",
        )
    return [tuple(placement)]


def _searched(form: Form, costs: Costs, found: Improvement, until: float) -> Improvement:
    """Search one placement: as it is, or with few micro-batches first."""
    orders = [kinds_of(each) for each in published(form.placement, form.microbatches, costs, form.limit)]
    ranks = len(form.own)
    if form.microbatches <= MANY * ranks:
        found.start(orders)
    else:
        part = Form(form.placement, FEW * ranks, costs, form.limit)
        bound = least_time(form.placement, FEW * ranks, costs, form.limit)
        few = Improvement(part, bound, found.budget, found.random)
        begin = found.budget.spent()
        few.start(kinds_of(each) for each in published(form.placement, FEW * ranks, costs, form.limit))
        few.improve(begin + REPEATING * (until - begin))
        found.take_all(orders)
        found.learn(_repeated(form, part, few.orders))
        if not found.orders:  # none of all these keeps the limit
            found.start(())
    found.improve(until)
    return found


def _repeated(form: Form, part: Form, orders: Orders) -> Ends:
    """Return the ends of the part's actions with the middle one of each kind repeated, as often as it takes."""
    _, ends = part.replay(orders)
    few, middle = part.microbatches, part.microbatches // 2
    first, last = few // 3, few - 1 - few // 3
    period = max(form.busy, *((row[last] - row[first]) / max(1, last - first) for row in ends))
    more = form.microbatches - few
    return [
        [
            *row[:middle],
            *(row[middle] + k * period for k in range(more)),
            *(end + more * period for end in row[middle:]),
        ]
        for row in ends
    ]
