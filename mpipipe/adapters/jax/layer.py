"""A function of JAX and its parameters as a layer, and as a stage; and a loss function of JAX."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import jax
import numpy as np

from mpipipe import arrays
from mpipipe.adapters.foreign import (
    ForeignLayer,
    ForeignStage,
    Forwarded,
    Leaves,
    StatesBefore,
    Structures,
    Tape,
    flatten_parts,
    one_dtype,
    spread,
)
from mpipipe.adapters.jax import functions
from mpipipe.adapters.jax.functions import (
    Functions,
    JaxArray,
    JaxTree,
    floating_of,
    put,
    taken,
    waiting_for_jax,
)
from mpipipe.arrays import Array, Tree, flatten, unflatten
from mpipipe.errors import ArgumentError
from mpipipe.nn import Parameter, Position, kernels, random_seed


class JaxLayer(ForeignLayer):
    """(function, parameters) of JAX as a layer, or (function, parameters, state).

    JAX computes with the memory of the parameters where it takes that. A forward of a training step
    gives the next one its state. One that is run again finds the state of the first time, and
    leaves that of now.
    """

    ends = False
    freezes_parts = True
    mixes_positions = ForeignLayer.mixes_positions

    def _declare(self) -> dict[str, Parameter]:
        function, parameters, *state = self.entry
        if not callable(function):
            raise ArgumentError(
                "jax_stage",
                found=type(function).__name__,
                expected="a function (parameters, x) -> y",
            )
        if ("state" in functions.options_of(function)) != bool(state):
            raise ArgumentError(
                "a function of JAX with a parameter `state` and a state belong together",
                found="a state alone" if state else "a function with `state`, and no state",
                expected="function(parameters, x, state) that returns (y, state), and its first "
                "state",
            )
        first = next(iter(state), None)
        self._state_tree = jax.tree_util.tree_structure(first)
        self._state = {name: leaf.copy() for name, leaf in named_leaves(first).items()}
        self._before = StatesBefore()
        self._tree = jax.tree_util.tree_structure(parameters)
        leaves = named_leaves(parameters)
        self._complex = {name for name, leaf in leaves.items() if leaf.dtype.kind == "c"}
        self._values: list[JaxArray] = []
        return {name: _declared(name, leaf) for name, leaf in leaves.items()}

    @cached_property
    def _functions(self) -> Functions:
        return Functions(self.entry[0], self._tree, self.gives)

    def bound(self) -> None:
        super().bound()
        kinds = {leaf.dtype for leaf in named_leaves(self.entry[1]).values()}
        for name, leaf in self._state.items():
            # It goes along with the parameters.
            if leaf.dtype in kinds and leaf.dtype.kind == "f":
                self._state[name] = leaf.astype(self.stage.dtype)
        self._read_parameters()
        # JAX copies what does not lie as it wants: it does not see new values of these.
        self._renews = False
        for value, name in zip(self._values, self.declared):
            if value.size and value.unsafe_buffer_pointer() != arrays.address(getattr(self, name)):
                self._renews = True

    def _of(self, name: str) -> Array:
        """Return a parameter, complex where JAX has it so."""
        array = getattr(self, name)
        if name not in self._complex:
            return array
        return array.view(f"c{2 * array.itemsize}")[..., 0]

    def _read_parameters(self) -> None:
        self._values = [put(self._of(name)) for name in self.declared]

    def _follow_ties(self) -> None:
        if self._tied:
            self._read_parameters()

    def begin_call(self) -> None:
        """Let JAX see the parameters as they are now, where it has not taken their memory."""
        if self.stage is not None and self._values and self._renews:
            self._read_parameters()

    @property
    def tree(self) -> JaxTree:
        """The parameters as a tree of views, shaped as the one that the function came with."""
        return jax.tree_util.tree_unflatten(self._tree, [self._of(name) for name in self.declared])

    @property
    def state(self) -> dict[str, Array]:
        """The state by the paths in its tree, on the host: views, which a load may write to."""
        return self._state

    def _state_for(self, position: Position) -> JaxTree:
        """Return the state that a forward finds."""
        values = None
        if position.training and position.recompute == "now":
            values = self._before.take(position)
        # What the backward keeps must not change with the state.
        copies = [array.copy() for array in values or self._state.values()]
        if position.training and position.recompute == "later":
            self._before.note(position, copies)
        return jax.tree_util.tree_unflatten(self._state_tree, [*map(put, copies)])

    _computing: Callable[[], AbstractContextManager[object]] = staticmethod(waiting_for_jax)

    def _forward(self, leaves: Leaves, structures: Structures) -> Forwarded:
        position = self.stage.position
        if self.ends:
            floating = (False,) * len(leaves)
        else:
            floating = floating_of(leaves)
        key = key_of(self.random_seed("jax"))
        arguments = self._values, [*map(put, leaves)], key, self._state_for(position), structures
        pull = None
        if position.training:
            results, pull, (rest, state) = self._functions.with_gradients(*arguments, floating)
        else:
            results, (rest, state) = self._functions.forward(*arguments)
        if self._state and position.training and position.recompute != "now":
            for array, new in zip(self._state.values(), taken(jax.tree.leaves(state))):
                array[...] = new
        # Without the floating arrays, in whose places None stands.
        without, output = flatten_parts(rest, functions.flatten_output)
        differentiable = tuple(leaf is None for leaf in without)
        floats = iter(taken(results))
        y = [next(floats) if leaf is None else np.asarray(leaf) for leaf in without]
        if not position.training:
            return y, output, None
        kinds = [(array.shape, array.dtype) for array in results]
        return y, output, Tape((pull, kinds), structures, floating, output, differentiable)

    def _counted(self, leaves: Leaves, structures: Structures) -> tuple[Forwarded, dict[int, int]]:
        """Return what `_forward` does, and bytes that JAX keeps for the backward, by address."""
        result = self._forward(leaves, structures)
        tape = result[2]
        sizes = {}
        for array in jax.tree.leaves(tape and tape.of_library[0]):
            if isinstance(array, jax.Array):
                sizes[array.unsafe_buffer_pointer()] = array.nbytes
        for name in self.declared:
            sizes.pop(arrays.address(getattr(self, name)), None)
        return result, sizes

    def _backward(self, slopes: Leaves, tape: Tape, whole: bool) -> tuple[Leaves, list[Array]]:
        """Compute both gradients, as one function; the other half adds those of parameters."""
        pull, kinds = tape.of_library
        dy = []
        for slope, kind in zip(slopes, kinds):
            dy.append(jax.numpy.zeros(*kind) if slope is None else put(slope))
        weights, inputs = map(taken, functions.both(pull, dy))
        if whole:
            self._backward_weight(weights)
        return inputs, weights

    def _backward_weight(self, pending: list[Array]) -> None:
        for name, part in zip(self.declared, pending):
            total = getattr(self, f"{name}_grad")
            # A frozen parameter has none.
            if total is not None:
                kernels.of_array(total).accumulate(total, arrays.as_reals(part))


class JaxStage(ForeignStage):
    """See `mpipipe.adapters.jax_stage`, which makes it."""

    def __init__(self, layer: JaxLayer, prefix: str = "", seed: int = 0) -> None:
        self.layer = layer
        self.function, parameters, *_ = layer.entry
        kinds = {}
        for name, leaf in named_leaves(parameters).items():
            empty = np.empty(0, leaf.dtype)
            put(empty)
            kinds[arrays.as_reals(empty).dtype.name] = name
        remedy = (
            "jax.tree.map(lambda x: x.astype(dtype), parameters); constants belong into the "
            "function"
        )
        super().__init__({prefix: layer}, one_dtype(kinds, remedy), seed, "cpu")

    @property
    def tree(self) -> JaxTree:
        """The parameters as a tree of views, shaped as the one that the function came with."""
        return self.layer.tree


def _declared(name: str, leaf: Array) -> Parameter:
    """Declare a parameter with its value: complex numbers as pairs of real ones."""
    if not arrays.is_floating(leaf.dtype):
        raise ArgumentError(
            f"the parameter {name} of a function",
            found=leaf.dtype,
            expected="floating or complex numbers, of one dtype",
            remedy="constants, such as integers, belong into the function",
        )
    wide = "float64"
    if leaf.dtype.kind == "c":
        wide = "complex128"
    reals = arrays.as_reals(leaf.astype(wide, order="C"))
    return Parameter(reals.shape, lambda *_: reals, decay=leaf.ndim > 1)


def named_leaves(parameters: JaxTree) -> dict[str, Array]:
    """Return the leaves of a tree by their paths. ArgumentError for what is no array of numbers."""
    leaves: dict[str, Array] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(parameters)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        kind = getattr(leaf, "dtype", type(leaf).__name__)
        is_key = jax.dtypes.issubdtype(getattr(leaf, "dtype", object), jax.dtypes.prng_key)
        if is_key or callable(leaf) or np.asarray(leaf).dtype.kind in "OSU":
            raise ArgumentError(
                f"{name} in a tree of a function of JAX is no array of numbers",
                found=str(kind),
                expected="arrays alone",
                remedy="arrays, _ = equinox.partition(model, equinox.is_array), and combine both "
                "in the function; jax.random.key_data of a key, or a parameter `key` of the "
                "function, which gets one",
            )
        leaves[name] = np.asarray(leaf)
    return leaves


# -- A loss function of JAX as the loss of a pipeline ----------------------------------------------


class JaxLoss:
    """See `mpipipe.adapters.jax_loss`, which makes it."""

    def __init__(self, function: Callable[..., JaxTree], seed: int = 0):
        self.function = function
        self.seed = seed
        self._draws = "key" in functions.options_of(function)
        self._functions = Functions(self._called, jax.tree_util.tree_structure([]), ())

    def _called(
        self, _nothing: object, output: JaxTree, target: JaxTree, *, key: JaxArray
    ) -> tuple[JaxArray, ...]:
        """Return (value,), or (value, weight), where the weight has no gradient."""
        options = {}
        if self._draws:
            options = {"key": key}
        result = self.function(output, target, **options)
        if not isinstance(result, tuple):
            return (result,)
        value, *weights = result
        fixed = []
        for w in weights:
            fixed.append(jax.lax.stop_gradient(jax.numpy.asarray(w, value.dtype)))
        return (value, *fixed)

    def __call__(
        self, output: Tree, target: Tree, factor: float = 1.0, position: Position | None = None
    ) -> tuple[Any, ...]:
        """Return (value, gradient of the output times `factor`), and the weight if there is one."""
        leaves, structures = flatten_parts([(), output, target])
        outputs, structure = flatten(output)
        floating = floating_of(outputs)
        taking = floating + (False,) * (len(leaves) - len(outputs))
        key = key_of(random_seed("jax loss", self.seed, *(position or Position())[:3]))
        results, pull, _ = self._functions.with_gradients(
            [], [*map(put, leaves)], key, None, structures, taking
        )
        value, *weight = results
        slopes = [jax.numpy.asarray(factor, value.dtype), *map(jax.numpy.zeros_like, weight)]
        gradients = spread(taken(functions.both(pull, slopes)[1]), floating)
        return (value.item(), unflatten(gradients, structure), *map(float, weight))


def key_of(seed: int) -> JaxArray:
    """Return a key of JAX for a seed of 64 bits."""
    return jax.random.wrap_key_data(
        np.array([seed], np.uint64).view(np.uint32), impl="threefry2x32"
    )
