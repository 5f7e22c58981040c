"""The proof: what passes runs, what does not run is refused with the cell marked."""

from graphlib import CycleError, TopologicalSorter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.any_schedule import any_schedule
from support.random_schedules import runnable_schedules

from mpipipe import schedules
from mpipipe.errors import ScheduleError
from mpipipe.schedules import Action, Schedule, check, from_csv


def with_orders(schedule, orders):
    return Schedule("changed", schedule.placement, schedule.microbatches, orders)


def has_cycle(schedule):
    """Whether order and data edges close a cycle, by the standard library's topological sort."""
    backward = {(a.stage, a.microbatch): a for order in schedule.orders for a in order if a.op in "BI"}
    edges = {}
    for order in schedule.orders:
        for before, action in zip((None, *order), order):
            stage, op, microbatch = action
            needs = {before} if before else set()
            if op == "F" and stage > 0:
                needs.add(Action(stage - 1, "F", microbatch))
            if op in "BIR":
                needs.add(Action(stage, "F", microbatch))
            if op in "BI":
                if (stage, microbatch) in schedule.recomputed:
                    needs.add(Action(stage, "R", microbatch))
                if stage < schedule.stages - 1:
                    needs.add(backward[stage + 1, microbatch])
            if op == "W":
                needs.add(Action(stage, "I", microbatch))
            edges[action] = needs
    try:
        TopologicalSorter(edges).prepare()
    except CycleError:
        return True
    return False


lifo = st.builds(schedules.gpipe, st.integers(1, 5), st.integers(1, 9), st.just("lifo"))
any_schedule = st.one_of(any_schedule, any_schedule.map(schedules.with_recompute), lifo, runnable_schedules())


@given(schedule=any_schedule)
def test_generated_schedules_pass(schedule):
    assert check(schedule) is None
    assert not has_cycle(schedule)


@given(schedule=any_schedule, data=st.data())
def test_a_permuted_schedule_passes_exactly_if_its_actions_form_no_cycle(schedule, data):
    orders = [list(order) for order in schedule.orders]
    order = orders[data.draw(st.integers(0, schedule.ranks - 1))]
    for _ in range(data.draw(st.integers(1, 3))):
        source, target = (data.draw(st.integers(0, len(order) - 1)) for _ in range(2))
        order.insert(target, order.pop(source))
    changed = with_orders(schedule, orders)
    if has_cycle(changed):
        with pytest.raises(ScheduleError):
            check(changed)
    else:
        check(changed)


@given(schedule=any_schedule, data=st.data())
def test_a_lost_or_doubled_action_is_found(schedule, data):
    orders = [list(order) for order in schedule.orders]
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    slot = data.draw(st.integers(0, len(orders[rank]) - 1))
    doubled = [*orders[:rank], [*orders[rank], orders[rank][slot]], *orders[rank + 1 :]]
    lost = [*orders[:rank], orders[rank][:slot] + orders[rank][slot + 1 :], *orders[rank + 1 :]]
    with pytest.raises(ScheduleError):
        check(with_orders(schedule, doubled))
    left = [action for order in lost for action in order]
    if orders[rank][slot].op == "R":  # no R is ever due
        check(with_orders(schedule, lost))
    elif len(left) > 1 or left == [Action(0, "B", 0)]:  # one F alone is a whole schedule of forwards
        with pytest.raises(ScheduleError):
            check(with_orders(schedule, lost))


