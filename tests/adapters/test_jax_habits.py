"""Habits of JAX: states, keys, ties and dtypes of functions in a list, as one process of JAX has them, or refused."""

from functools import partial

import numpy as np
import pytest

jax = pytest.importorskip("jax")
from jax import numpy as jnp  # noqa: E402

from mpipipe import Pipeline, adapters, cut, schedules  # noqa: E402
from mpipipe.adapters import with_skips  # noqa: E402
from mpipipe.errors import ArgumentError, MpipipeError  # noqa: E402
from mpipipe.job import inprocess  # noqa: E402

pytestmark = pytest.mark.judges
jax.config.update("jax_enable_x64", True)
WIDTH, ROWS, MICROBATCHES, STEPS, RATE = 4, 3, 4, 3, 1e-3


def matrix(seed):
    return {"w": jax.random.normal(jax.random.key(seed), (WIDTH, WIDTH))}


def linear(p, x):
    return x @ p["w"]


def running(p, x, state, training):
    """Less the mean of all forwards so far, this one included; an evaluation adds none."""
    state = {"sum": state["sum"] + x.mean(0), "count": state["count"] + 1} if training else state
    return (x - state["sum"] / state["count"]) @ p["w"], state


def between(first, second, ties=None):
    """Two functions, after a linear one: what is handed over comes from the first."""
    entries = [(linear, matrix(0)), (first, matrix(1)), (second, matrix(2))]
    return [with_skips(each, ties=ties) for each in entries] if ties else entries


def cast(kind):
    return between(lambda p, x: linear(p, x).astype(kind), lambda p, x: linear(p, x.astype("float64")))


def scanned(p, x):
    return jax.lax.scan(lambda y, gain: (jnp.tanh(y * gain), None), x, p["w"])[0]


def twice(p, x):
    w = p["w"]
    return jnp.tanh(jnp.tanh(x @ w[:, :, None].sum(2)) @ w)


START = {"sum": np.zeros(WIDTH), "count": np.zeros((), int)}
CASES = {
    "plain": lambda: between(lambda p, x: jnp.tanh(linear(p, x)), linear),
    "state": lambda: [(linear, matrix(0)), (running, matrix(1), START), (running, matrix(2), START)],
    "a loop": lambda: between(scanned, linear),
    "a function compiled by itself": lambda: between(jax.jit(twice), linear),
    "a matrix in two places": lambda: between(twice, linear),
    "a parameter alone": lambda: between(lambda p, x: p["w"][:ROWS] * 2 + 0 * x.sum(), linear),
    "one tie": lambda: between(lambda p, x: jnp.tanh(linear(p, x)), linear, {"w": "the one"}),
    "booleans": lambda: between(lambda p, x: (linear(p, x), x > 0), lambda p, x, mask: linear(p, x) * mask),
    "integers": lambda: between(lambda p, x: (linear(p, x), (4 * x).astype(int)), lambda p, x, n: linear(p, x) * n),
    "float32": lambda: cast("float32"),
    "float16": lambda: cast("float16"),
    "bfloat16": lambda: cast("bfloat16"),
    "complex": lambda: between(lambda p, x: linear(p, x) + 1j * x, lambda p, x: linear(p, x.real * x.imag)),
    "a dict": lambda: between(lambda p, x: {"b": x, "a": linear(p, x)}, lambda p, a, b: linear(p, a) * b),
    "complex parameters": lambda: [
        (linear, matrix(0)),
        (lambda p, x: jnp.abs((x * p["turn"]) @ p["w"]), {"turn": jnp.exp(1j * jnp.arange(WIDTH)), **matrix(1)}),
    ],
    "no floating output": lambda: [
        (linear, matrix(0)),
        (lambda p, x: (x, jnp.zeros(3)), {}),
        (lambda p, x, z: linear(p, x), matrix(1)),
    ],
}


def weighed(output, target):
    """A mean over those entries whose target is above 0, and how many these are."""
    counts = target > 0
    return jnp.where(counts, (output - target) ** 2, 0).sum() / counts.sum(), counts.sum()


def batches(step):
    return np.random.default_rng(step).normal(size=(2, MICROBATCHES, ROWS, WIDTH))


def called(entry, p, x, state):
    function, _, *own = entry
    parts = (x,) if not isinstance(x, (tuple, dict)) else x
    options = dict(state=state, training=True) if own else {}
    y = function(p, **x, **options) if isinstance(x, dict) else function(p, *parts, **options)
    return y if own else (y, None)


def judged(name):
    """(losses, gradients of the last step by place, states) of all functions in a row, tied ones with one tree."""
    entries = CASES[name]()
    tied = hasattr(entries[0], "entry")
    entries = [each.entry if tied else each for each in entries]
    parameters, states, losses = [each[1] for each in entries], [each[2] if each[2:] else None for each in entries], []
    parameters = parameters[:1] if tied else parameters

    def loss(parameters, states, x, target):
        new, trees = [], parameters * len(entries) if tied else parameters
        for entry, p, state in zip(entries, trees, states):
            x, state = called(entry, p, x, state)
            new.append(state)
        value, weight = weighed(x, target)
        return value * weight, (new, weight)

    for step in range(STEPS):
        sums, total, count = jax.tree.map(jnp.zeros_like, parameters), 0.0, 0.0
        for x, target in zip(*batches(step)):
            (value, (states, weight)), slopes = jax.value_and_grad(loss, has_aux=True)(parameters, states, x, target)
            sums, total, count = jax.tree.map(jnp.add, sums, slopes), total + value, count + weight
        losses.append(float(total / count))
        sums = jax.tree.map(lambda each: jnp.conj(each) / count, sums)  # noqa: B023
        parameters = jax.tree.map(lambda p, g: p - RATE * g, parameters, sums)
    return losses, sums * len(entries) if tied else sums, states


