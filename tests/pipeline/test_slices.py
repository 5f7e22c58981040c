"""Slices of sequences as units of a schedule: results are those of whole sequences, by micro-batch, for any cut."""

from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import dense
from support.dense import near
from support.late_messages import late_messages
from support.random_schedules import runnable_schedules

from mpipipe import Pipeline, nn
from mpipipe.adapters import ForeignLayer
from mpipipe.adapters.foreign import WithSkips
from mpipipe.errors import ArgumentError, MismatchError, NonFiniteError, StageError
from mpipipe.job import inprocess
from mpipipe.schedules import before_backwards, by_name, gpipe, simulate

WIDTH, POSITIONS, ROWS = 3, 11, 5
ALONE = nn.Position()


def in_place(schedule, slices):
    """Each action of a schedule as those of its slices, one after the other."""

    def cut(action):
        numbers = range(action.microbatch * slices, (action.microbatch + 1) * slices)
        return [action._replace(microbatch=n) for n in (numbers if action.op in "FRW" else reversed(numbers))]

    orders = [[each for action in order for each in cut(action)] for order in schedule.orders]
    return replace(schedule, orders=orders, slices=slices)


class Running(dense.Halves):
    """y_t = tanh((x_0 + ... + x_t) W): causal, so that slice s needs the sum of all before it, and its backward theirs.

    The sums of a sequence under way are kept by micro-batch, as attention over slices keeps keys and values.
    """

    slices = True

    def __init__(self, number, count):
        self.number, self.count, self.inner = number, count, dense.ShownStage(number, WIDTH, WIDTH)
        self.gradients, self.before, self.after = self.inner.gradients, {}, {}
        self.seen = []

    def forward(self, x, position=ALONE):
        microbatch, number = divmod(position.microbatch, self.count)
        self.seen.append((microbatch, number, position.keeps))
        assert self.count == 1 or (x.flags.c_contiguous and not x.flags.writeable)
        sums = np.cumsum(x, 1) + (self.before[microbatch, number] if number else 0.0)
        self.before[microbatch, number + 1] = sums[:, -1:]
        y, saved = self.inner.forward(sums)
        return y, (saved, position.microbatch)

    def backward_input(self, dy, saved):
        assert self.count == 1 or dy.flags.c_contiguous
        saved, unit = saved
        microbatch, number = divmod(unit, self.count)
        dsums, pending = self.inner.backward_input(dy, saved)
        later = self.after.pop((microbatch, number + 1)) if number + 1 < self.count else 0.0
        dx = np.cumsum(dsums[:, ::-1], 1)[:, ::-1] + later
        self.after[microbatch, number] = dx[:, :1]
        if number == 0:
            del self.after[microbatch, 0]
        return dx, pending

    def backward_weight(self, pending):
        self.inner.backward_weight(pending)


def data(rows=ROWS, positions=POSITIONS, seed=0):
    return np.random.default_rng(seed).normal(size=(2, rows, positions, WIDTH))


def whole(stages, x, target):
    """(loss, gradients, input gradient, output) of the whole batch in whole sequences."""
    layers = [Running(number, 1) for number in range(stages)]
    loss, dx, output = dense.through(layers, x, lambda y: dense.mean_squared(y, target))
    return loss, [layer.gradients.flat for layer in layers], dx, output


def squared(output, target):
    return dense.mean_squared(output, target)


squared.mean_over_entries = True


def weighted(output, target):
    return *dense.mean_squared(output, target), target.size


def run(schedule, body, loss=squared, ranks=None, **options):
    """Call `body(pipeline, inputs, targets)` on each rank, with its part of the batch; `ranks`: how they are run."""

    def job(comm):
        stages = [Running(number, schedule.slices) for number in schedule.stages_of(comm.rank)]
        with Pipeline(stages, schedule, comm, loss=loss, **options) as pipeline:
            return body(pipeline, *dense.placed(schedule, comm.rank, *data()))

    return inprocess.run(schedule.ranks, job, **(ranks or {}))


@pytest.mark.parametrize("loss", [squared, weighted])
@pytest.mark.parametrize("slices, lengths", [(3, (5, 4, 2)), (11, None)])
@pytest.mark.parametrize("name, ranks, chunks", [("gpipe", 1, 1), ("one_f_one_b", 2, 1), ("zero_bubble_v", 2, 2)])
def test_results_are_those_of_whole_sequences(name, ranks, chunks, slices, lengths, loss):
    microbatches = 2  # of 3 rows and of 2
    schedule = in_place(dense.build(name, ranks, chunks, microbatches), slices)
    inputs, targets = data()
    expected, gradients, dx, output = whole(schedule.stages, inputs, targets)
    parts = [whole(schedule.stages, inputs[at], targets[at])[0] for at in (slice(3), slice(3, 5))]

    def body(pipeline, *mine):
        for _ in range(2):
            result = pipeline.step(*mine)
            near(result.loss, expected)
            near(result.losses, parts)
            for stage in pipeline.stages:
                near(stage.gradients.flat, gradients[stage.number])
            if mine[0] is not None:
                assert len(result.input_grads) == microbatches
                near(np.concatenate(result.input_grads), dx)
        if "gpipe" in name:
            near(pipeline.evaluate(*mine), expected)
            one = [None if array is None else array[:1] for array in mine]  # fewer rows than micro-batches
            near(pipeline.evaluate(*one), whole(schedule.stages, inputs[:1], targets[:1])[0])
            found = pipeline.forward(mine[0])
            assert (found is None) == (mine[1] is None)
            if found is not None:
                near(found, output)

    run(schedule, body, loss, slice_lengths=lengths)


