"""A function of JAX and its parameters as a layer, and as a stage; and a loss function of JAX."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from itertools import compress
from typing import Any

import jax
import numpy as np

from mpipipe import arrays
from mpipipe.adapters.foreign import (
    THREAD,
    ForeignLayer,
    ForeignStage,
    Leaves,
    StatesBefore,
    Structures,
    Tape,
    flatten_parts,
    floating_of,
    spread,
    unflatten_parts,
)
from mpipipe.adapters.jax.functions import (
    JaxArray,
    JaxTree,
    both,
    compiled,
    flatten_output,
    kinds_of,
    options_of,
    put,
    taken,
    waiting_for_jax,
)
from mpipipe.arrays import Array, Tree, unflatten
from mpipipe.errors import ArgumentError
from mpipipe.nn import Parameter, Position, random_seed


class JaxLayer(ForeignLayer):
    """(function, parameters) of JAX as a layer, or (function, parameters, state).

    JAX computes with the memory of the parameters where it takes that. A forward of a training step
    gives the next one its state. One that is run again finds the state of the first time, and
    leaves that of now.
    """

    ends = False
    mixes_positions = True
    cast_remedy = (
        "jax.tree.map(lambda x: x.astype(dtype), parameters); constants belong into the function"
    )
    # The state by the paths in its tree, on the host. A forward puts new arrays there, and a load
    # may write to them.
    state: dict[str, Array]

    def _declare(self) -> dict[str, Parameter]:
        function, parameters, state = (*self.entry, None)[:3]
        if not callable(function):
            raise ArgumentError(
                "jax_stage",
                found=type(function).__name__,
                expected="a function (parameters, x) -> y",
            )
        takes = options_of(function)
        if ("state" in takes) != (state is not None):
            raise ArgumentError(
                "a function of JAX with a parameter `state` and a state belong together",
                found="a function with `state`, and no state"
                if "state" in takes
                else "a state alone",
                expected="function(parameters, x, state) that returns (y, state), and its first "
                "state",
            )
        self._state_tree = jax.tree.structure(state)
        self.state = {name: leaf.copy() for name, leaf in named_leaves(state).items()}
        self._before = StatesBefore()
        self.structure = jax.tree.structure(parameters)
        leaves = named_leaves(parameters)
        self._complex = {name for name, leaf in leaves.items() if leaf.dtype.kind == "c"}
        self.dtypes = {leaf.real.dtype.name: name for name, leaf in leaves.items()}
        return {name: _declared(name, leaf) for name, leaf in leaves.items()}

    @cached_property
    def _compiled(self) -> Callable[..., JaxTree]:
        return compiled(self.entry[0], self.structure, self.gives)

    def bound(self) -> None:
        super().bound()
        for name, leaf in self.state.items():
            # It goes along with the parameters.
            if leaf.dtype.name in self.dtypes:
                self.state[name] = leaf.astype(self.stage.dtype)
        self._values: dict[str, JaxArray] = {}
        self.begin_call()

    def begin_call(self) -> None:
        """Let JAX see the parameters as they are now.

        It copies what does not lie as it wants, and does not see new values of these.
        """
        for name, array in self.views.items():
            value = self._values.get(name)
            if value is None or value.unsafe_buffer_pointer() != arrays.address(array):
                self._values[name] = put(array)

    @property
    def views(self) -> dict[str, Array]:
        """The parameters, complex where JAX has them so."""
        views = {}
        for name in self.declared:
            array = getattr(self, name)
            if name in self._complex:
                array = array.view(f"c{2 * array.itemsize}")[..., 0]
            views[name] = array
        return views

    @waiting_for_jax()
    def _forward(self, leaves: Leaves, structures: Structures) -> tuple[Leaves, Tape]:
        position = self.stage.position
        floating = (False,) * len(leaves) if self.ends else floating_of(leaves)
        state = self._before.take(position) or self.state
        if position.recompute == "later":
            self._before.note(position, state)
        results, pull, (rest, after) = self._compiled(
            [*self._values.values()],
            [*map(put, leaves)],
            key_of(self.random_seed("jax")),
            jax.tree.unflatten(self._state_tree, map(put, state.values())),
            structures,
            floating,
            position.training,
        )
        if position.training and position.recompute != "now":
            # The backward keeps the arrays that there were.
            self.state = {}
            for (name, array), new in zip(state.items(), taken(jax.tree.leaves(after))):
                self.state[name] = new.astype(array.dtype)
        # Without the floating arrays, in whose places None stands.
        without, output = flatten_parts(rest, flatten_output)
        differentiable = tuple(leaf is None for leaf in without)
        sizes = {}
        if THREAD.counts:
            for array in jax.tree.leaves(pull):
                sizes[array.unsafe_buffer_pointer()] = array.nbytes
        tape = Tape((pull, kinds_of(results)), structures, floating, output, differentiable, sizes)
        return taken(spread(results, differentiable, without)), tape

    @waiting_for_jax()
    def _backward(self, slopes: Leaves, tape: Tape, whole: bool) -> tuple[Leaves, list[Array]]:
        """Compute both gradients, as one function; the other half adds those of parameters."""
        pull, kinds = tape.of_library
        dy = []
        for slope, kind in zip(slopes, kinds):
            dy.append(jax.numpy.zeros(*kind) if slope is None else put(slope))
        weights, inputs = map(taken, both(pull, dy))
        return inputs, weights

    def backward_weight(self, pending: Tape) -> None:
        for name, part in zip(self.declared, pending.of_library):
            total = getattr(self, f"{name}_grad")
            # A frozen parameter has none.
            if total is not None:
                self.stage.kernels.accumulate(total, arrays.as_reals(part))


class JaxStage(ForeignStage):
    """See `mpipipe.adapters.jax_stage`, which makes it."""

    layer: JaxLayer

    @property
    def function(self) -> Callable[..., JaxTree]:
        """The function that it computes."""
        return self.layer.entry[0]

    @property
    def tree(self) -> JaxTree:
        """The parameters as a tree of views, shaped as the one that the function came with."""
        return jax.tree.unflatten(self.layer.structure, self.layer.views.values())


def _declared(name: str, leaf: Array) -> Parameter:
    """Declare a parameter with its value: complex numbers as pairs of real ones."""
    if not arrays.is_floating(leaf.dtype):
        raise ArgumentError(
            f"the parameter {name} of a function",
            found=leaf.dtype,
            expected="floating or complex numbers, of one dtype",
            remedy="constants, such as integers, belong into the function",
        )
    wide = np.promote_types(leaf.dtype, np.float64)
    reals = arrays.as_reals(leaf.astype(wide, order="C"))
    return Parameter(reals.shape, lambda *_: reals, decay=leaf.ndim > 1)


def named_leaves(parameters: JaxTree) -> dict[str, Array]:
    """Return the leaves of a tree by their paths. ArgumentError for what is no array of numbers."""
    leaves: dict[str, Array] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(parameters)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        kind = getattr(leaf, "dtype", type(leaf).__name__)
        # The dtype of a key of JAX is none of numpy.
        if not isinstance(kind, (np.dtype, str)) or np.asarray(leaf).dtype.kind in "OSU":
            raise ArgumentError(
                f"{name} in a tree of a function of JAX is no array of numbers",
                found=kind,
                expected="arrays alone",
                remedy="arrays, _ = equinox.partition(model, equinox.is_array), and combine both "
                "in the function; jax.random.key_data of a key, or a parameter `key` of the "
                "function, which gets one",
            )
        leaves[name] = np.asarray(leaf)
    return leaves


def check_new_arrays(leaves: dict[int, str], place: int, parameters: JaxTree) -> None:
    """Raise ArgumentError for an array in two functions of JAX: it might mean one parameter."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(parameters)[0]:
        name = f"{place}.{jax.tree_util.keystr(path, simple=True, separator='.')}"
        other = leaves.setdefault(id(leaf), name)
        if other.partition(".")[0] != f"{place}" and np.ndim(leaf):
            raise ArgumentError(
                f"one array is the parameter {other} and the parameter {name}",
                expected="an array of its own for each, or ties",
                remedy="with_skips(entry, ties={name: key}) in both entries for one parameter, "
                "jnp.array(x) for two",
            )


