"""A function of JAX with its gradients, compiled: once for each kind of input.

forward        y, pull = vjp(function)       what `pull` holds is what the backward needs, as arrays
backward       pull(dy) -> both gradients
in two halves  see split.py
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import jax

from mpipipe import arrays
from mpipipe.adapters.jax.arrays import JaxArray
from mpipipe.arrays.trees import Structure, flatten, unflatten

OPTIONS = ("key", "training")  # parameters that a function may have


@jax.jit
def both(pull: Any, dy: Any) -> Any:
    """Return (gradients of the parameters, gradients of the inputs)."""
    return pull(dy)


class Functions:
    """The compiled forms of a function for inputs of one structure.

    Parameters
    ----------
    function : `function(parameters, x)`, see jax_stage
    tree : of the parameters
    structure, floating : of the input, and which of its arrays take gradients

    Attributes
    ----------
    forward : (list of parameters, floating inputs, others, key) -> (floating outputs, the output without them)
    with_gradients : the same arguments -> (floating outputs, pull, others)
    """

    def __init__(self, function: Callable[..., Any], tree: Any, structure: Structure, floating: tuple[bool, ...]):
        takes = {name for name in OPTIONS if name in signature(function).parameters}

        def call(values: list, some: list, others: list, key: JaxArray, training: bool) -> tuple[list, Any]:
            parameters = jax.tree_util.tree_unflatten(tree, values)
            sources = iter(some), iter(others)
            leaves = [next(sources[0] if each else sources[1]) for each in floating]
            options = {name: value for name, value in (("key", key), ("training", training)) if name in takes}
            return divided(_applied(function, parameters, leaves, structure, options))

        def with_gradients(values: list, some: list, others: list, key: JaxArray) -> Any:
            return jax.vjp(lambda v, x: call(v, x, others, key, True), values, some, has_aux=True)

        self.forward = jax.jit(lambda values, some, others, key: call(values, some, others, key, False))
        self.with_gradients = jax.jit(with_gradients)


def _applied(function: Callable[..., Any], parameters: Any, leaves: list, structure: Structure, options: dict) -> Any:
    if structure is None:
        return function(parameters, leaves[0], **options)
    if isinstance(structure, int):
        return function(parameters, *leaves, **options)
    return function(parameters, **dict(zip(structure, leaves)), **options)


def divided(output: Any) -> tuple[list, Any]:
    """Return (its floating arrays, the output with None in their places)."""
    leaves, structure = flatten_output(output)
    floating = [arrays.is_floating(leaf.dtype) for leaf in leaves]
    rest = unflatten([None if is_floating else leaf for leaf, is_floating in zip(leaves, floating)], structure)
    return [leaf for leaf, is_floating in zip(leaves, floating) if is_floating], rest


def flatten_output(output: Any) -> tuple[list, Structure]:
    """Return (arrays, structure) of what a function of JAX returned; an error of `flatten` for what is no tree."""
    if isinstance(output, (jax.Array, jax.core.Tracer)):
        return [output], None
    return flatten(tuple(output) if isinstance(output, list) else output)
