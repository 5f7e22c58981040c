"""Models of equinox and flax with batch statistics, and how each is cut into functions of JAX with a state."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from mpipipe import adapters
from tests.models.training import MICROBATCHES, RATE, STEPS, Model

jax.config.update("jax_enable_x64", True)
ROWS, SIZE, WIDTH = 3, 4, 6


class JaxCase(NamedTuple):
    run: Callable[..., Any]  # of the whole model: run(parameters of the parts, state, x) -> (y, state)
    state: Any
    parts: list[Any]  # (function, parameters), or (function, parameters, state)
    states_of: Callable[[Any], list[Any]]  # the states of the parts within that of the whole model


def equinox():
    """A list of modules that take a row each; batch normalisation takes its mean over the axis of all of them."""
    eqx = pytest.importorskip("equinox")

    class Net(eqx.Module):
        layers: list

        def __init__(self, key):
            first, second, third = jax.random.split(key, 3)
            self.layers = [
                eqx.nn.Linear(SIZE, WIDTH, key=first),
                eqx.nn.BatchNorm(WIDTH, "rows", mode="batch"),
                eqx.nn.Linear(WIDTH, WIDTH, key=second),
                eqx.nn.BatchNorm(WIDTH, "rows", mode="ema"),
                eqx.nn.Linear(WIDTH, SIZE, key=third),
            ]

    net, state = eqx.nn.make_with_state(Net)(jax.random.key(0))
    modules = [eqx.partition(each, eqx.is_inexact_array) for each in net.layers]
    rows = dict(in_axes=(0, None), out_axes=(0, None), axis_name="rows")

    def run(parameters, state, x):
        layers = [eqx.combine(own, rest) for own, (_, rest) in zip(parameters, modules)]

        def row(x, state):
            for each in layers:
                x, state = each(x, state) if isinstance(each, eqx.nn.BatchNorm) else (jax.nn.gelu(each(x)), state)
            return x, state

        return jax.vmap(row, **rows)(x, state)

    def cut(place):
        own, rest = modules[place]
        if not isinstance(net.layers[place], eqx.nn.BatchNorm):
            return lambda parameters, x: jax.nn.gelu(jax.vmap(eqx.combine(parameters, rest))(x)), own

        def normed(parameters, x, state, training):
            layer = eqx.nn.inference_mode(eqx.combine(parameters, rest), not training)
            return jax.vmap(layer, **rows)(x, state)

        return normed, own, state.substate(net.layers[place])

    def states_of(state):
        return [state.substate(each) if isinstance(each, eqx.nn.BatchNorm) else None for each in net.layers]

    return JaxCase(run, state, [cut(place) for place in range(5)], states_of)


def flax():
    """A module of modules, which have their own entries in the collections of variables."""
    linen = pytest.importorskip("flax.linen")

    class Block(linen.Module):
        width: int

        @linen.compact
        def __call__(self, x, training):
            x = linen.BatchNorm(use_running_average=not training, momentum=0.9)(linen.Dense(self.width)(x))
            return linen.gelu(x)

    class Net(linen.Module):
        def setup(self):
            self.blocks = [Block(WIDTH), Block(WIDTH), Block(WIDTH), Block(SIZE)]

        def __call__(self, x, training):
            for each in self.blocks:
                x = each(x, training)
            return x

    variables = Net().init(jax.random.key(0), np.zeros((ROWS, SIZE)), True)
    variables = jax.tree.map(lambda leaf: leaf.astype("float64"), variables)
    names = [f"blocks_{place}" for place in range(4)]

    def run(parameters, state, x):
        whole = {"params": dict(zip(names, parameters)), "batch_stats": state}
        y, changed = Net().apply(whole, x, True, mutable=["batch_stats"])
        return y, changed["batch_stats"]

    def cut(name):
        block = Block(SIZE if name == names[-1] else WIDTH)

        def applied(parameters, x, state, training):
            both = {"params": parameters, "batch_stats": state}
            y, changed = block.apply(both, x, training, mutable=["batch_stats"])
            return y, changed["batch_stats"]

        return applied, variables["params"][name], variables["batch_stats"][name]

    return JaxCase(run, variables["batch_stats"], [*map(cut, names)], lambda state: [state[name] for name in names])


CASES = {each.__name__: each for each in (equinox, flax)}


# -- the judge ---------------------------------------------------------------------------------------------------------


def squared(output, target):
    return ((output - target) ** 2).mean()


def batches(step, replica):
    draw = np.random.default_rng([step, replica])
    return tuple([*draw.normal(size=(MICROBATCHES, ROWS, SIZE))] for _ in range(2))


def made(name):
    return Model(CASES[name]().parts, adapters.jax_loss(squared), batches, partial(judged, name))


def by_place(trees):
    found = {}
    for place, tree in enumerate(trees):
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            found[f"{place}.{jax.tree_util.keystr(path, simple=True, separator='.')}"] = np.array(leaf)
    return found


def judged(name, replicas):
    """What JAX makes of the whole model; each replica has a state of its own."""
    case = CASES[name]()
    parameters, states = [part[1] for part in case.parts], [case.state] * replicas

    @jax.jit
    @jax.value_and_grad
    def plain(parameters, state, x, target):
        return squared(case.run(parameters, state, x)[0], target)

    losses, first = [], {}
    for step in range(STEPS):
        total, sums = 0.0, jax.tree.map(np.zeros_like, parameters)
        for replica in range(replicas):
            for x, target in zip(*batches(step, replica)):
                # a state of equinox may be used once
                again = jax.tree.map(lambda leaf: leaf, states[replica])
                value, slopes = plain(parameters, again, x, target)
                states[replica] = case.run(parameters, states[replica], x)[1]
                total += float(value) / (MICROBATCHES * replicas)
                sums = jax.tree.map(lambda a, b: a + b / (MICROBATCHES * replicas), sums, slopes)
        losses.append(total)
        first = first or by_place(sums)
        parameters = jax.tree.map(lambda a, b: a - RATE * b, parameters, sums)
    return losses, first, by_place(parameters) | by_place(case.states_of(states[0]))
