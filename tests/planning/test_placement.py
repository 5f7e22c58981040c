"""Ranks and threads on a node: which are tried, who computes meanwhile, and what is proposed; no time is asserted."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from planning.test_find import measured_on

from mpipipe import processor
from mpipipe.job import inprocess
from mpipipe.planning import LayerCosts, Link, Profile, RankCosts, Sizes, find_plans, links, placement, probe
from mpipipe.planning import find as finding
from mpipipe.planning.placement import (
    Placement,
    compare_placements,
    most_ranks,
    placements,
    rings_at_work,
    table,
    thread_counts,
)

FIXED = {"schedule": "gpipe", "chunks": 1, "microbatches": 1, "recompute": False}


def problem(**keys):
    """Six layers, a batch of four, and nothing to choose but ranks and threads."""
    (made,) = inprocess.run(1, lambda comm: measured_on(comm).problem)
    return replace(made, fixed=FIXED, batch=4, **keys)


def profile_of(training, seconds=1.0):
    """Each layer takes 3 * seconds for each sequence, and nothing else takes time."""
    kinds, sizes = max(training.kinds) + 1, training.space.sizes
    costs = {size: LayerCosts(*(seconds * size * part for part in (1, 2, 1, 1))) for size in sizes}
    return Profile(
        kinds=training.kinds,
        costs={size: (RankCosts((costs[size],) * kinds),) * training.ranks for size in sizes},
        links={size: (Link(),) * training.ranks for size in sizes},
        sizes={size: Sizes((100,) * kinds, (100,) * kinds, 10) for size in sizes},
        states=training.states,
        trained=training.trained_counts,
        optimizer=(0.0,) * training.ranks,
        sums=(0.0,) * training.ranks,
    )


@pytest.mark.parametrize(
    ("most", "base", "expected"), [(1, 1, [1]), (8, 8, [1, 2, 4, 8]), (6, 3, [1, 2, 3, 4, 6]), (2, 1, [1, 2])]
)
def test_powers_of_two_the_most_and_what_the_plan_was_measured_with_are_tried(most, base, expected):
    assert thread_counts(most, base) == expected


@pytest.mark.parametrize(("threads", "rings"), [(1, {0, 1, 2, 3}), (2, {0, 1}), (3, {0}), (4, {0}), (5, set())])
def test_as_many_ranks_compute_as_a_node_has_cores_for(threads, rings):
    places = [("n1", range(4), rank) for rank in range(4)]
    assert rings_at_work(places, threads) == rings


def test_ranks_of_a_ring_compute_together_or_not_at_all():
    places = [(f"n{rank // 3}", range(4), rank // 2) for rank in range(6)]  # ring 1 is on both
    assert [rings_at_work(places, threads) for threads in (1, 2, 4)] == [{0, 1, 2}, {0}, set()]


@pytest.mark.parametrize(
    ("nodes", "most", "pipe", "expected"),
    [(1, 8, None, 6), (1, 5, None, 5), (2, 4, None, 3), (1, 8, 1, 4), (1, 3, 1, 2), (1, 8, 3, 6), (2, 8, 3, 6),
     (1, 2, 3, 0), (1, 9, 7, 0)],
)  # fmt: skip
def test_ranks_make_pipelines_of_the_layers_and_replicas_of_the_batch(nodes, most, pipe, expected):
    """Of six layers and four sequences: pipelines of one to six ranks, and one, two or four replicas."""
    assert most_ranks(problem(), nodes, most, pipe) == expected


@pytest.mark.parametrize(("gain", "best"), [(1.0, (1, 4)), (0.99, (1, 4)), (0.9, (4, 1)), (0.0, (4, 1))])
def test_steps_are_those_of_replicas_whose_ranks_are_so_much_faster(gain, best):
    """Four cores; with t threads a rank is t ** gain times as fast. With one thread, four sequences take it 72 s."""
    training = problem()
    times = {count: [(8.0 / count**gain, 1.0)] for count in (1, 2, 4)}
    found = [*placements(training, profile_of(training), times, 1, 1, 4, 1)]
    assert [(each.ranks, each.threads) for each in found] == [(4, 1), (2, 2), (1, 4)]
    for each in found:
        assert each.speed == pytest.approx(each.threads**gain)
        assert each.plan.prediction.seconds == pytest.approx(72 / each.ranks / each.threads**gain)
    ranks, threads = best
    (*_, said) = table(found, 4, best)
    assert re.match(rf"on 4 cores of a node: {ranks} ranks? with {threads} threads? each", said)


def test_threads_with_which_the_plan_was_measured_have_its_time():
    training = problem()
    profile = replace(profile_of(training), optimizer=(0.25,), step=0.5, scale=1.25)
    times = {1: [(8.0, 3.0)], 2: [(5.0, 2.0)]}
    *_, same = placements(training, profile, times, 2, 1, 2, None)
    assert (same.ranks, same.threads) == (1, 2)
    assert same.plan.prediction.seconds == pytest.approx(find_plans(profile, training.space)[0].prediction.seconds)


def test_a_placement_without_a_plan_is_shown_and_not_proposed():
    training = problem(memory_limit=1)
    found = [*placements(training, profile_of(training), {1: [(1.0, 1.0)], 2: [(1.0, 1.0)]}, 1, 1, 2, None)]
    assert [each.plan for each in found] == [None, None]
    assert [line.split()[-3:] for line in table(found, 2, (1, 1))][2:] == [["no", "plan", "-"]] * 2


def test_the_table_ends_with_what_is_proposed_and_what_was_not_measured():
    training = problem()
    plan = find_plans(profile_of(training), training.space)[0]
    slow, fast = (replace(plan, prediction=replace(plan.prediction, seconds=seconds)) for seconds in (9.0, 7.0))
    found = [Placement(4, 1, 1.0, slow), Placement(2, 2, 1.9, fast)]
    lines = [*table(found, 4, (4, 1))]
    assert lines[0].split("  ")[0] == "ranks on a node" and lines[3].split()[:4] == ["2", "2", "1.90", "7"]
    assert lines[4].startswith("on 4 cores of a node: 2 ranks with 2 threads each")
    assert lines[5].startswith("start those and plan again")
    assert [*table(found, 4, (2, 2))] == lines[:5]


@pytest.fixture
def cores(monkeypatch):
    """Two cores for all ranks, whatever this machine has, no variable that sets threads, and short measurements."""
    for name in (processor.VARIABLE, *processor.THREAD_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(placement, "single_cores", lambda: [0, 1])
    for module in (probe, links):
        monkeypatch.setattr(module, "SECONDS", 0)
        monkeypatch.setattr(module, "REPEATS", (1, 1))
    monkeypatch.setattr(probe, "ROUNDS", 1)
    monkeypatch.setattr(links, "MANY", 2)
    monkeypatch.setattr(links, "FIRST", 1)
    before = processor.thread_count()
    yield
    processor.set_threads(before)


def lines_of(ranks, pipe=None, oversubscribed="", **keys):
    """What is said of placements on ranks that are threads, on each of them."""

    def on_each_rank(comm):
        measured = measured_on(comm, pipe=pipe, schedule="gpipe", microbatches=2, fixed=tuple(FIXED), **keys)
        with measured.mesh:
            found = replace(finding.find_plan(measured, "cpu"), oversubscribed=oversubscribed)
            return compare_placements(measured, found, pipe)

    return inprocess.run(ranks, on_each_rank)


@pytest.mark.parametrize(("ranks", "keys", "rows"), [(1, {}, ["2 1", "1 2"]), (2, {"pipe": 1}, ["2 1", "1 2"]),
                                                     (2, {"pipe": 2}, ["2 1"]), (2, {"seq": 2}, ["2 1"])])  # fmt: skip
def test_placements_are_measured_on_any_mesh(cores, ranks, keys, rows):
    before = processor.thread_count()
    lines, *others = lines_of(ranks, **keys)
    assert [" ".join(line.split()[:2]) for line in lines[2 : 2 + len(rows)]] == rows
    assert lines[2 + len(rows)].startswith("on 2 cores of a node: ")
    assert processor.thread_count() == before and not any(others)


@pytest.mark.parametrize(("own", "variable", "oversubscribed", "reason"), [
    ([0, 1], "2", "", "a variable sets 2 threads"), ([0, 1], "", "2 ranks share 1 core", "ranks share cores"),
    ([1], "", "", "one core alone"), ([], "", "", "one core alone"),
])  # fmt: skip
def test_it_says_why_nothing_is_compared(cores, monkeypatch, own, variable, oversubscribed, reason):
    monkeypatch.setenv(processor.VARIABLE, variable)
    monkeypatch.setattr(placement, "single_cores", lambda: own)
    for (line,) in lines_of(2, oversubscribed=oversubscribed):
        assert line.startswith("ranks and threads were not compared: ") and reason in line