def real(array):
    return np.stack([array.real, array.imag], -1) if np.iscomplexobj(array) else np.asarray(array)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("ranks, make", [(1, schedules.one_f_one_b), (2, schedules.zero_bubble_h1)])
@pytest.mark.parametrize("name", CASES)
def test_functions_are_trained_as_in_one_process(name, ranks, make, recompute):
    losses, gradients, states = judged(name)
    schedule, entries = make(ranks, MICROBATCHES), CASES[name]()

    def job(comm):
        stages, found = cut(entries, schedule, comm.rank, dtype="float64"), []
        loss = adapters.jax_loss(weighed)
        with Pipeline(stages, schedule, comm, loss=loss, recompute=recompute) as pipeline:
            for step in range(STEPS):
                x, target = map(list, batches(step))
                result = pipeline.step(x if stages.is_first else None, target if stages.is_last else None)
                found.append(result.loss)
                for stage in stages:
                    stage.parameters.flat[...] -= RATE * stage.gradients.flat
            value = pipeline.evaluate(x if stages.is_first else None, target if stages.is_last else None)
            assert np.isfinite(value)
        kept = {key: array.copy() for stage in stages for key, array in stage.gradients.items()}
        return found, kept, {key: array for stage in stages for key, array in stage.state.items()}

    each_rank = inprocess.run(ranks, job)
    narrow = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 1e-1}.get(name, 1e-11)
    for found, kept, state in each_rank:
        np.testing.assert_allclose(found, losses, rtol=narrow)
        for key, array in kept.items():
            place, _, own = key.partition(".")
            np.testing.assert_allclose(array, real(gradients[int(place)][own]), rtol=narrow, atol=narrow, err_msg=key)
        for key, array in state.items():
            place, _, own = key.partition(".")
            np.testing.assert_allclose(array, states[int(place)][own], rtol=1e-12, err_msg=key)


def test_a_loss_draws_for_its_place_and_seed():
    def noisy(output, target, key):
        return ((output - target + jax.random.normal(key, output.shape)) ** 2).mean()

    def losses(seed, schedule):
        def job(comm):
            stages = cut([(linear, matrix(0)), (linear, matrix(1))], schedule, comm.rank, dtype="float64")
            x, target = batches(0).reshape(2, -1, WIDTH)
            with Pipeline(stages, schedule, comm, loss=adapters.jax_loss(noisy, seed=seed)) as pipeline:
                batch = x if stages.is_first else None, target if stages.is_last else None
                return [each for _ in range(2) for each in pipeline.step(*batch).losses]

        return inprocess.run(schedule.ranks, job)[0]

    one = losses(1, schedules.one_f_one_b(1, 4))
    assert losses(1, schedules.gpipe(2, 4)) == pytest.approx(one, rel=1e-12)
    assert len({*one, *losses(2, schedules.one_f_one_b(1, 4))}) == 16


def held(p, x):
    return x @ p


SHARED = jnp.ones((WIDTH, WIDTH))
REFUSED = {
    "a state that is not returned": ([(lambda p, x, state: x, {}, np.zeros(1))], "returns no state like it"),
    "a state of another shape": (
        [(lambda p, x, state: (x, jnp.zeros(2)), {}, np.zeros(1))],
        "returns no state like it",
    ),
    "a state alone": ([(linear, matrix(0), np.zeros(1))], "belong together"),
    "no state": ([(running, matrix(0))], "belong together"),
    "one array in two entries": (
        [(held, SHARED), (held, SHARED)],
        r"one array is the parameter 0\. and the parameter 1\.",
    ),
    "arrays of the function": ([(jax.tree_util.Partial(held, SHARED), {})], "holds arrays, which would be constants"),
    "a key": ([(linear, {"key": jax.random.key(0)})], "key in a tree of a function of JAX is no array of numbers"),
    "a function": ([(linear, {"f": jax.nn.relu})], "f in a tree of a function of JAX is no array of numbers"),
    "integers": ([(linear, {"n": np.arange(3)})], "the parameter n of a function"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_wrong_is_refused_by_name(name):
    entries, message = REFUSED[name]

    def job(comm):
        schedule = schedules.gpipe(1, MICROBATCHES)
        stages = cut(entries, schedule, comm.rank, dtype="float64")
        with Pipeline(stages, schedule, comm, loss=adapters.jax_loss(weighed)) as pipeline:
            pipeline.step(*batches(0).reshape(2, -1, WIDTH))

    with pytest.raises(MpipipeError, match=message) as caught:
        inprocess.run(1, job)
    assert caught.value.remedy or caught.value.expected


def test_a_loss_with_arrays_of_its_own_is_refused():
    with pytest.raises(ArgumentError, match="holds arrays, which would be constants"):
        adapters.jax_loss(jax.tree_util.Partial(lambda scale, output, target: (scale * output).sum(), jnp.ones(2)))
    assert adapters.jax_loss(partial(lambda output, target, power: (output**power).sum(), power=2))