SLICED = [
    ("0F0.1 0F0.0 0B0.1 0B0.0",
     ">0F0.1<", "F of slice 1 before that of slice 0: F's rise within micro-batch 0",
     0, 0, 0, 1, "0F0.0 earlier on this rank"),
    ("0F0.0 0F0.1 0B0.0 0B0.1",
     ">0B0.0<", "B of slice 0 before that of slice 1: backwards fall within micro-batch 0",
     0, 0, 0, 0, "0B0.1 earlier on this rank"),
    ("0F0.0 0F0.1 0F1.0 0F1.1 0I0.1 0I1.0 0W0.1 0B0.0 0B1.1 0W1.0",
     ">0I1.0<", "backwards fall within micro-batch 1", 0, 0, 1, 0, "0I1.1 earlier"),
    ("0F0.0 0B0.0 0F0.1 0B0.1", ">0B0.0<", "B of slice 0 before that of slice 1", 0, 0, 0, 0, "0B0.1 earlier"),
    ("0F0.0 0F0.1 0B0.1", ">0B0.0?<", "0B0.0 is missing", 0, 0, 0, 0, "one F, and either"),
    ("0F0.0 0F0.1 0B0.1 0B0.1", ">0B0.1<", "the input gradient comes twice", 0, 0, 0, 1, "one 0B0.1, or one 0I0.1"),
    ("0F0.0 0F0.1 0R0.0 0B0.1 0B0.0 0R0.1", ">0R0.1<", "R after its backward", 0, 0, 0, 1, "between 0F0.1"),
    ("0F0.0 0B0.1 0F0.1 0B0.0 | 1F0.0 1F0.1 1B0.1 1B0.0",
     ">0B0.1<", "B before its forward", 0, 0, 0, 1, "0F0.1 earlier"),
    ("0F0.0 0F0.1 0B0.1 0F1.0 0F1.1 0B0.0 0B1.1 0B1.0 | 1F0.0 1F0.1 1F1.0 1B0.1 1B0.0 1F1.1 1B1.1 1B1.0",
     ">0B0.1<", "rank 0 at 0B0.1 waits for 1B0.1, later on rank 1", 0, 0, 0, 1, "no ranks wait for each other"),
]  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", ">0B0<", "deadlock", 0, 0, 0),
        ("0F0,0I0,0W0,0F1,0B1\n1F0,1F1,1I0,1W0,1B1", ">0I0<", "rank 0 at 0I0 waits for 1I0, later on rank 1", 0, 0, 0),
        ("0F0,0B0\n1B0,1F0", ">1B0<", "B before its forward", 1, 1, 0),
        ("0F0,0B0\n1F0,1B0,1B0", ">1B0<", "the input gradient comes twice", 1, 1, 0),
        ("0F0,0B0\n1F0,1B0,1W0", ">1W0<", "the weight gradient comes twice", 1, 1, 0),
        ("0F0,0F0,0B0\n1F0,1B0", ">0F0<", "the forward comes twice", 0, 0, 0),
        ("0F0,0F1,0B0\n1F0,1F1,1B0,1B1", ">0B1?<", "0B1 is missing", 0, 0, 1),
        ("0F0,0F1,0I0,0W0,0I1\n1F0,1F1,1B0,1B1", ">0W1?<", "0W1 is missing", 0, 0, 1),
        ("0F0,0R0,0R0,0B0\n1F0,1B0", ">0R0<", "the recomputation comes twice", 0, 0, 0),
        ("0R0,0F0,0B0\n1F0,1B0", ">0R0<", "R before its forward", 0, 0, 0),
        ("0F0,0B0\n1F0,1B0,1R0", ">1R0<", "R after its backward", 1, 1, 0),
        ("0F0,0F1\n1F0", ">1F1?<", "1F1 is missing", 1, 1, 1),
        ("1F0,0F0,0B0,1B0", ">1F0<", "rank 0 at 1F0 waits for 0F0, later on rank 0", 0, 1, 0),
        *SLICED,
    ],
)
def test_the_error_marks_the_cell_and_says_what_is_wrong(case):
    """And, where sequences are cut, in which slice; the last word is of what was expected."""
    text, marked, reason, rank, stage, microbatch, *of_slice = case
    rows = text.replace(" | ", "\n").replace(" ", ",")
    with pytest.raises(ScheduleError) as refusal:
        check(from_csv(rows))
    error = refusal.value
    assert marked in str(error) and reason in str(error)
    assert (error.rank, error.stage, error.microbatch) == (rank, stage, microbatch)
    if of_slice:
        assert error.slice == of_slice[0] and of_slice[1] in str(error.expected)
        assert f"micro-batch {microbatch}, slice {error.slice}: " in str(error)
    for line in rows.split("\n"):  # the whole grid is there
        assert all(cell in str(error) for cell in line.split(","))


def test_a_deadlock_names_every_rank_of_the_cycle_and_no_other():
    # Rank 2 waits too, for rank 1, but is no part of the cycle.
    rows = "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n2F0,2F1,2B0,2B1"
    with pytest.raises(ScheduleError) as refusal:
        check(from_csv(rows))
    text = str(refusal.value)
    assert "rank 0 at 0B0 waits for 1B0" in text and "rank 1 at 1F1 waits for 0F1" in text
    assert ">0B0<" in text and ">1F1<" in text and text.count(">") == 2
    assert "rank 2 at" not in text


@pytest.mark.parametrize("use", [check, schedules.simulate, schedules.with_recompute])
def test_a_table_that_cannot_run_is_read_and_refused_by_what_uses_it(use):
    schedule = from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    with pytest.raises(ScheduleError, match="deadlock"):
        use(schedule)


def test_actions_that_no_rank_can_run_are_refused():
    good = schedules.one_f_one_b(2, 2)

    def replaced(action):
        return with_orders(good, (good.orders[0], (action, *good.orders[1][1:])))

    for action, reason in (
        (Action(0, "F", 0), "does not lie on this rank"),
        (Action(2, "F", 0), "no stage 2"),
        (Action(-1, "F", 0), "no stage -1"),
        (Action(1, "F", 2), "no micro-batch 2"),
        (Action(1, "X", 0), "not an action"),
        ("1F0", "not an action"),
    ):
        with pytest.raises(ScheduleError, match=reason) as refusal:
            check(replaced(action))
        assert refusal.value.rank == 1 and f">{action}<" in str(refusal.value)


@pytest.mark.parametrize(
    "placement, microbatches, orders",
    [((), 1, ()), ((0,), 0, ((),)), ((1,), 1, ((Action(0, "F", 0),),)), ((0,), 1, ((Action(0, "F", 0),), ()))],
)
def test_placements_that_make_no_pipeline_are_refused(placement, microbatches, orders):
    with pytest.raises(ScheduleError):
        check(Schedule("bad", placement, microbatches, orders))
    for slices in (0, 1.5, "2"):
        with pytest.raises(ScheduleError, match="whole number of slices"):
            check(Schedule("bad", (0,), 1, [[Action(0, "F", 0)]], slices=slices))


def test_of_a_large_schedule_the_surroundings_of_the_cell_are_shown():
    schedule = schedules.interleaved_1f1b(32, 4, 64)
    order = list(schedule.orders[20])
    slot = order.index(Action(20, "B", 30))
    order.insert(40, order.pop(slot))
    with pytest.raises(ScheduleError) as refusal:
        check(with_orders(schedule, (*schedule.orders[:20], order, *schedule.orders[21:])))
    text = str(refusal.value)
    assert ">20B30<" in text and "rank 20" in text and "shown: 16 of 32 ranks, 12 of 512 slots" in text
    assert max(len(line) for line in text.splitlines() if line.startswith("rank ") and ":" not in line) <= 120
