"""Weights that a loss returns: the mean over what counts, over all micro-batches of all replicas, as on one process."""

import itertools
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import dense
from support.dense import near
from support.random_schedules import runnable_schedules
from support.rings import refused
from support.small_gpt import MODEL, build, parts_of, text

from mpipipe import Mesh, Pipeline, nn, optim
from mpipipe.attention import Layout, Ring
from mpipipe.errors import ArgumentError, MismatchError, PeerError
from mpipipe.job import inprocess
from mpipipe.schedules import gpipe, interleaved_1f1b, one_f_one_b

WIDTH = 3


def tanh(number):
    return dense.ShownStage(number, WIDTH, WIDTH)


def masked(unit=1.0):
    """The mean square over the cells of a mask; without any it is NaN, with a gradient of NaN."""

    def loss(output, target):
        goal, mask = target
        with np.errstate(invalid="ignore"):
            count = np.float64(mask.sum())
            difference = (output - goal) * mask
            return (difference**2).sum() / count, 2 * difference / count, unit * count

    return loss


def masked_with_factor(unit=1.0):
    def loss(output, target, factor):
        value, gradient, weight = masked(unit)(output, target)
        return value, gradient * factor, weight

    return loss


def dense_step(stages, batches):
    """(loss, gradients by stage, input gradients by batch) of all batches on one process."""
    model, slopes, loss = [tanh(number) for number in range(stages)], [], 0.0
    total = sum(mask.sum() for _, (_, mask) in batches)
    for x, (goal, mask) in batches:

        def of_cells(output, goal=goal, mask=mask):
            difference = (output - goal) * mask
            return (difference**2).sum() / total, 2 * difference / total

        value, slope, _ = dense.through(model, x, of_cells)
        loss += value
        slopes.append(slope)
    return loss, [stage.gradient for stage in model], slopes


def cells(rng, microbatches, length):
    """Micro-batches of one length; of some no cell counts, and of the first one all."""
    batches = []
    for number in range(microbatches):
        shape = int(rng.integers(1, 4)), length, WIDTH
        mask = rng.random(shape) < rng.choice([0, 0.2, 0.7])
        x, goal = rng.normal(size=(2, *shape))
        batches.append((x, (goal, mask | (number == 0))))
    return batches


