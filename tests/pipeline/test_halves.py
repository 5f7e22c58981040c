"""Losses over all outputs of a batch, gradients from outside, and gradients that are added up: as on one process."""

from contextlib import suppress
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import dense, small_gpt
from support.dense import near
from support.random_schedules import runnable_schedules
from support.small_gpt import text

from mpipipe import Mesh, Pipeline, arrays, nn, optim
from mpipipe.errors import ArgumentError, PeerError, StageError
from mpipipe.job import inprocess
from mpipipe.schedules import gpipe, looped_bfs, simulate

WIDTH = 3


def tanh(number):
    return dense.ShownStage(number, WIDTH, WIDTH)


def covariance(output, target):
    """(value, gradient) of a loss in which every row meets every other: |Y'Y / n - T'T / n|^2."""
    off = (output.T @ output - target.T @ target) / len(output)
    return float((off**2).sum()), 4 * output @ off / len(output)


def of_lists(outputs, targets):
    """The same of a list of micro-batches, as lists."""
    value, gradient = covariance(np.concatenate(outputs), np.concatenate(targets))
    return value, np.split(gradient, np.cumsum([len(output) for output in outputs])[:-1])


def over_batch(call, weight=None):
    """A loss over the batch, with a weight if so asked."""

    def loss(outputs, targets):
        assert isinstance(outputs, list) and isinstance(targets, list)
        assert not (isinstance(targets[0], np.ndarray) and targets[0].flags.writeable)
        return call(outputs, targets) if weight is None else (*call(outputs, targets), weight)

    loss.over_batch = True
    return loss


def dense_step(stages, x, target, share=1.0):
    """(value, gradients by stage, input gradient) of a batch on one process, in plain numpy; all times `share`."""
    layers = [tanh(number) for number in range(stages)]
    value, dx, _ = dense.through(layers, x, lambda y: [share * each for each in covariance(y, target)])
    return value, [layer.gradient for layer in layers], dx


def is_right(schedule):
    """Whether the last stage has all forwards before its first backward."""
    last = schedule.stages - 1
    ops = [action.op for action in schedule.orders[schedule.placement[last]] if action.stage == last]
    return "F" not in ops[min(map(ops.index, {"B", "I"} & {*ops})) :]


def outside(pipe, batch, scale, share):
    """A step of which the caller computes loss and gradients; (value or None, input gradients)."""
    outputs, value, gradients = pipe.forward_train(batch[0]), None, None
    if outputs is not None:
        value, gradients = of_lists(outputs, batch[1])
        gradients = [share * part for part in gradients]
    return value, pipe.backward(gradients, scale)


