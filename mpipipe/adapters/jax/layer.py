"""A function of JAX, with its parameters, as a layer, and as a stage of its own; and a loss function of JAX."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np

from mpipipe import arrays
from mpipipe.adapters.foreign import ForeignLayer, ForeignStage, Leaves, Structures, Tape, flatten_parts, one_dtype
from mpipipe.adapters.jax import functions
from mpipipe.adapters.jax.functions import Functions, JaxArray, divided, joined, put, taken, waiting_for_jax
from mpipipe.arrays import Tree, flatten, unflatten
from mpipipe.errors import ArgumentError
from mpipipe.nn import Parameter, Position, kernels


class JaxLayer(ForeignLayer):
    """(function, parameters) of JAX as a layer. JAX computes with the memory of the parameters where it takes that."""

    ends = False
    freezes_parts = True
    mixes_positions = ForeignLayer.mixes_positions

    def _declare(self) -> dict[str, Parameter]:
        function, parameters = self.given
        if not callable(function):
            raise ArgumentError("jax_stage", found=type(function).__name__, expected="a function (parameters, x) -> y")
        self._tree, leaves = jax.tree_util.tree_structure(parameters), named_leaves(parameters)
        self._complex = {name for name, leaf in leaves.items() if leaf.dtype.kind == "c"}
        self._functions: dict[tuple, Functions] = {}
        self._values: list[JaxArray] = []
        return {name: _declared(name, leaf) for name, leaf in leaves.items()}

    def bound(self) -> None:
        super().bound()
        self._read_parameters()
        pairs = zip(self._values, self.declared)
        self._renews = any(
            value.unsafe_buffer_pointer() != arrays.address(getattr(self, name)) for value, name in pairs if value.size
        )

    def _of(self, name: str, suffix: str = "") -> Any:
        """Return a parameter or its gradient, complex where JAX has it so."""
        array = getattr(self, f"{name}{suffix}")
        return array.view(f"c{2 * array.itemsize}")[..., 0] if array is not None and name in self._complex else array

    def _read_parameters(self) -> None:
        self._values = [put(self._of(name)) for name in self.declared]

    def _follow_ties(self) -> None:
        """Compute with the arrays that a pipeline has given to tied parameters."""
        self._read_parameters()

    def begin_call(self) -> None:
        """Let JAX see the parameters as they are now, where it has not taken their memory."""
        if self.stage is not None and self._values and self._renews:
            self._read_parameters()

    @property
    def tree(self) -> Any:
        """The parameters as a tree of views, shaped as the one that was given."""
        return jax.tree_util.tree_unflatten(self._tree, [self._of(name) for name in self.declared])

    _computing: Callable[[], AbstractContextManager[Any]] = staticmethod(waiting_for_jax)

    def _forward(
        self, leaves: Leaves, structures: Structures, position: Position
    ) -> tuple[Leaves, Structures, Tape | None]:
        floating = tuple(not self.ends and arrays.is_floating(leaf.dtype) for leaf in leaves)
        key = structures, floating
        if key not in self._functions:
            self._functions[key] = Functions(self.given[0], self._tree, structures, floating, self.gives)
        compiled, pull = self._functions[key], None
        some, others = divided([*map(put, leaves)], floating)
        words = np.array([self.random_seed("jax")], np.uint64).view(np.uint32)
        arguments = self._values, some, others, jax.random.wrap_key_data(words, impl="threefry2x32")
        if position.training:
            found, pull, rest = compiled.with_gradients(*arguments)
        else:
            found, rest = compiled.forward(*arguments)
        without, output = flatten_parts(rest, functions.flatten_output)
        differentiable = tuple(leaf is None for leaf in without)
        y = joined(taken(found), taken([leaf for leaf in without if leaf is not None]), differentiable)
        kept = pull, [(each.shape, each.dtype) for each in found]
        return y, output, Tape(kept, structures, floating, output, differentiable) if position.training else None

    def _counted(self, leaves: Leaves, structures: Structures, position: Position) -> Any:
        """Return what `_forward` does, and what JAX keeps for the backward: bytes by the address of the memory."""
        found = self._forward(leaves, structures, position)
        held = {} if found[2] is None else {
            each.unsafe_buffer_pointer(): each.nbytes
            for each in jax.tree.leaves(found[2].kept[0])
            if isinstance(each, jax.Array)
        }  # fmt: skip
        for name in self.declared:
            held.pop(arrays.address(getattr(self, name)), None)
        return found, held

    def _backward(self, slopes: Leaves, tape: Tape) -> Leaves:
        found, weights = self._backward_input(slopes, tape)
        self._backward_weight(weights)
        return found

    def _backward_input(self, slopes: Leaves, tape: Tape) -> tuple[Leaves, Any]:
        """JAX computes both gradients here, as one function; those of the parameters are added in the other half."""
        pull, outputs = tape.kept
        dy = [jax.numpy.zeros(*like) if slope is None else put(slope) for slope, like in zip(slopes, outputs)]
        weights, inputs = functions.both(pull, dy)
        return taken(inputs), taken(weights)

    def _backward_weight(self, pending: Any) -> None:
        for name, part in zip(self.declared, pending):
            total = getattr(self, f"{name}_grad")
            if total is not None:  # else frozen
                kernels.of_array(total).accumulate(total, arrays.as_reals(part))


class JaxStage(ForeignStage):
    """See `mpipipe.adapters.jax_stage`, which makes it."""

    def __init__(
        self,
        function: Callable[..., Any],
        parameters: Any,
        prefix: str = "",
        seed: int = 0,
        gives: Sequence[str] = (),
        takes: Sequence[str] = (),
        ties: Mapping[str, str] | None = None,
    ) -> None:
        self.function = function
        self.layer = JaxLayer((function, parameters), gives, takes, ties)
        kinds = {}
        for name, leaf in named_leaves(parameters).items():
            empty = np.empty(0, leaf.dtype)
            put(empty)
            kinds[arrays.as_reals(empty).dtype.name] = name
        remedy = "jax.tree.map(lambda x: x.astype(dtype), parameters); constants belong into the function"
        super().__init__({prefix: self.layer}, one_dtype(kinds, remedy), seed, "cpu")

    @property
    def tree(self) -> Any:
        """The parameters as a tree of views, shaped as the one that was given."""
        return self.layer.tree


def _declared(name: str, leaf: Any) -> Parameter:
    """Return a parameter as a layer declares it, with its value: complex numbers as pairs of real ones."""
    array = np.asarray(leaf)
    if not arrays.is_floating(array.dtype):
        raise ArgumentError(
            f"the parameter {name} of a function",
            found=array.dtype,
            expected="floating or complex numbers, of one dtype",
            remedy="constants, such as integers, belong into the function",
        )
    wide = array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)
    reals = arrays.as_reals(np.ascontiguousarray(wide).reshape(wide.shape))
    return Parameter(reals.shape, lambda *_: reals, decay=leaf.ndim > 1)


def named_leaves(parameters: Any) -> dict[str, Any]:
    """Return the leaves of a tree by their paths."""
    paths = jax.tree_util.tree_flatten_with_path(parameters)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf) for path, leaf in paths}


# -- A loss function of JAX as the loss of a pipeline -----------------------------------------------------------------


class JaxLoss:
    """See `mpipipe.adapters.jax_loss`, which makes it."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self._functions: dict[tuple, Functions] = {}

    def __call__(self, output: Tree, target: Tree, factor: float = 1.0) -> tuple[Any, Tree]:
        """Return (value, gradient of the output times `factor`)."""
        leaves, structures = flatten_parts([(), output, target])
        own, structure = flatten(output)
        floating = tuple(place < len(own) and arrays.is_floating(leaf.dtype) for place, leaf in enumerate(leaves))
        key = structures, floating
        if key not in self._functions:
            self._functions[key] = Functions(lambda _, *given: self.function(*given), NOTHING, structures, floating, ())
        some, others = divided([*map(put, leaves)], floating)
        (value,), pull, _ = self._functions[key].with_gradients([], some, others, None)
        _, slopes = functions.both(pull, [jax.numpy.asarray(factor, value.dtype)])
        source = iter(taken(slopes))
        return value.item(), unflatten([next(source) if each else None for each in floating[: len(own)]], structure)


NOTHING = jax.tree_util.tree_structure([])
