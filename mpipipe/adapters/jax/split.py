"""The backward of a function of JAX in two halves: what the gradients of the inputs need first, the rest later.

    backward     dy -> c -> b -> a -> dx       as JAX has written it down, operation by operation (a jaxpr)
                 |     |    |    |
                 dC    dB   dA                 operations on which no gradient of an input depends: the second half

The first half returns the values that the second one begins with, so nothing is computed twice. An operation that holds
others (a loop, a function compiled by itself) is not looked into: it is done in the first half as a whole, where any of
the input gradients needs a part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
from jax.extend.core import Literal
from jax.tree_util import Partial

from mpipipe.adapters.jax.functions import pulled


@jax.jit
def of_inputs(pull: Any, dy: Any) -> Any:
    """Return (gradients of the inputs, what computes those of the parameters: see `of_parameters`).

    Parameters
    ----------
    pull : dy -> (gradients of the parameters, gradients of the inputs), two lists
    dy : gradients of the outputs, a list
    """
    closed, shapes = jax.make_jaxpr(partial(pulled, pull), return_shape=True)(dy)
    jaxpr, (weights, inputs) = closed.jaxpr, shapes
    wanted = jaxpr.outvars[len(weights) :]
    first, rest = _divided(jaxpr.eqns, wanted)
    kept = _read(rest, jaxpr.outvars[: len(weights)])
    found = jax.core.eval_jaxpr(jaxpr.replace(eqns=first, outvars=[*wanted, *kept]), closed.consts, *dy)
    later = jaxpr.replace(constvars=[], invars=kept, eqns=rest, outvars=jaxpr.outvars[: len(weights)])
    return found[: len(inputs)], Partial(_Later(later), *found[len(inputs) :])


@jax.jit
def of_parameters(pending: Any) -> Any:
    """Return the gradients of the parameters, a list."""
    return pending()


class _Later:
    """The second half: an object of its own for each first half that was compiled, by which JAX knows it again."""

    def __init__(self, jaxpr: Any):
        self.jaxpr = jaxpr

    def __call__(self, *values: Any) -> Any:
        return jax.core.eval_jaxpr(self.jaxpr, [], *values)


def _divided(operations: Sequence[Any], wanted: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return (the operations that these variables depend on, all others), in order."""
    needed = {each for each in wanted if not isinstance(each, Literal)}
    first, rest = [], []
    for operation in reversed(operations):
        if needed.intersection(operation.outvars):
            needed.update(each for each in operation.invars if not isinstance(each, Literal))
            first.append(operation)
        else:
            rest.append(operation)
    return first[::-1], rest[::-1]


def _read(operations: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """Return the variables that these operations, and these results, take from elsewhere."""
    made = {each for operation in operations for each in operation.outvars}
    read = [each for operation in operations for each in operation.invars] + list(results)
    return list(dict.fromkeys(each for each in read if not isinstance(each, Literal) and each not in made))
