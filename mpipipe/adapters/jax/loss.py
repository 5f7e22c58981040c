"""A loss function of JAX as the loss of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from mpipipe import arrays
from mpipipe.adapters.jax.arrays import Results, is_on_host, put
from mpipipe.adapters.jax.functions import pulled
from mpipipe.arrays import Tree
from mpipipe.arrays.trees import Structure, flatten, unflatten


class JaxLoss:
    """See `mpipipe.adapters.jax_loss`, which makes it."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self._compiled: dict[tuple, Callable[..., Any]] = {}
        self._results = Results()

    def __call__(self, output: Tree, target: Tree, factor: float = 1.0) -> tuple[Any, Tree]:
        """Return (value, gradient of the output times `factor`)."""
        leaves, structure = flatten(output)
        targets, shape = flatten(target)
        floating = tuple(arrays.is_floating(leaf.dtype) for leaf in leaves)
        key = structure, shape, floating
        if key not in self._compiled:
            self._compiled[key] = self._compile(structure, shape, floating)
        some = [put(leaf) for leaf, is_floating in zip(leaves, floating) if is_floating]
        others = [put(leaf) for leaf, is_floating in zip(leaves, floating) if not is_floating]
        value, slopes = self._compiled[key](some, others, list(map(put, targets)), factor)
        taken = iter(self._results.take(slopes))
        gradient = unflatten([next(taken) if each else None for each in floating], structure)
        return value.item() if is_on_host(value) else self._results.take([value])[0], gradient

    def _compile(self, structure: Structure, shape: Structure, floating: tuple[bool, ...]) -> Callable[..., Any]:
        def value_of(some: list, others: list, targets: list) -> Any:
            sources = iter(some), iter(others)
            leaves = [next(sources[0] if each else sources[1]) for each in floating]
            return self.function(unflatten(leaves, structure), unflatten(targets, shape))

        def both(some: list, others: list, targets: list, factor: Any) -> Any:
            value, pull = jax.vjp(lambda x: value_of(x, others, targets), some)
            return value, pulled(pull, jax.numpy.asarray(factor, value.dtype))[0]

        return jax.jit(both)