def test_micro_batches_of_lists_and_functions_of_other_lengths_are_cut_alike():
    """Each has its own even slices; a function is asked once for each micro-batch."""
    schedule, asked = in_place(by_name("one_f_one_b", ranks=2, microbatches=2), 3), []
    parts = [data(2, 7, 1), data(3, 9, 2)]
    losses, total = [whole(2, *part)[0] for part in parts], 2 * 7 + 3 * 9
    expected = (losses[0] * 2 * 7 + losses[1] * 3 * 9) / total

    def listed(pipeline, x, target):
        mine = [None if given is None else [part[i] for part in parts] for i, given in enumerate((x, target))]
        result = pipeline.step(*mine)
        near(result.loss, expected)
        near(result.losses, losses)
        if mine[0]:
            assert [grad.shape for grad in result.input_grads] == [part[0].shape for part in parts]

    def called(pipeline, x, target):
        def give(array, microbatch):
            asked.append(microbatch)
            return array[2 * microbatch : 2 * microbatch + 2]

        mine = [None if given is None else partial(give, given) for given in (x, target)]
        result = pipeline.step(*mine)
        near(result.loss, whole(2, *data()[:, :4])[0])

    run(schedule, listed)
    run(schedule, called)
    assert sorted(asked) == [0, 0, 1, 1]


def test_trees_are_cut_leaf_by_leaf_and_a_leaf_without_positions_is_refused_on_all_ranks():
    class Both:
        slices, gradients = True, None

        def forward(self, x):
            return x["a"] * x["b"], x

        def backward(self, dy, x):
            return {"a": dy * x["b"], "b": dy * x["a"]}

    schedule = in_place(gpipe(2, 2), 3)
    a, b = data()

    def job(comm):
        stages = [Both() if comm.rank == 0 else Running(0, 3)]
        with Pipeline(stages, schedule, comm, loss=squared) as pipeline:
            mine = ({"a": a, "b": b}, None) if comm.rank == 0 else (None, a)
            grads = pipeline.step(*mine).input_grads
            if grads:
                _, _, dx, _ = whole(1, a * b, a)
                near(np.concatenate([grad["b"] for grad in grads]), dx * a)
            mine = ({"a": a, "b": a[:, 0, 0].copy()}, None) if comm.rank == 0 else (None, a)
            with pytest.raises(ArgumentError, match="do not share an axis of positions"):
                pipeline.step(*mine)

    inprocess.run(2, job)


def test_recomputation_halves_and_accumulation():
    inputs, targets = data()
    _, gradients, dx, output = whole(2, inputs, targets)
    schedule = in_place(gpipe(2, 2), 3)

    def again(pipeline, *mine):
        for _ in range(2):
            pipeline.step(*mine, scale=0.5, accumulate=pipeline.steps_taken > 0)
        for stage in pipeline.stages:
            near(stage.gradients.flat, gradients[stage.number])
            assert stage.seen.count((0, 1, True)) == 4  # twice in each step

    run(schedule, again, recompute=True)
    run(in_place(before_backwards(gpipe(2, 2)), 3), again)

    def halves(pipeline, x, target):
        for count in (1, 2):
            y = pipeline.forward_train(x)
            if y is not None:
                near(y, output)
                y = squared(y, target)[1]
            grads = pipeline.backward(y, accumulate=count > 1)
            for stage in pipeline.stages:
                near(stage.gradients.flat, count * gradients[stage.number])
            if grads:
                near(np.concatenate(grads), dx)

    run(schedule, halves)


def test_frozen_stages_are_told_that_no_backward_follows():
    schedule = in_place(
        replace(gpipe(2, 1), trained_from=1, orders=[gpipe(2, 1).orders[0][:1], gpipe(2, 1).orders[1]]), 2
    )

    def job(comm):
        stage = Running(comm.rank, 2)
        if comm.rank == 0:
            stage.gradients = None
        with Pipeline([stage], schedule, comm, loss=squared, input_grads=False) as pipeline:
            pipeline.step(*dense.placed(schedule, comm.rank, *data()))
        return stage.seen

    assert inprocess.run(2, job) == [[(0, 0, keeps), (0, 1, keeps)] for keeps in (False, True)]


