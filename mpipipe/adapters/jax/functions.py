"""A function of JAX with its gradients, compiled: once for each kind of input.

forward        y, pull = vjp(function)       what `pull` holds is what the backward needs, as arrays
backward       pull(dy) -> both gradients
in two halves  see split.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import jax

from mpipipe import arrays
from mpipipe.adapters.jax.arrays import JaxArray
from mpipipe.adapters.trees import Structures, applied, flatten_parts, returned, unflatten_parts
from mpipipe.arrays.trees import Structure, flatten

OPTIONS = ("key", "training")  # parameters that a function may have


@jax.jit
def both(pull: Any, dy: Any) -> Any:
    """Return (gradients of the parameters, gradients of the inputs)."""
    return pulled(pull, dy)


def pulled(pull: Any, dy: Any) -> Any:
    """Return what `pull` gives for gradients dRe + i dIm, in that convention too: JAX's own are the conjugates."""
    return jax.tree.map(jax.numpy.conj, pull(jax.tree.map(jax.numpy.conj, dy)))


class Functions:
    """The compiled forms of a function for inputs of one structure.

    Parameters
    ----------
    function : `function(parameters, x)`, see jax_stage
    tree : of the parameters
    structures, floating : of the parts of the input, and which of their arrays take gradients
    gives : names of the skips that it gives over

    Attributes
    ----------
    forward : (list of parameters, floating inputs, others, key) -> (floating outputs, the output without them)
    with_gradients : the same arguments -> (floating outputs, pull, others)
    """

    def __init__(
        self,
        function: Callable[..., Any],
        tree: Any,
        structures: Structures,
        floating: tuple[bool, ...],
        gives: Sequence[str],
    ):
        takes = {name for name in OPTIONS if name in signature(function).parameters}

        def call(values: list, some: list, others: list, key: JaxArray, training: bool) -> tuple[list, Any]:
            parameters = jax.tree_util.tree_unflatten(tree, values)
            sources = iter(some), iter(others)
            leaves = [next(sources[0] if each else sources[1]) for each in floating]
            options = {name: value for name, value in (("key", key), ("training", training)) if name in takes}
            output = applied(function, (parameters,), unflatten_parts(leaves, structures), **options)
            return divided(returned(output, gives))

        def with_gradients(values: list, some: list, others: list, key: JaxArray) -> Any:
            return jax.vjp(lambda v, x: call(v, x, others, key, True), values, some, has_aux=True)

        self.forward = jax.jit(lambda values, some, others, key: call(values, some, others, key, False))
        self.with_gradients = jax.jit(with_gradients)


def divided(parts: Sequence[Any]) -> tuple[list, list]:
    """Return (the floating arrays of an output, its parts with None in their places)."""
    leaves, structures = flatten_parts(parts, flatten_output)
    floating = [arrays.is_floating(leaf.dtype) for leaf in leaves]
    rest = unflatten_parts([None if is_floating else leaf for leaf, is_floating in zip(leaves, floating)], structures)
    return [leaf for leaf, is_floating in zip(leaves, floating) if is_floating], rest


def flatten_output(output: Any) -> tuple[list, Structure]:
    """Return (arrays, structure) of a part of an output; an error of `flatten` for what is no tree.

    The keys of a dict are sorted: JAX sorts them in what leaves a compiled function.
    """
    if output is None or isinstance(output, (jax.Array, jax.core.Tracer)):
        return [output], None
    output = dict(sorted(output.items())) if isinstance(output, dict) else output
    return flatten(tuple(output) if isinstance(output, list) else output)