def check_steps(comm, schedule, data, seed, loss, scale):
    """Some steps on `data` replicas, each with shards of a length of its own, have loss and gradients of the whole."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 5, data)
    with Mesh(comm, pipe=schedule.ranks, data=data) as mesh:
        stages = [tanh(number) for number in schedule.stages_of(mesh.pipe.rank)]
        given = [cells(rng, schedule.microbatches, length) for length in lengths]
        expected = dense_step(schedule.stages, [each for batches in given for each in batches])
        mine = given[mesh.data.rank]
        feeds, goals = ([batch[part] for batch in mine] for part in (0, 1))
        batch = dense.placed(schedule, mesh.pipe.rank, feeds, goals)
        first = mesh.data.rank * schedule.microbatches
        with Pipeline(stages, schedule, mesh.pipe, loss, replicas=mesh.replicas) as pipe:
            near(pipe.evaluate(*batch), expected[0])
            bits = []
            for _ in range(3):
                result = pipe.step(*batch, scale=scale)
                flats = [stage.gradients.flat.copy() for stage in stages]
                near(result.loss, expected[0])
                for m, (_, (_, mask)) in enumerate(mine):
                    assert np.isnan(result.losses[m]) == (not mask.any())
                for number, flat in zip(schedule.stages_of(mesh.pipe.rank), flats):
                    near(flat / scale, expected[1][number].reshape(-1))
                for m, slope in enumerate(result.input_grads or ()):
                    near(slope, expected[2][first + m])
                bits.append([flat.tobytes() for flat in flats])
            assert all(each == bits[0] for each in bits), "the provisional unit has changed bits"


@settings(max_examples=25)
@given(
    schedule=runnable_schedules(),
    data=st.integers(1, 3),
    seed=st.integers(0, 10**6),
    make=st.sampled_from([masked, masked_with_factor]),
    unit=st.sampled_from([1, 1 / 3, 1e-9, 5e14, 1e-200, 1e200]),
    scale=st.sampled_from([1.0, 1024.0]),
    synchronous=st.booleans(),
)
def test_loss_and_gradients_are_those_of_one_process(schedule, data, seed, make, unit, scale, synchronous):
    def job(comm):
        check_steps(comm, schedule, data, seed, make(unit), scale)

    inprocess.run(schedule.ranks * data, job, synchronous=synchronous)


def of_tokens(output, target):
    """Cross-entropy over the targets that are not negative, in plain numpy."""
    valid = target >= 0
    x = output - output.max(-1, keepdims=True)
    log = x - np.log(np.exp(x).sum(-1, keepdims=True))
    chosen = np.eye(x.shape[-1])[np.where(valid, target, 0)] * valid[..., None]
    count = max(int(valid.sum()), 1)
    return -float((log * chosen).sum()) / count, (np.exp(log) * valid[..., None] - chosen) / count, int(valid.sum())


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_padded_text_of_a_tied_model_and_the_norm_of_its_gradients(comm, max_norm):
    """Tied parameters on several ranks, a split backward; clipping sees corrected gradients."""
    x, targets = text(9)
    targets[np.random.default_rng(3).random(targets.shape) < 0.4] = -1
    targets[:4] = -1  # nothing valid in the first micro-batch

    def run(group, schedule):
        stages = build(schedule, group.rank, tied=True)
        optimizer = optim.SGD(stages, lr=0.1)
        with Pipeline(stages, schedule, group, loss=of_tokens) as pipeline:
            losses = []
            for _ in range(3):
                losses.append(pipeline.step(*dense.placed(schedule, group.rank, x, targets)).loss)
                optim.clip_by_global_norm(stages, max_norm, group)
                optimizer.step()
        return losses, {name: stage.parameters[name].copy() for stage in stages for name in stage.parameters}

    alone = parts_of(comm, 1)
    losses, expected = run(alone, gpipe(1, 1))
    alone.Free()
    found, parameters = run(comm, dense.build("zero_bubble_h1", comm.size, 1, 3))
    near(found, losses)
    for name, array in parameters.items():
        near(array, expected[name])


@pytest.mark.parametrize("layout, extra", [("contiguous", 1), ("zigzag", 3)])
def test_shards_of_unequal_length_need_no_weight_with_the_losses_of_nn(comm, layout, extra):
    """The mean is over positions, not over the means of the ranks: target entries count."""
    length = 2 * comm.size + extra
    whole = np.random.default_rng(0).integers(0, MODEL["vocab"], (4, length + 1))
    alone = parts_of(comm, 1)

    def run(group, ring, positions):
        cut = Layout(layout, group.size, length)
        stages = build(gpipe(1, 2), 0, attend=ring, token_positions=positions, seq_len=length)
        batch = [cut.shard(part, group.rank) for part in (whole[:, :-1], whole[:, 1:])]
        with Pipeline(stages, gpipe(1, 2), alone, nn.softmax_cross_entropy, replicas=group) as pipeline:
            return pipeline.evaluate(*batch), pipeline.step(*batch).loss, stages[0].gradients.flat

    cut = Layout(layout, comm.size, length)
    *losses, gradient = run(comm, Ring(comm, layout=cut), cut.positions(comm.rank))
    *expected, slope = run(alone, None, None)
    near(losses, expected)
    near(gradient, slope)
    assert sum(cut.weight(rank) for rank in range(comm.size)) == length
    alone.Free()


@pytest.mark.parametrize("made", ["one stage", "one array"])
def test_two_places_that_add_to_one_gradient(alone, made):
    slopes = []
    x, goal = np.random.default_rng(0).normal(size=(2, 6, WIDTH))
    for loss in (always(5.0), nn.mean_squared_error):
        first, other = tanh(0), tanh(0)
        other.gradients = first.gradients
        stages = [first, first if made == "one stage" else other]
        with Pipeline(stages, interleaved_1f1b(1, 2, 2), alone, loss) as pipe:
            pipe.step(x, goal)
        slopes.append(first.gradients.flat)
    near(*slopes)


# -- Weights of losses that make no sense, and losses that do not say what they are means over: refused on all ranks ---


def pipeline_of(mesh, loss):
    schedule = one_f_one_b(mesh.pipe.size, 2)
    return schedule, Pipeline([tanh(mesh.pipe.rank)], schedule, mesh.pipe, loss, replicas=mesh.replicas)


def mesh_of(comm):
    return Mesh(comm, pipe=comm.size // 2 or 1)


def batch_of(mesh, schedule, length=2):
    """This rank's part of a batch of ones; `length` may be a list, for each micro-batch one."""
    shapes = [(2, each, WIDTH) for each in length] if isinstance(length, list) else (4, length, WIDTH)
    x = list(map(np.ones, shapes)) if isinstance(shapes, list) else np.ones(shapes)
    return dense.placed(schedule, mesh.pipe.rank, x, x)


def fails(mesh, pipeline, batch, match):
    """A rank of the last stage raises an error that says so, and all others hear of it."""
    with pytest.raises((ArgumentError, PeerError), match=match) as caught:
        pipeline.step(*batch)
    kinds = mesh.comm.allgather((type(caught.value), mesh.pipe.rank == mesh.pipe.size - 1))
    assert (ArgumentError, True) in kinds and (ArgumentError, False) not in kinds


def always(weight):
    """A loss that has this weight for each micro-batch."""
    return lambda output, target: (*nn.mean_squared_error(output, target), weight)


def sometimes(first):
    """A loss with a weight for each second micro-batch."""
    calls = itertools.count(first)
    return lambda output, target: (1.0, output) if next(calls) % 2 else (1.0, output, 2.0)