def check_steps(comm, schedule, data, seed, kind, scale, weights):
    """Steps of `kind` have losses, gradients and peaks of one process; another order than needed is refused."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(1, 4, (data, schedule.microbatches))
    batches = [[rng.normal(size=(2, count, WIDTH)) for count in mine] for mine in rows]
    whole = [[np.concatenate([batch[part] for batch in mine]) for part in (0, 1)] for mine in batches]
    # each replica's value counts by its rows or weight; gradients from outside are sums, which the caller divides
    counts = np.arange(1.0, data + 1) if weights else rows.sum(1)
    shares = np.full(data, 1 / data) if kind == "outside" else counts / counts.sum()
    found = [dense_step(schedule.stages, *each, share) for each, share in zip(whole, shares)]
    expected = [sum(each) for each in zip(*(gradients for _, gradients, _ in found))]
    with Mesh(comm, pipe=schedule.ranks, data=data) as mesh:
        me, numbers = mesh.data.rank, schedule.stages_of(mesh.pipe.rank)
        stages = [tanh(number) for number in numbers]
        loss = over_batch(of_lists, counts[me] if weights else None) if kind == "over batch" else dense.mean_squared
        batch = dense.placed(schedule, mesh.pipe.rank, *([each[part] for each in batches[me]] for part in (0, 1)))
        build = partial(Pipeline, stages, schedule, mesh.pipe, loss, replicas=mesh.replicas)
        if not is_right(schedule):
            with pytest.raises(ArgumentError, match=r"needs all outputs[^$]*schedules.gpipe"):
                if kind == "over batch":
                    build()
                with build() as pipe:
                    pipe.forward_train(batch[0])
            return
        with build() as pipe:
            for again in range(3):
                if kind == "outside":
                    value, dx = outside(pipe, batch, scale, share=shares[me])
                else:
                    near(pipe.evaluate(*batch), sum(value for value, _, _ in found))
                    result = pipe.step(*batch, scale=scale)
                    value, dx = result.losses[0] * shares[me], result.input_grads
                    near(result.loss, sum(value for value, _, _ in found))
                    assert result.losses == [result.losses[0]] * schedule.microbatches
                if value is not None:
                    near(value * (shares[me] if kind == "outside" else 1), found[me][0])
                for number, stage in zip(numbers, stages):
                    near(stage.gradient / scale, expected[number])
                if dx is not None:
                    near(np.concatenate(dx), found[me][2])
                assert pipe.peak_activations == simulate(schedule).peak_activations[mesh.pipe.rank]
                assert pipe.steps_taken == again + 1


@st.composite
def right_schedules(draw):
    """A random schedule, with the forwards of each rank first: then it is one that can do both."""
    schedule = draw(runnable_schedules())
    orders = [sorted(order, key=lambda action: action.op != "F") for order in schedule.orders]
    return type(schedule)("random, forwards first", schedule.placement, schedule.microbatches, orders)


@settings(max_examples=40)
@given(
    schedule=runnable_schedules() | right_schedules(),
    data=st.integers(1, 3),
    seed=st.integers(0, 10**6),
    kind=st.sampled_from(["over batch", "outside"]),
    scale=st.sampled_from([1.0, 1024.0]),
    weights=st.booleans(),
    synchronous=st.booleans(),
)
def test_random_schedules_are_refused_or_right(schedule, data, seed, kind, scale, weights, synchronous):
    def job(comm):
        check_steps(comm, schedule, data, seed, kind, scale, weights)

    inprocess.run(schedule.ranks * data, job, synchronous=synchronous)


# -- Gradients that are added up --------------------------------------------------------------------------------------


def flats(stages):
    return [flat.copy() for stage in stages for flat in (stage.gradients.flat,)]


@pytest.mark.parametrize("tied, data, weighted", [(False, 1, True), (True, 2, False), (True, 2, True)])
@pytest.mark.parametrize("name", ["gpipe", "zero_bubble_h1"])
def test_an_accumulated_step_adds_what_a_step_gives(comm, name, tied, data, weighted):
    """To the bit: the sum of the gradients of both steps, with replicas, ties, weights and a scale."""
    if comm.size % data:
        pytest.skip("needs a multiple of that many ranks")
    schedule = dense.build(name, comm.size // data, 1, 3)

    def loss(output, target):
        value, gradient = nn.softmax_cross_entropy(output, target)
        return (value, gradient, float(1 + target[0, 0] % 3)) if weighted else (value, gradient)

    if not weighted:
        loss.mean_over_entries = True
    with Mesh(comm, pipe=schedule.ranks, data=data) as mesh:
        stages = small_gpt.build(schedule, mesh.pipe.rank, dtype="float64", tied=tied)
        feeds = [dense.placed(schedule, mesh.pipe.rank, *text(6, seed=7 * mesh.data.rank + k)) for k in range(3)]
        with Pipeline(stages, schedule, mesh.pipe, loss, replicas=mesh.replicas) as pipe:
            alone = []
            for feed in feeds:
                result = pipe.step(*feed, scale=0.5)
                alone.append((result.loss, flats(stages)))
            sums = [list(each) for each in zip(*(gradients for _, gradients in alone))]
            losses = []
            for number, feed in enumerate(feeds):
                result = pipe.step(*feed, scale=0.5, accumulate=number > 0)
                found = flats(stages)
                losses.append(result.loss)
                for mine, parts in zip(found, sums):
                    assert mine.tobytes() == np.add.reduce(parts[: number + 1]).tobytes()
            assert losses == [value for value, _ in alone]
            pipe.step(*feeds[0], scale=0.5)
            assert all(mine.tobytes() == parts[0].tobytes() for mine, parts in zip(flats(stages), sums))


# -- Mistakes: one error on all ranks, after which all may go on ------------------------------------------------------


def halfway(comm):
    """(pipeline, its batch, gradients of the outputs): the forwards of a step have run."""
    schedule = gpipe(comm.size, 2)
    batch = dense.placed(schedule, comm.rank, np.ones((4, WIDTH)), np.zeros((4, WIDTH)))
    pipe = Pipeline([tanh(comm.rank)], schedule, comm, dense.mean_squared)
    y = pipe.forward_train(batch[0])
    return pipe, batch, y


CALLS = {
    "step": lambda pipe, batch: pipe.step(*batch),
    "evaluate": lambda pipe, batch: pipe.evaluate(*batch),
    "forward": lambda pipe, batch: pipe.forward(batch[0]),
    "forward_train": lambda pipe, batch: pipe.forward_train(batch[0]),
    "durations": lambda pipe, batch: pipe.durations(),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("others", ["the same", "backward"])
def test_another_call_between_the_halves_is_refused(comm, call, others):
    pipe, batch, y = halfway(comm)
    with pytest.raises(ArgumentError, match="between a forward_train and its backward"):
        if others == "the same" or comm.rank == 0:
            CALLS[call](pipe, batch)
        else:
            pipe.backward(y)
    pipe.backward(y)  # the step is as it was
    near(pipe.stages[0].gradient, for_outputs(comm))
    CALLS[call](pipe, batch)
    with suppress(ArgumentError):  # forward_train is to be followed by backward
        pipe.close()


def for_outputs(comm):
    """The gradient of this rank's stage where those of the outputs are the outputs themselves."""
    layers = [tanh(number) for number in range(comm.size)]
    dense.through(layers, np.ones((4, WIDTH)), lambda y: (0.0, y))
    return layers[comm.rank].gradient


