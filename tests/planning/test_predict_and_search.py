"""Predictions and the search: against closed forms, trying everything, and what a training makes of the same choice."""

import itertools
from dataclasses import replace

import pytest
from support.text_plan import text_plan

from mpipipe import schedules
from mpipipe.cli.plan import table
from mpipipe.errors import ArgumentError, ConfigError
from mpipipe.language.models.fine_tuning import FineTuning
from mpipipe.planning import Choice, LayerCosts, Link, Profile, RankCosts, Sizes, Space, find_plans, predict, search
from mpipipe.planning.problem import layers_with
from mpipipe.schedules import checks
from mpipipe.train import TrainConfig
from mpipipe.train.config import parse_bytes
from mpipipe.train.training_plan import in_words

ROWS = 8
NO_LINK = Link()


def profile(ranks=2, layers=(1.0,) * 6, speeds=None, link=NO_LINK, **more):
    """A profile whose layers of cost c take c forward and 2 c backward for one sequence; each is a kind of its own."""
    speeds = speeds or (1.0,) * ranks
    sizes = range(1, ROWS + 1)

    def costs(size, speed):
        return RankCosts(tuple(LayerCosts(*(size * c * speed * part for part in (1, 2, 1, 1, 1))) for c in layers))

    kept = tuple(range(100, 100 + len(layers)))
    given = dict(
        kinds=tuple(range(len(layers))),
        costs={size: tuple(costs(size, speed) for speed in speeds) for size in sizes},
        links=dict.fromkeys(sizes, link),
        sizes={size: [*(Sizes(saved=size * each) for each in kept[:-1]), Sizes(saved=size * kept[-1], loss=size)]
               for size in sizes},
        states=(1000,) * len(layers),
    )  # fmt: skip
    return Profile(**{**given, **more})


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 4), (2, 4), (3, 8), (6, 8)])
def test_a_step_of_even_stages_is_the_closed_form_of_1f1b(ranks, microbatches):
    choice = Choice("one_f_one_b", 1, microbatches, (6 // ranks,) * ranks)
    found = predict(profile(ranks), choice, ROWS)
    of_one = 3 * (6 // ranks) * ROWS / microbatches  # forward and backward of a micro-batch
    assert found.seconds == pytest.approx((microbatches + ranks - 1) * of_one)
    assert found.bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1))


def test_a_prediction_is_scaled_to_real_steps_and_micro_batches_count_by_their_mean():
    choice = Choice("gpipe", 1, 4, (4, 2))
    bare = predict(profile(), choice, ROWS).seconds
    assert bare == 4 * 3 * 2 * 4 + 2 * 2 * 3
    assert predict(profile(scale=3.0), choice, ROWS).seconds == 3 * bare
    assert predict(profile(), choice, ROWS - 1).seconds == pytest.approx(bare * (ROWS - 1) / ROWS)


@pytest.mark.parametrize("again", [1.0, 0.25])
def test_a_forward_that_is_run_again_costs_what_that_adds(again):
    """The executor has one more action; neither its messages nor the loss come again."""
    rank = RankCosts((LayerCosts(1.0, 2.0, 1.0, 1.0, again),) * 6, loss=5.0, action=7.0)
    one = profile(1, costs={ROWS: (rank,)})
    once, twice = (predict(one, Choice("gpipe", 1, 1, (6,), recompute=each), ROWS).seconds for each in (False, True))
    assert twice - once == pytest.approx(6 * again + 7)


def test_messages_and_the_loss_cost_time():
    lossy = profile(link=Link(message=0.25, transfer=2.0))
    lossy = replace(lossy, costs={s: tuple(replace(r, loss=0.5, action=0.125) for r in v) for s, v in
                                  lossy.costs.items()})  # fmt: skip
    found = predict(lossy, Choice("gpipe", 1, 1, (3, 3)), ROWS)
    # chain: four actions with a message each and the executor, two transfers, one loss of 8 sequences
    assert found.seconds == pytest.approx(6 * 8 * 3 + 4 * (0.25 + 0.125) + 2 * 2.0 + 0.5)


def test_memory_is_states_and_what_the_schedule_holds():
    found = predict(profile(), Choice("one_f_one_b", 1, 8, (2, 4)), ROWS)
    first, second = 100 + 101, 102 + 103 + 104 + 105 + 1  # of one sequence, with the gradient of the loss
    assert found.memory == (2 * 1000 + 2 * first, 4 * 1000 + second)
    again = predict(profile(), Choice("one_f_one_b", 1, 8, (2, 4), recompute=True), ROWS)
    assert again.memory == (2000 + first, 4000 + second)
    split = profile()
    split = replace(split, sizes={s: [replace(e, pending=300) for e in each] for s, each in split.sizes.items()})
    assert predict(split, Choice("one_f_one_b", 1, 8, (2, 4)), ROWS).memory == found.memory
    assert predict(split, Choice("zero_bubble_h1", 1, 8, (2, 4)), ROWS).memory[1] >= 4000 + 4 * 300


@pytest.mark.parametrize("keys", [dict(schedule="interleaved_zero_bubble", chunks=2), dict(recompute_limit=1),
                                  dict(freeze=("0.*", "1.*"))])  # fmt: skip
def test_the_schedule_is_the_one_that_a_training_runs(keys):
    config = TrainConfig(dim=16, layers=3, heads=2, seq_len=8, batch=8, microbatches=4, **keys)
    tuning = FineTuning(config.freeze)
    task, plan = text_plan(config, 2, tuning=tuning)
    trained = layers_with(task.trained())
    counts = tuple(stop - start for start, stop in plan.layer_ranges)
    choice = Choice(config.schedule, config.chunks, 4, counts, recompute_limit=config.recompute_limit)
    assert choice.build(2, trained) == plan.schedule
    assert choice.ranges == plan.layer_ranges
    given = replace(config, partition=counts)
    assert text_plan(given, 2, tuning=tuning)[1] == plan


def everything(given, space):
    """The fastest step of all partitions into two or four stages, of all schedules."""
    best = None
    for (name, chunks), microbatches in itertools.product(space.forms, space.microbatches):
        stages = chunks * space.ranks
        for cuts in itertools.combinations(range(1, space.layers), stages - 1):
            edges = (0, *cuts, space.layers)
            partition = tuple(stop - start for start, stop in itertools.pairwise(edges))
            found = predict(given, Choice(name, chunks, microbatches, partition), space.rows).seconds
            best = found if best is None else min(best, found)
    return best


@pytest.mark.parametrize("layers", [(1.0,) * 6, (0.1, 2.0, 1.0, 2.0, 1.0, 3.0)])
def test_the_best_of_few_layers_is_the_best_of_all(layers):
    given = profile(layers=layers, link=Link(0.05, 0.3))
    space = Space(2, 6, ROWS, {"microbatches": 4})
    assert find_plans(given, space)[0].seconds == pytest.approx(everything(given, space), rel=0.01)


def test_candidates_that_are_too_large_are_left_out(monkeypatch):
    for module in (checks, schedules):
        monkeypatch.setattr(module, "MOST_UNITS", 2 * 8)
    found = {(plan.choice.chunks, plan.choice.microbatches) for plan in find_plans(profile(), Space(2, 6, ROWS))}
    assert {(1, 8), (2, 4), (3, 2)} <= found and all(chunks * count <= 8 for chunks, count in found)
    monkeypatch.setattr(search, "cut_by_time", None)  # refused before layers are cut
    with pytest.raises(ArgumentError, match="the schedule is too large"):
        find_plans(profile(), Space(2, 6, ROWS, {"chunks": 3, "microbatches": 8}))


def test_a_slow_rank_gets_fewer_layers_and_a_slow_link_fewer_chunks():
    slow = find_plans(profile(speeds=(1.0, 4.0)), Space(2, 6, ROWS, {"schedule": "one_f_one_b"}))[0].choice
    assert slow.partition == (5, 1)
    fixed = {"microbatches": 4, "schedule": "interleaved_1f1b"}
    fast, far = (find_plans(profile(link=Link(0, t)), Space(2, 6, ROWS, fixed))[0].choice.chunks for t in (0, 50))
    assert fast > far == 1


def test_what_is_fixed_stays():
    fixed = {"schedule": "gpipe", "microbatches": 2, "partition": (1, 5), "recompute": True}
    plans = find_plans(profile(), Space(2, 6, ROWS, fixed))
    assert [plan.choice for plan in plans] == [Choice("gpipe", 1, 2, (1, 5), recompute=True)]


def test_the_limit_is_kept_by_running_forwards_again_and_the_least_one_works():
    given, space = profile(), Space(2, 6, ROWS, {"microbatches": 4})
    free = find_plans(given, space)
    limit = min(plan.peak for plan in free) - 1
    kept = find_plans(given, space, limit)
    assert all(plan.peak <= limit for plan in kept)
    assert any(plan.schedule.recomputed for plan in kept)
    assert kept[0].seconds >= free[0].seconds
    with pytest.raises(ConfigError, match="no plan keeps this memory limit") as caught:
        find_plans(given, space, 100)
    least = int(str(caught.value).partition("(")[2].partition(" bytes")[0])
    assert find_plans(given, space, least)[0].peak == least
    with pytest.raises(ConfigError, match=f"{least} bytes"):
        find_plans(given, space, least - 1)


def test_a_slower_cut_that_keeps_the_limit_is_taken():
    fixed = {"schedule": "one_f_one_b", "microbatches": 4, "recompute": False}
    given, space = profile(speeds=(1.0, 4.0)), Space(2, 6, ROWS, fixed)
    uneven = find_plans(given, space)[0]
    even = predict(given, Choice("one_f_one_b", 1, 4, (3, 3)), ROWS)
    assert uneven.choice.partition == (5, 1) and even.peak < uneven.peak
    assert find_plans(given, space, even.peak)[0].peak <= even.peak


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (dict(ranks=7), "7 ranks, 6 layers"),
        (dict(fixed={"microbatches": 9}), "microbatches = 9, .* 8 sequences"),
        (dict(fixed={"partition": (1, 2)}), r"partition = \(1, 2\), .* 6 layers"),
        (dict(fixed={"schedule": "gpipe", "chunks": 2}), "schedule = gpipe, chunks = 2"),
        (dict(fixed={"chunks": 4}), "chunks = 4"),
        (dict(fixed={"schedule": "gpip"}), "schedule = gpip"),
        (dict(fixed={"partition": (2, 2, 2)}), "2 ranks"),
    ],
)
def test_a_space_without_plans_is_refused(keys, text):
    with pytest.raises(ConfigError, match=f"no schedule fits the options that were given\n.*{text}"):
        Space(**{**dict(ranks=2, layers=6, rows=8), **keys})