# -- A loss function of JAX as the loss of a pipeline ----------------------------------------------


class JaxLoss:
    """See `mpipipe.adapters.jax_loss`, which makes it."""

    def __init__(self, function: Callable[..., JaxTree], seed: int):
        self.function = function
        self.seed = seed
        takes = options_of(function) & {"key"}

        def scaled(
            outputs: list, targets: list, key: JaxArray, factor: float, structures: Structures
        ) -> JaxTree:
            options = dict.fromkeys(takes, key)
            result = function(*unflatten_parts([*outputs, *targets], structures), **options)
            value, *weights = result if isinstance(result, tuple) else (result,)
            return value * factor, (value, weights)

        self._compute = jax.jit(jax.grad(scaled, has_aux=True, allow_int=True), static_argnums=4)

    def __call__(
        self, output: Tree, target: Tree, factor: float = 1.0, position: Position | None = None
    ) -> tuple[Any, ...]:
        """Return (value, gradient of the output times `factor`), and the weight if there is one."""
        leaves, structures = flatten_parts([output, target])
        structure, count = structures[0]
        floating = floating_of(leaves[:count])
        inputs = list(map(put, leaves))
        slopes, (value, weights) = self._compute(
            inputs[:count],
            inputs[count:],
            key_of(random_seed("jax loss", self.seed, *(position or Position())[:3])),
            factor,
            structures,
        )
        # JAX's own gradients are the conjugates, and those of integers have no numbers.
        gradients = taken(list(map(jax.numpy.conj, compress(slopes, floating))))
        return (
            value.item(),
            unflatten(spread(gradients, floating), structure),
            *map(float, weights),
        )


def key_of(seed: int) -> JaxArray:
    """Return a key of JAX for a seed of 64 bits."""
    return jax.random.wrap_key_data(
        np.array([seed], np.uint64).view(np.uint32), impl="threefry2x32"
    )