NO_WEIGHTS = [-0.5, np.nan, 10**400, None, np.ones(2), 1j]


@pytest.mark.parametrize(
    "make, match",
    [
        *((partial(always, weight), "the weight of a loss") for weight in NO_WEIGHTS),
        *((partial(sometimes, first), "for some micro-batches only") for first in (0, 1)),
    ],
)
def test_weights_that_make_no_sense_are_refused(comm, make, match):
    mesh = mesh_of(comm)
    schedule, pipeline = pipeline_of(mesh, make())
    fails(mesh, pipeline, batch_of(mesh, schedule), match)


@pytest.mark.parametrize("weight", [3, np.float32(3), np.array(3.0)])
def test_kinds_of_numbers(comm, weight):
    with mesh_of(comm) as mesh:
        schedule, pipeline = pipeline_of(mesh, always(weight))
        with pipeline:
            batch = batch_of(mesh, schedule)
            assert pipeline.step(*batch).loss == pytest.approx(pipeline.evaluate(*batch), rel=1e-15)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("call", ["step", "evaluate"])
def test_weights_on_some_replicas_only(comm, call):
    with mesh_of(comm) as mesh:
        odd = mesh.data.rank == 1
        schedule, pipeline = pipeline_of(mesh, lambda y, t: (1.0, y, 2.0) if odd else (1.0, y))
        batch = batch_of(mesh, schedule)
        with pipeline:
            refused(comm, MismatchError, "on some replicas only", lambda: getattr(pipeline, call)(*batch))


def test_a_batch_without_anything_valid_is_refused_on_all_ranks_and_the_next_one_is_right(comm):
    with mesh_of(comm) as mesh:
        schedule, pipeline = pipeline_of(mesh, masked())
        x = np.random.default_rng(mesh.data.rank).normal(size=(4, 2, WIDTH))
        nothing, all_of_it = ((x, (x + 1, np.full(x.shape, valid))) for valid in (False, True))
        with pipeline:
            for call in (pipeline.evaluate, pipeline.step, pipeline.step):
                batch = dense.placed(schedule, mesh.pipe.rank, *nothing)
                refused(comm, ArgumentError, r"add up to 0\.0", partial(call, *batch))
            result = pipeline.step(*dense.placed(schedule, mesh.pipe.rank, *all_of_it))
        whole = [np.random.default_rng(rank).normal(size=(4, 2, WIDTH)) for rank in range(mesh.data.size)]
        near(result.loss, dense_step(schedule.stages, [(x, (x + 1, np.ones(x.shape))) for x in whole])[0])


def test_a_stage_that_does_not_show_its_gradients(alone):
    pipeline = Pipeline([dense.TanhStage(0, WIDTH, WIDTH)], gpipe(1, 2), alone, lambda y, t: (1.0, y, 2.0))
    batch = np.ones((4, 2, WIDTH))
    assert pipeline.evaluate(batch, batch) == 1.0
    with pytest.raises(ArgumentError, match="does not show its gradients"):
        pipeline.step(batch, batch)


# -- losses of two values ----------------------------------------------------------------------------------------------


def mean_of_squares(output, target):
    return nn.mean_squared_error(output, target)


def by_rows(output, target):
    return nn.mean_squared_error(output, target)


by_rows.mean_over_entries = False


@pytest.mark.parametrize("lengths", [[1, 3], "by replica"])
def test_a_loss_that_does_not_say_what_it_is_a_mean_over(comm, lengths):
    """Refused where rows differ in their target entries, between micro-batches or replicas; never a mean of means."""
    mesh = mesh_of(comm)
    if lengths == "by replica" and mesh.data.size == 1:
        pytest.skip("needs replicas")
    schedule, pipeline = pipeline_of(mesh, mean_of_squares)
    pipeline.evaluate(*batch_of(mesh, schedule))
    lengths = 1 + mesh.data.rank if lengths == "by replica" else lengths
    fails(mesh, pipeline, batch_of(mesh, schedule, lengths), "more target")


@pytest.mark.parametrize("loss, shares", [(nn.mean_squared_error, [1, 3]), (by_rows, [1, 1])])
def test_a_loss_that_says_what_it_is_a_mean_over(comm, loss, shares):
    with mesh_of(comm) as mesh:
        schedule, pipeline = pipeline_of(mesh, loss)
        with pipeline:
            result = pipeline.step(*batch_of(mesh, schedule, [1, 3]))
        assert result.loss == pytest.approx(np.average(result.losses, weights=shares), rel=1e-15)


@pytest.mark.mpi(min_size=2)
def test_losses_of_replicas_that_are_means_over_different_things(comm):
    with mesh_of(comm) as mesh:
        schedule, pipeline = pipeline_of(mesh, by_rows if mesh.data.rank else nn.mean_squared_error)
        with pipeline, pytest.raises(MismatchError, match="means over different things"):
            pipeline.step(*batch_of(mesh, schedule))