def test_a_backward_without_its_forwards_or_twice_is_refused(comm):
    pipe, batch, y = halfway(comm)
    for gradients in (None, np.ones((4, WIDTH))):
        pipe.backward(y)
        with pytest.raises(ArgumentError, match="backward was called without a forward_train before it"):
            pipe.backward(gradients)
        y = pipe.forward_train(batch[0])
    pipe.backward(y)
    pipe.close()


SHAPES = {
    "missing": (lambda y: None, "gradients are missing"),
    "rows": (lambda y: y[:3], "do not match the outputs"),
    "width": (lambda y: y[:, :2], "does not match the output"),
    "dtype": (lambda y: y.astype(np.float32), "does not match the output"),
    "list": (lambda y: [y], "wrong length"),
    "tree": (lambda y: {"y": y}, "another structure"),
    "number": (lambda y: 1.0, "neither an array"),
}


@pytest.mark.parametrize("case", SHAPES)
def test_gradients_that_do_not_fit_are_refused_and_may_be_given_anew(comm, case):
    make, match = SHAPES[case]
    pipe, _, y = halfway(comm)
    with pytest.raises(ArgumentError, match=match):
        pipe.backward(None if y is None else make(y))
    with pytest.raises(ArgumentError, match="wrong rank" if comm.size > 1 else "scale"):
        pipe.backward(np.ones((4, WIDTH)), scale=0 if comm.size == 1 else 1)
    pipe.backward(None if y is None else [y[:2], y[2:]])
    near(pipe.stages[0].gradient, for_outputs(comm))
    pipe.close()


def test_a_close_between_the_halves_is_refused_and_ends_the_pipeline(comm):
    pipe, batch, _ = halfway(comm)
    with pytest.raises(ArgumentError, match="close was called between a forward_train and its backward"):
        with pipe:
            pass
    with pytest.raises(ArgumentError, match="the pipeline is failed"):
        pipe.step(*batch)


def test_an_exception_between_the_halves_ends_the_pipeline_on_all_ranks(comm):
    pipe, _, y = halfway(comm)
    comm.Barrier()  # else a rank might hear of it in the forwards
    with pytest.raises((ValueError, PeerError), match="of mine"):
        with pipe:
            if comm.rank == 0:
                raise ValueError("of mine")
            pipe.backward(y)