def test_the_numbers_of_micro_batches():
    assert Space(2, 6, 8).microbatches == [2, 4, 8]
    assert Space(4, 6, 3).microbatches == [3]
    assert Space(1, 6, 7).microbatches == [1, 7]
    many = Space(2, 6, 720).microbatches
    assert len(many) == 5 and many[0] == 2 and all(720 % count == 0 for count in many)
    assert Space(2, 6, 37).microbatches == [32]  # of unequal sizes: a prime number has no divisor in reach


def test_bytes_are_read_and_what_is_no_number_of_them_is_refused():
    for text, count in (("0", 0), ("900", 900), ("1.5k", 1536), ("2M", 2 << 20), ("1G", 1 << 30)):
        assert parse_bytes(text) == count
    for text in ("", "G", "nan", "-1", "inf", "1 000", "5Q", "1e400", "5iB", "5 iB"):
        with pytest.raises(ArgumentError, match="no number of bytes"):
            parse_bytes(text)


def test_plans_are_different_schedules_and_the_table_has_ten_with_the_best_first():
    plans = find_plans(profile(), Space(2, 6, ROWS))
    orders = [(plan.schedule.placement, plan.schedule.orders) for plan in plans]
    assert len(set(orders)) == len(orders)
    lines = list(table(plans))
    assert len(lines) == 12 and lines[2].startswith(plans[0].choice.schedule)
    assert lines[2].split()[-1] == "0.0%"
    assert plans[0].choice.schedule in in_words(plans[0])


def test_slices_of_a_sequence_share_what_was_measured_of_it():
    """One micro-batch on two ranks, in n slices: (n + 1) / n forwards and backwards, which take 3 together."""
    rank = RankCosts((LayerCosts(1.0, 2.0, 1.0, 1.0, 1.0),))
    profile = Profile((0, 0), {1: (rank, rank)}, {1: Link()}, {1: [Sizes(saved=100)] * 2}, (8, 8))
    for slices in (1, 2, 8):
        found = predict(profile, Choice("one_f_one_b", 1, 1, (1, 1), slices=slices), rows=1)
        assert found.seconds == pytest.approx(3 * (slices + 1) / slices)
        assert found.memory == (108, 108)
    found = Space(ranks=2, layers=4, rows=2, fixed={"slices": 4})
    assert 1 in found.microbatches