def test_check_mode_watches_slices_and_errors_name_them():
    schedule = in_place(gpipe(2, 2), 3)
    expected = whole(2, *data())[0]
    run(schedule, lambda pipeline, *mine: near(pipeline.step(*mine).loss, expected), check=True)

    class Fails(Running):
        kind = ValueError

        def forward(self, x, position):
            y, saved = super().forward(x, position)
            if position.microbatch == 4:
                if self.kind is ValueError:
                    raise ValueError("too warm")
                y = y * np.nan
            return y, saved

    def job(comm, kind, check):
        stage = Fails(comm.rank, 3) if comm.rank else Running(0, 3)
        stage.kind = kind
        with Pipeline([stage], schedule, comm, loss=squared, check=check) as pipeline:
            pipeline.step(*dense.placed(schedule, comm.rank, *data()))

    for kind, check, error in ((ValueError, False, StageError), (float, True, NonFiniteError)):
        with pytest.raises(error, match="stage 1, micro-batch 1, slice 1: ") as caught:
            inprocess.run(2, partial(job, kind=kind, check=check))
        assert (caught.value.microbatch, caught.value.slice) == (1, 1)


def test_modules_and_functions_of_others_say_themselves_whether_they_mix_positions():
    class Declared(ForeignLayer):
        mixes_positions = True

        def _declare(self):
            return {}

    alone = SimpleNamespace(mixes_positions=False)
    for entry, mixes in ((alone, False), ((alone, {}), False), (SimpleNamespace(), True), ((len, {}), True)):
        assert Declared(WithSkips(entry)).mixes_positions is mixes


def loss_of(**attributes):
    def loss(output, target):
        return dense.mean_squared(output, target)

    vars(loss).update(attributes)
    return loss


class Silent(dense.ShownStage):
    """A stage that does not say that it takes slices."""


@pytest.mark.parametrize(
    "change, says",
    [
        (dict(stage=lambda number: Silent(number, WIDTH, WIDTH)), "Silent, which does not say that it takes slices"),
        (dict(loss=loss_of(over_batch=True)), "loss.over_batch"),
        (dict(loss=loss_of(mean_over_entries=False)), "loss.mean_over_entries = False"),
        (dict(lengths=(4, 7)), "this one has 3 slices"),
        (dict(lengths=(4, 0, 7)), "this one has 3 slices"),
        (dict(lengths=(4, 4, 4)), "4 + 4 + 4 = 12"),
        (dict(slices=12), "12 slices, 11 positions"),
        (dict(slices=1, lengths=(11,)), "this one has 1 slice"),
        (dict(axis=1), "do not share an axis of positions"),
    ],
)
def test_what_does_not_go_together_with_slices_is_refused_on_all_ranks_before_a_message(change, says):
    slices = change.get("slices", 3)
    schedule = in_place(gpipe(2, 2), slices)
    x, target = data()
    if "axis" in change:
        x = x[:, 0, 0].copy()
    make = change.get("stage", lambda number: Running(number, slices))

    def job(comm):
        loss, lengths = change.get("loss", squared), change.get("lengths")
        mine = (x, None) if comm.rank == 0 else (None, target)
        with pytest.raises(ArgumentError) as caught:
            with Pipeline([make(comm.rank)], schedule, comm, loss=loss, slice_lengths=lengths) as pipeline:
                pipeline.step(*mine)
        assert says in str(caught.value)
        return str(caught.value)

    assert len({*inprocess.run(2, job)}) == 1


def test_ranks_with_other_lengths_are_refused():
    schedule = in_place(gpipe(2, 2), 2)

    def job(comm):
        with pytest.raises(MismatchError, match="slice_lengths"):
            Pipeline([Running(comm.rank, 2)], schedule, comm, loss=squared, slice_lengths=(5, 6)[:: 1 - 2 * comm.rank])

    inprocess.run(2, job)


@settings(max_examples=50)
@given(
    schedule=st.integers(1, 4).flatmap(runnable_schedules),
    synchronous=st.booleans(),
    late=st.sampled_from([0.0, 0.9]),
    tag_ub=st.sampled_from([31, 32767]),
    seed=st.integers(0, 99),
)
def test_any_legal_order_gives_the_gradients_and_the_simulated_peak(schedule, synchronous, late, tag_ub, seed):
    """Also of whole sequences, and whenever messages come."""
    inputs, targets = data()
    expected, gradients, dx, _ = whole(schedule.stages, inputs, targets)
    runs = Counter(
        (action.stage, action.microbatch) for order in schedule.orders for action in order if action.op in "FR"
    )

    def body(pipeline, *mine):
        result = pipeline.step(*mine)
        near(result.loss, expected)
        for stage in pipeline.stages:
            near(stage.gradients.flat, gradients[stage.number])
            seen = Counter((stage.number, m * schedule.slices + n) for m, n, _ in stage.seen)
            assert seen == {place: count for place, count in runs.items() if place[0] == stage.number}
        if mine[0] is not None:
            near(np.concatenate(result.input_grads), dx)
        return pipeline.peak_activations

    with late_messages(seed, late):
        found = run(schedule, body, ranks=dict(synchronous=synchronous, tag_ub=tag_ub))
    assert found == simulate(schedule).peak_activations