def test_parameters_stay_as_they_are_between_the_halves(comm):
    schedule = gpipe(comm.size, 2)
    stage = nn.Stage([nn.Linear(3, 3)], first=comm.rank)
    optimizer, x = optim.SGD([stage], lr=0.1), np.ones((4, 3), np.float32)
    with Pipeline([stage], schedule, comm) as pipe:
        for _ in range(2):
            before = stage.parameters.flat.copy()
            y = pipe.forward_train(x if comm.rank == 0 else None)
            with pytest.raises(ArgumentError, match="call backward first"):
                optimizer.step()
            assert stage.parameters.flat.tobytes() == before.tobytes()
            pipe.backward(y)
            optimizer.step()
            assert stage.parameters.flat.tobytes() != before.tobytes()


WRONG = {
    "one gradient": (lambda ys, ts: (0.0, ys[0]), "a loss over the batch"),
    "a wrong one": (lambda ys, ts: (0.0, [ys[0], ys[1][:1]]), "does not match the output"),
    "no value": (lambda ys, ts: (None, ys), "value of a loss"),
    "an exception": (lambda ys, ts: 1 / 0, "the loss raised ZeroDivisionError"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_a_loss_over_the_batch_returns_is_looked_at(comm, case):
    make, match = WRONG[case]
    batch = dense.placed(gpipe(comm.size, 2), comm.rank, np.ones((4, WIDTH)), np.zeros((4, WIDTH)))
    pipe = Pipeline([tanh(comm.rank)], gpipe(comm.size, 2), comm, over_batch(make))
    with pytest.raises((ArgumentError, StageError, PeerError), match=match):
        pipe.step(*batch)


def test_outputs_that_lie_in_received_buffers_last_until_the_loss_over_the_batch(comm):
    """Stages that hand on what they received, whose buffers an evaluation uses again at once."""
    schedule, x = gpipe(comm.size, 4), np.arange(24.0).reshape(8, 3)
    loss = lambda ys, ts: (float(np.abs(np.concatenate(ys) - np.concatenate(ts)).max()), ys)  # noqa: E731
    with Pipeline([dense.Identity()], schedule, comm, over_batch(loss)) as pipe:
        for _ in range(3):
            assert pipe.step(*dense.placed(schedule, comm.rank, x, x)).loss == 0
            assert pipe.evaluate(*dense.placed(schedule, comm.rank, x, x)) == 0


# -- On a device ------------------------------------------------------------------------------------------------------


def on_device(comm, device, recompute):
    """(losses, gradients) of steps of each kind."""
    schedule = looped_bfs(comm.size, 2, 4)
    stages = [
        nn.Stage([nn.Linear(WIDTH, WIDTH)], "float64", first=n, device=device) for n in schedule.stages_of(comm.rank)
    ]
    x, target = np.random.default_rng(1).normal(size=(2, 8, WIDTH))
    ask = lambda m: x[2 * m : 2 * m + 2].copy()  # noqa: E731
    there = arrays.upload if device == "cuda" else np.copy

    def lists(outputs, targets):
        _, parts = of_lists([*map(arrays.download, outputs)], targets)
        value, _ = nn.mean_squared_error(outputs[0], there(targets[0]))  # a number on the device
        return value, [there(part) for part in parts]

    loss = over_batch(lists)
    loss.wants_host_targets = True
    found = []
    inputs, targets = dense.placed(schedule, comm.rank, ask, target)
    with Pipeline(stages, schedule, comm, loss, recompute) as pipe:
        for number in range(3):
            found.append(pipe.step(inputs, targets, scale=2.0, accumulate=number == 2).loss)
            y = pipe.forward_train(inputs)
            back = pipe.backward(y, 2.0, accumulate=True)
            found += [arrays.download(gradient) for gradient in back or ()]
            found += [arrays.download(stage.gradients.flat).copy() for stage in stages]
    return found


@pytest.mark.parametrize("recompute", [False, True])
def test_a_device_gives_what_the_host_gives(gpu, sending, comm, recompute):
    for mine, expected in zip(on_device(comm, "cuda", recompute), on_device(comm, "cpu", recompute), strict=True):
        near(mine, expected)
