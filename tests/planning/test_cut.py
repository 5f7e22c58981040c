"""`mpipipe.cut` makes the stages of a rank from the layers of the whole model, the same however that is cut."""

import pytest

from mpipipe import Pipeline, cut, nn, schedules
from mpipipe.errors import ArgumentError, MismatchError
from mpipipe.job import inprocess

WIDTH = 6


SHARED = nn.Linear(WIDTH, WIDTH)


def model():
    return [made for _ in range(5) for made in (lambda: nn.Linear(WIDTH, WIDTH), nn.Gelu)]


def of_every_shape():
    for ranks in (1, 2, 3, 4):
        yield schedules.one_f_one_b(ranks, 4)
        yield schedules.interleaved_1f1b(ranks, 2, 4)
        if ranks > 1:
            yield schedules.zero_bubble_v(ranks, 4)


@pytest.mark.parametrize("schedule", list(of_every_shape()), ids=lambda made: f"{made.name}-{made.ranks}")
def test_every_layer_is_in_one_stage_and_has_the_values_that_it_has_uncut(schedule):
    whole, seen = nn.Stage([make() for make in model()], "float64", seed=3), {}
    for rank in range(schedule.ranks):
        stages = cut(model(), schedule, rank, dtype="float64", seed=3)
        assert [each.index for each in stages.stages] == list(schedule.stages_of(rank))
        assert stages.is_first == (schedule.placement[0] == rank) and stages.is_last == (schedule.placement[-1] == rank)
        for each, stage in zip(stages.stages, stages):
            assert (each.is_first, each.is_last) == (each.index == 0, each.index == schedule.stages - 1)
            assert each.parameters == sum(array.size for array in stage.parameters.values())
            assert each.bytes == 2 * 8 * stage.parameters.flat.size
            seen[each.index] = each.layers
            for name, array in stage.parameters.items():
                assert array.tobytes() == whole.parameters[name].tobytes()
    assert [place for index in range(schedule.stages) for place in seen[index]] == list(range(10))


def test_a_rank_makes_its_own_layers_alone_and_costs_move_the_cut():
    made = []
    layers = [lambda place=place: made.append(place) or nn.Gelu() for place in range(6)]
    stages = cut(layers, schedules.one_f_one_b(2, 4), 1, costs=[1, 1, 1, 1, 1, 5])
    assert made == [5] and [each.layers for each in stages.stages] == [range(5, 6)]
    assert str(stages).splitlines()[-1].split() == ["1", "5-5", "0", "0"]


def test_ranks_that_cut_in_different_ways_are_refused_before_a_message():
    schedule, other = schedules.interleaved_1f1b(2, 2, 4), schedules.zero_bubble_v(2, 4)

    def on_each_rank(comm, costs, running):
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(6)]
        with Pipeline(cut(layers, schedule, comm.rank, costs[comm.rank]), running, comm, loss=nn.mean_squared_error):
            pass

    with pytest.raises(MismatchError, match="cut of the layers"):
        inprocess.run(2, lambda comm: on_each_rank(comm, [None, [9, 1, 1, 1, 1, 1]], schedule))
    with pytest.raises(ArgumentError, match="cut for another schedule"):
        inprocess.run(2, lambda comm: on_each_rank(comm, [None, None], other))
    inprocess.run(2, lambda comm: on_each_rank(comm, [None, None], schedule))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((model()[:1], schedules.one_f_one_b(2, 2), 0), "fewer layers than stages"),
        ((model(), schedules.one_f_one_b(2, 2), 2), "no such rank"),
        ((model(), schedules.one_f_one_b(2, 2), -1), "no such rank"),
        ((model(), schedules.one_f_one_b(2, 2), 0, [1, 2]), "costs must say what each layer costs"),
        ((model(), schedules.one_f_one_b(2, 2), 0, [-1] * 10), "cost"),
        (([lambda: 3, nn.Gelu], schedules.one_f_one_b(2, 2), 0), r"layers\[0\] is not a layer"),
        (([SHARED, SHARED], schedules.one_f_one_b(2, 2), 0), "one Linear is layer 0 and layer 1"),
        (([SHARED, nn.Residual(SHARED)], schedules.one_f_one_b(2, 2), 1), r"one Linear is layer 0 and layer 1\.layer"),
    ],
)
def test_what_cannot_be_cut_is_refused(arguments, text):
    with pytest.raises(ArgumentError, match=text):
        cut(*arguments)
