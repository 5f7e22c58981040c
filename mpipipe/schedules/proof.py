"""The proof that a schedule can run: complete, in the right place, causal, and free of deadlock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import NoReturn

from mpipipe.errors import ScheduleError
from mpipipe.schedules.action import (
    BACKWARD,
    FORWARD,
    INPUT_GRAD,
    OPS,
    RECOMPUTE,
    WEIGHT_GRAD,
    Action,
    place_of,
)
from mpipipe.schedules.replay import reached, source
from mpipipe.schedules.schedule import Schedule, check_skips
from mpipipe.text import counted

# the states of one (stage, micro-batch), and the state that each op leads to
NOTHING, FORWARDED, RECOMPUTED, INPUT_DONE, FINISHED = range(5)
NEXT = {
    (NOTHING, FORWARD): FORWARDED,
    (FORWARDED, RECOMPUTE): RECOMPUTED,
    (FORWARDED, BACKWARD): FINISHED,
    (FORWARDED, INPUT_GRAD): INPUT_DONE,
    (RECOMPUTED, BACKWARD): FINISHED,
    (RECOMPUTED, INPUT_GRAD): INPUT_DONE,
    (INPUT_DONE, WEIGHT_GRAD): FINISHED,
}
ABSENT = {NOTHING: "F", FORWARDED: "B", RECOMPUTED: "B", INPUT_DONE: "W"}
LISTED_RANKS = 6  # most ranks of a wait cycle that the error lists


def check(schedule: Schedule) -> None:
    r"""Prove that a schedule runs to its end, or raise.

    A second call costs nothing, since the proof is remembered.

    The proof shows that

    - every logical stage 0..S-1 lies on one rank, every rank has a stage, and every action is on
      its stage's rank;
    - every (stage, micro-batch) has exactly one F and, unless the whole schedule is F only, either
      one B, or one I and one W; stages before `trained_from` have F alone;
    - every (stage, micro-batch) with a backward has one R at most; those of one stage may differ in
      that;
    - on its rank, F comes before B or I, and I before W; R comes after F, and before B or I;
    - where sequences are cut into slices, the F's of a sequence in a stage come in rising order of
      its slices, and its B's or I's in falling order: attention looks back at earlier slices, whose
      gradients later ones add to;
    - skips of one name have one source, and each leads to a later stage;
    - the ranks can run their orders to the end although an F waits for the F of the stage before,
      and a B or I for the B or I of the stage after. An R and a W wait for no other rank.

    The last point excludes deadlock even if every send is synchronous (a rendezvous). It holds for
    an executor that posts each receive at the latest when it reaches the action that needs the
    message, and that never waits for a send inside a step. The replay finds an order of all
    actions: each one comes after those before it on its rank, and after the one that makes its
    input. Take any run, and the first action in that order which never starts. All actions before
    it on its rank have ended, since only missing input can stop a rank; so its receive is posted.
    The action that makes its input has ended, so the send has begun. The send matches that receive
    by its tag, whatever else is under way, and completes. So the action starts, a contradiction.
    Conversely, where the replay stops, the ranks that it names wait for each other in every
    executor.

    Skips need no replay. The F of stage s waits for the F of every stage before it already, each by
    the next one. So the F of k, which makes what a skip brings from k to s, comes before it in the
    order that the replay found, and has ended by the argument above. Its send has begun: to k's own
    executor it is one more send that it never waits for. It is received at the latest when the F of
    s is reached, under a tag that no other message has, so it completes. The same holds backwards,
    where the B or I of k waits for that of s through all stages between.

    Raises
    ------
    ScheduleError
        The text shows the orders with the wrong cell marked, and says what is wrong there. `rank`,
        `stage`, `microbatch` and, with slices, `slice` say where.

    Examples
    --------
    >>> from mpipipe import schedules
    >>> try:
    ...     schedules.check(schedules.from_csv("0F0,0B0\n1B0,1F0"))
    ... except ValueError as error:
    ...     print(error)
    rank 1, stage 1, micro-batch 0: slot 0: B before its forward
    slot    0    1
    rank 0  0F0  0B0
    rank 1 >1B0< 1F0
      found: 1B0
      expected: 1F0 earlier on this rank
      remedy: correct the marked cell; the schedules of schedules.by_name pass this check
    """
    if schedule.proven:
        return
    _check_placement(schedule)
    states = [bytearray(schedule.units) for _ in schedule.placement]
    for rank, order in enumerate(schedule.orders):
        for slot, action in enumerate(order):
            wrong = _wrong(schedule, rank, action, states)
            if wrong is not None:
                _refuse(schedule, rank, slot, *wrong)
            state = states[action.stage]
            state[action.microbatch] = NEXT[state[action.microbatch], action.op]
    _check_complete(schedule, states)
    stopped = reached(schedule)
    for rank, order in enumerate(schedule.orders):
        if stopped[rank] < len(order):
            _refuse_deadlock(schedule, stopped, rank)
    object.__setattr__(schedule, "proven", True)  # stays true, since the schedule cannot change


def _check_placement(schedule: Schedule) -> None:
    """Refuse a schedule with a stage on no rank, or a rank without a stage."""
    ranks = schedule.ranks
    stages = schedule.stages
    if type(schedule.trained_from) is not int or not 0 <= schedule.trained_from < stages:
        raise ScheduleError(
            "trained_from is no stage of the schedule",
            found=repr(schedule.trained_from),
            expected=f"a stage from 0 to {stages - 1}",
        )
    if type(schedule.microbatches) is not int or schedule.microbatches < 1 or not ranks:
        raise ScheduleError(
            "a schedule needs at least one rank and one micro-batch",
            found=f"{counted(ranks, 'rank')}, microbatches={schedule.microbatches!r}",
            expected="at least 1 of each",
        )
    if type(schedule.slices) is not int or schedule.slices < 1:
        raise ScheduleError(
            "a sequence is cut into a whole number of slices",
            found=f"slices={schedule.slices!r}",
            expected="an integer of at least 1",
            remedy="slices=1 leaves sequences whole",
        )
    for stage, rank in enumerate(schedule.placement):
        if type(rank) is not int or not 0 <= rank < ranks:
            raise ScheduleError(
                "a stage is placed on a rank that the schedule does not have",
                stage=stage,
                found=f"placement[{stage}]={rank!r}",
                expected=f"a rank from 0 to {ranks - 1}",
            )
    check_skips(schedule.skips, stages)
    idle = sorted(set(range(ranks)) - set(schedule.placement))
    if idle:
        raise ScheduleError(
            "a rank has no stage",
            rank=idle[0],
            found=f"placement of {counted(stages, 'stage')} on {counted(ranks, 'rank')}: "
            f"{schedule.placement}",
            expected="at least one stage on every rank",
            remedy="use fewer ranks or more stages",
        )


def _wrong(
    schedule: Schedule, rank: int, action: Action, states: Sequence[bytearray]
) -> tuple[str, str] | None:
    """Tell (what is wrong, what is expected) of an action that a rank cannot run next."""
    if type(action) is not Action or action.op not in OPS:
        return "not an action", "Action(stage, op, microbatch) with op F, B, I, W or R"
    stage, op, unit = action
    if type(stage) is not int or not 0 <= stage < schedule.stages:
        return f"there is no stage {stage!r}", f"a stage from 0 to {schedule.stages - 1}"
    if type(unit) is not int or not 0 <= unit < schedule.units:
        noun = "unit"
        if schedule.slices == 1:
            noun = "micro-batch"
        return f"there is no {noun} {unit!r}", f"a {noun} from 0 to {schedule.units - 1}"
    if op != FORWARD and not schedule.has_backward(stage):
        return (
            f"stage {stage} has nothing to train",
            f"no backward before stage {schedule.trained_from}",
        )
    if schedule.placement[stage] != rank:
        return (
            f"stage {stage} does not lie on this rank",
            f"{schedule.cell(action)} on rank {schedule.placement[stage]}",
        )
    state = states[stage]
    if (state[unit], op) not in NEXT:
        return _untimely(schedule, action, state[unit])
    if schedule.slices == 1:
        return None
    # F's of a sequence rise, B's and I's fall; R and W follow their own F and I.
    sequence, part = divmod(unit, schedule.slices)
    if op == FORWARD and part and state[unit - 1] == NOTHING:
        missing = -1
        way = "F's rise"
    elif (
        op in (BACKWARD, INPUT_GRAD) and part < schedule.slices - 1 and state[unit + 1] < INPUT_DONE
    ):
        missing = 1
        way = "backwards fall"
    else:
        return None
    before = schedule.cell(action._replace(microbatch=unit + missing))
    return (
        f"{op} of slice {part} before that of slice {part + missing}: {way} within micro-batch "
        f"{sequence}",
        f"{before} earlier on this rank",
    )


def _untimely(schedule: Schedule, action: Action, state: int) -> tuple[str, str]:
    """Tell (what is wrong, what is expected) of an action that comes twice or too early."""
    op = action.op
    forward, whole, inputs, weights, again = [
        schedule.cell(action._replace(op=other)) for other in OPS
    ]
    if op == FORWARD:
        return "the forward comes twice", f"one {forward}"
    if state == NOTHING:
        return f"{op} before its forward", f"{forward} earlier on this rank"
    if op == RECOMPUTE:
        if state == RECOMPUTED:
            return "the recomputation comes twice", f"one {again} at most"
        return "R after its backward", f"{again} between {forward} and its backward"
    if state in (FORWARDED, RECOMPUTED):
        return "W before its I", f"{inputs} earlier on this rank"
    once = f"one {whole}, or one {inputs} and one {weights}"
    if op == WEIGHT_GRAD:
        return "the weight gradient comes twice", once
    return "the input gradient comes twice", once


def _check_complete(schedule: Schedule, states: Sequence[bytearray]) -> None:
    """Refuse a (stage, unit) that is not finished or, where there is no backward, not forwarded."""
    wrong = []
    for stage, state in enumerate(states):
        goal = FINISHED
        expected = "one F, and either one B, or one I and one W"
        if schedule.forwards_only or not schedule.has_backward(stage):
            goal = FORWARDED
            expected = "one F"
        for unit, end in enumerate(state):
            if end != goal:
                wrong.append((stage, unit, end, expected))
    if not wrong:
        return
    stage, unit, end, expected = wrong[0]
    rank = schedule.placement[stage]
    noun = "slice of a micro-batch"
    if schedule.slices == 1:
        noun = "micro-batch"
    absent = schedule.cell(Action(stage, ABSENT[end], unit))
    raise ScheduleError(
        f"{absent} is missing from the schedule\n" + grid(schedule, missing=[(rank, f"{absent}?")]),
        rank=rank,
        stage=stage,
        **place_of(unit, schedule.slices),
        found=f"{len(wrong)} of {schedule.stages * schedule.units} pairs (stage, {noun}) are "
        "incomplete",
        expected=expected,
        remedy=f"add {absent} to the order of rank {rank}",
    )


def _refuse_deadlock(schedule: Schedule, stopped: Sequence[int], rank: int) -> NoReturn:
    """Follow the waits of a stopped rank until one repeats, and name that cycle."""
    awaited: dict[int, Action] = {}
    while rank not in awaited:
        awaited[rank] = _awaited(schedule, schedule.orders[rank][stopped[rank]])
        rank = schedule.placement[awaited[rank].stage]
    path = [*awaited]
    cells = [(rank, stopped[rank]) for rank in path[path.index(rank) :]]
    links = []
    for rank, slot in cells[:LISTED_RANKS]:
        stopped_at = schedule.cell(schedule.orders[rank][slot])
        later = awaited[rank]
        owner = schedule.placement[later.stage]
        links.append(
            f"rank {rank} at {stopped_at} waits for {schedule.cell(later)}, later on rank {owner}"
        )
    if len(cells) > LISTED_RANKS:
        links.append(f"and so on around {len(cells)} ranks")
    what = "deadlock: " + "; ".join(links)
    expected = "orders in which no ranks wait for each other in a cycle"
    _refuse(schedule, *cells[0], what, expected, cells)


def _awaited(schedule: Schedule, action: Action) -> Action:
    """Find the action that the stopped `action` waits for."""
    stage = source(action.stage, action.op, schedule.stages)
    assert stage is not None  # an action that waits for no other never stops
    if action.op == FORWARD:
        return Action(stage, FORWARD, action.microbatch)
    full = Action(stage, BACKWARD, action.microbatch)
    if full in schedule.orders[schedule.placement[stage]]:
        return full
    return Action(stage, INPUT_GRAD, action.microbatch)


def _refuse(
    schedule: Schedule,
    rank: int,
    slot: int,
    what: str,
    expected: str,
    mark: list[tuple[int, int]] | None = None,
) -> NoReturn:
    action = schedule.orders[rank][slot]
    unit = getattr(action, "microbatch", None)
    raise ScheduleError(
        f"slot {slot}: {what}\n{grid(schedule, mark or (rank, slot))}",
        rank=rank,
        stage=getattr(action, "stage", None),
        **place_of(unit, schedule.slices),
        found=schedule.cell(action),
        expected=expected,
        remedy="correct the marked cell; the schedules of schedules.by_name pass this check",
    )


# -- A schedule as a table of text: one row per rank, one column per slot --------------------------


# what of a large table is shown around a marked cell: fits a terminal
WINDOW_RANKS = 16
WINDOW_SLOTS = 12


def grid(
    schedule: Schedule,
    mark: tuple[int, int] | list[tuple[int, int]] | None = None,
    missing: Iterable[tuple[int, str]] = (),
) -> str:
    """Write the orders of all ranks as a table; column k holds the k-th action of each rank.

    Parameters
    ----------
    schedule : Schedule
        A schedule, right or wrong.
    mark : (rank, slot) or list of (rank, slot), optional
        Cells to mark, as ``>2F0<``. Of a large table only the part around the first mark is shown.
    missing : iterable of (rank, text), optional
        Cells that the schedule lacks. They are marked at the end of the rank's row.

    Examples
    --------
    >>> from mpipipe import schedules
    >>> print(schedules.grid(schedules.one_f_one_b(2, 2), mark=(1, 2)))
    slot    0    1    2    3
    rank 0  0F0  0F1  0B0  0B1
    rank 1  1F0  1B0 >1F1< 1B1
    """
    if isinstance(mark, tuple):
        mark = [mark]
    marks = list(mark or ())
    rows = []
    for order in schedule.orders:
        rows.append([*map(schedule.cell, order)])
    for rank, text in missing:
        marks.append((rank, len(rows[rank])))
        rows[rank].append(text)
    ranks = range(schedule.ranks)
    if marks:
        ranks = _around(marks[0][0], WINDOW_RANKS, ranks)
    longest = max(map(len, rows[ranks.start : ranks.stop]), default=0)
    slots = range(longest)
    if marks:
        slots = _around(marks[0][1], WINDOW_SLOTS, slots)
    table = [["slot ", *[f" {slot} " for slot in slots]]]
    for rank in ranks:
        row = [f"rank {rank} "]
        for slot, text in enumerate(rows[rank][slots.start : slots.stop], slots.start):
            row.append(f">{text}<" if (rank, slot) in marks else f" {text} ")
        table.append(row)
    widths = [max(map(len, column)) for column in zip_longest(*table, fillvalue="")]
    lines = []
    for row in table:
        lines.append("".join(map(str.ljust, row, widths)).rstrip())
    if len(ranks) < schedule.ranks or len(slots) < longest:
        lines.append(
            f"(shown: {len(ranks)} of {counted(schedule.ranks, 'rank')}, {len(slots)} of "
            f"{longest} slots)"
        )
    return "\n".join(lines)


def _around(place: int, width: int, whole: range) -> range:
    start = max(0, min(place - width // 2, len(whole) - width))
    return whole[start : start + width]
