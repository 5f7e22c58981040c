"""A function of JAX, with its parameters, as a stage of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from mpipipe import arrays
from mpipipe.adapters.jax import functions
from mpipipe.adapters.jax.functions import (
    Functions,
    JaxArray,
    Results,
    divided,
    is_on_host,
    joined,
    pulled,
    put,
    waiting_for_jax,
)
from mpipipe.adapters.trees import KINDS, Structures, Tape, TreeStage, flatten_parts, one_dtype
from mpipipe.arrays import Array, Structure, Tree, flatten, unflatten
from mpipipe.errors import ArgumentError
from mpipipe.nn import FlatBuffer, Parameter, Position, kernels


class JaxStage(TreeStage):
    """See `mpipipe.adapters.jax_stage`, which makes it.

    `parameters` and `gradients`, by their paths in the tree, are views of one array `.flat` each, or None. JAX computes
    with the memory of `parameters`.
    """

    def __init__(self, function: Callable[..., Any], parameters: Any, prefix: str = "", *common: Any):
        if not callable(function):
            raise ArgumentError("jax_stage", found=type(function).__name__, expected="a function (parameters, x) -> y")
        super().__init__("jax_stage", *common)
        self.function = function
        self._tree, leaves = jax.tree_util.tree_structure(parameters), named_leaves(parameters, prefix)
        on_gpu = any(isinstance(leaf, jax.Array) and not is_on_host(leaf) for leaf in leaves.values())
        self.device = arrays.check_device("cuda" if on_gpu else "cpu")
        self.gpu = arrays.current_gpu() if on_gpu else None
        self.parameters: Mapping[str, Any] | None = None
        self.gradients: Mapping[str, Any] | None = None
        self._results = Results()
        self._functions: dict[tuple, Functions] = {}
        self._values: list[JaxArray] = []
        self._renews = on_gpu
        if leaves:
            self._bind({name: np.asarray(leaf) for name, leaf in leaves.items()})

    def _bind(self, values: dict[str, np.ndarray]) -> None:
        kind = one_dtype(
            {value.dtype.name: name for name, value in values.items()},
            "function",
            "jax.tree.map(lambda x: x.astype(dtype), parameters); constants belong into the function",
        )
        shapes = {name: value.shape for name, value in values.items()}
        self.parameters, self.gradients = (FlatBuffer(shapes, kind, self.device) for _ in range(2))
        for name, value in values.items():
            arrays.copy_into(self.parameters[name], arrays.upload(value) if self.gpu is not None else value)
        self._read_parameters()
        if self.gpu is None:  # where JAX has not taken the memory itself, it must be told of each change
            self._renews = any(
                each.size and each.unsafe_buffer_pointer() != arrays.address(own)
                for each, own in zip(self._values, self.parameters.values())
            )

    def _read_parameters(self) -> None:
        self._values = [] if self.parameters is None else [put(each) for each in self.parameters.values()]

    @property
    def tree(self) -> Any:
        """The parameters as a tree of views, shaped as the one that was given."""
        return jax.tree_util.tree_unflatten(self._tree, [] if self.parameters is None else [*self.parameters.values()])

    def place(self, name: str, value: Array, gradient: Array | None) -> None:
        """Let one parameter and its gradient lie in these arrays."""
        self.parameters = {**(self.parameters or {}), name: value}
        self.gradients = {**(self.gradients or {}), name: gradient}

    def begin(self) -> None:
        """Nothing is to be done before a call."""

    def refresh(self) -> None:
        """Let JAX see the parameters as they are now. A pipeline does this at the start of each call."""
        if self._renews:
            self._read_parameters()

    _computing = staticmethod(waiting_for_jax)

    def _forward(
        self, leaves: list[Array], structures: Structures, position: Position
    ) -> tuple[list[Array], Structures, Tape | None]:
        floating = tuple(not self.ends and arrays.is_floating(leaf.dtype) for leaf in leaves)
        key = structures, floating
        if key not in self._functions:
            self._functions[key] = Functions(self.function, self._tree, structures, floating, self.gives)
        compiled, pull = self._functions[key], None
        some, others = divided([*map(put, leaves)], floating)
        words = self.key("jax", position)[:1].view(np.uint32)
        arguments = self._values, some, others, jax.random.wrap_key_data(words, impl="threefry2x32")
        if position.training:
            found, pull, rest = compiled.with_gradients(*arguments)
        else:
            found, rest = compiled.forward(*arguments)
        without, output = flatten_parts(rest, functions.flatten_output)
        differentiable = tuple(leaf is None for leaf in without)
        taken = self._results.take([*found, *(leaf for leaf in without if leaf is not None)])
        y = joined(taken[: len(found)], taken[len(found) :], differentiable)
        return y, output, Tape(pull, structures, floating, output, differentiable) if position.training else None

    def _backward(self, slopes: list[Array | None], saved: Tape) -> list[Array]:
        weights, inputs = functions.both(saved.kept, [*map(put, slopes)])
        found = self._results.take([*weights, *inputs])
        self._add(found[: len(weights)])
        return found[len(weights) :]

    def _backward_input(self, slopes: list[Array | None], saved: Tape) -> tuple[list[Array], Any]:
        """JAX computes both gradients here, as one function; those of the parameters are added in the other half."""
        weights, inputs = functions.both(saved.kept, [*map(put, slopes)])
        found = self._results.take([*weights, *inputs])
        return found[len(weights) :], found[: len(weights)]

    def _backward_weight(self, pending: Any) -> None:
        self._add(pending)

    def _add(self, found: Sequence[Array]) -> None:
        if self.gradients is not None:
            for total, part in zip(self.gradients.values(), found):
                if total is not None:  # else frozen
                    kernels.of_array(total).accumulate(total, part)


# -- A function as a layer of a stage, in whose buffers its parameters lie ---------------------------------------------


def declared_by(given: tuple[Any, Any]) -> dict[str, Parameter]:
    """Return the parameters of (function, parameters) by their paths, as a layer declares them, with their values."""
    leaves = {name: np.asarray(leaf) for name, leaf in named_leaves(given[1]).items()}
    strange = [name for name, leaf in leaves.items() if leaf.dtype.name not in KINDS or leaf.dtype.kind == "c"]
    if strange:
        raise ArgumentError(
            f"the parameter {strange[0]} of a function",
            found=leaves[strange[0]].dtype,
            expected="real floating numbers",
            remedy="keep real and imaginary parts as a last axis of 2; constants belong into the function",
        )
    return {
        name: Parameter(leaf.shape, lambda *_, leaf=leaf: leaf.astype(np.float64), decay=leaf.ndim > 1)
        for name, leaf in leaves.items()
    }


def stage_on(given: tuple[Any, Any], values: Mapping[str, Array], gradients: Mapping[str, Any], seed: int) -> JaxStage:
    """Return a stage of (function, parameters) whose parameters are these arrays; one without a gradient is frozen."""
    stage = JaxStage(given[0], (), "", seed)
    stage._tree = jax.tree_util.tree_structure(given[1])
    stage.parameters, stage.gradients = dict(values), dict(gradients)
    stage._read_parameters()
    stage._renews = True
    return stage


def counted(stage: JaxStage, x: Tree, position: Position) -> tuple[Any, dict[int, int]]:
    """Return what the forward returns, and what JAX keeps for its backward: bytes by the address of the memory."""
    found = stage.forward(x, position)
    kept = [] if found[1] is None else jax.tree.leaves(found[1].kept)
    return found, {each.unsafe_buffer_pointer(): each.nbytes for each in kept if isinstance(each, jax.Array)}


def named_leaves(parameters: Any, prefix: str = "") -> dict[str, Any]:
    """Return the leaves of a tree by their paths."""
    paths = jax.tree_util.tree_flatten_with_path(parameters)[0]
    return {f"{prefix}{jax.tree_util.keystr(path, simple=True, separator='.')}": leaf for path, leaf in paths}


# -- A loss function of JAX as the loss of a pipeline -----------------------------------------------------------------


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
        some, others = divided([*map(put, leaves)], floating)
        value, slopes = self._compiled[key](some, others, list(map(put, targets)), factor)
        taken = iter(self._results.take(slopes))
        gradient = unflatten([next(taken) if each else None for each in floating], structure)
        return value.item() if is_on_host(value) else self._results.take([value])[0], gradient

    def _compile(self, structure: Structure, shape: Structure, floating: tuple[bool, ...]) -> Callable[..., Any]:
        def value_of(some: list, others: list, targets: list) -> Any:
            return self.function(unflatten(joined(some, others, floating), structure), unflatten(targets, shape))

        def both(some: list, others: list, targets: list, factor: Any) -> Any:
            value, pull = jax.vjp(lambda x: value_of(x, others, targets), some)
            return value, pulled(pull, jax.numpy.asarray(factor, value.dtype))[0]

        return jax.jit(both)
