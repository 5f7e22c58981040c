"""A module of PyTorch or a function of JAX as a layer, with parameters in buffers of its stage.

    stage         x, and what stands under names that it takes      y, and what it gives under names
    parts         [x, far, wide]                                    [y, far]
    function      f(x, far, wide), f(*x, far, wide) or              y, or (y, far)
                  f(far, wide, **x)

Each part is a tree of its own: an array, or a tuple or dict of arrays.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import compress, islice, repeat
from typing import Any, NamedTuple, TypeAlias

from mpipipe import arrays, nn
from mpipipe.arrays import Structure, Tree, flatten, unflatten
from mpipipe.errors import ArgumentError
from mpipipe.nn import Parameter, Position, random_seed

# Structures of parts with their numbers of arrays; arrays, with None for a gradient that is none.
Structures: TypeAlias = "tuple[tuple[Structure, int], ...]"
Leaves: TypeAlias = "list[Any]"


class Tape(NamedTuple):
    """What the forward of a micro-batch leaves for its backward.

    `of_library` is what PyTorch or JAX need; `structures` are those of the parts of the input,
    `floating` says which of its arrays take gradients; the next two are the same of the output.
    `bytes` are those that the library keeps, by their address, where they are counted.
    """

    of_library: nn.Saved
    structures: Structures
    floating: tuple[bool, ...]
    output: Structures
    differentiable: tuple[bool, ...]
    bytes: dict[int, int]


class StatesBefore(dict[tuple, Any]):
    """States that forwards found which will be run again, by step, micro-batch and replica."""

    def note(self, position: Position, state: object) -> None:
        """Remember a state. Those of another step are left by one that has failed."""
        if any(step != position.step for step, *_ in self):
            self.clear()
        self[position[:3]] = state

    def take(self, position: Position) -> Any:
        """Return the state of a forward that is run again, and forget it; None for others."""
        if position.recompute != "now":
            return None
        return self.pop(position[:3], None)


@dataclass(frozen=True)
class WithSkips:
    """See `mpipipe.adapters.with_skips`, which makes it."""

    entry: Any
    gives: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    # Keys by names of parameters within the entry.
    ties: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> list[tuple[str, bool]]:
        """The names that it takes, with False, and those that it gives, with True."""
        return [*zip(self.takes, repeat(False)), *zip(self.gives, repeat(True))]


class ForeignLayer(nn.Layer):
    """A module or function as a layer; a library has its own methods of lists of arrays.

    Its input and output may be a tuple or dict of arrays, where its neighbours take them. It is
    called with the values that stand under the names that it takes, and returns others for those
    that it gives. Its random numbers depend on its place in the model, or on the number of its
    stage.
    """

    takes_any = True
    # How a user gives all parameters one dtype.
    cast_remedy: str
    # Real dtypes of what is trained, with the name of a parameter that has it; see `_declare`.
    dtypes: dict[str, str]
    # Devices such as "cpu" and "cuda:1".
    devices: Collection[str] = ()

    _declare: Callable[[], dict[str, Parameter]]
    _forward: Callable[[Leaves, Structures], tuple[Leaves, Tape]]
    # The last argument is True for a backward of PyTorch that leaves nothing pending.
    _backward: Callable[[Leaves, Tape, bool], tuple[Leaves, nn.Pending]]

    def __init__(self, skips: WithSkips, place: int | None = None) -> None:
        self.entry = skips.entry
        module = self.entry[0] if isinstance(self.entry, tuple) else self.entry
        # True, unless the module or function has an attribute of this name that is False.
        self.mixes_positions = getattr(module, "mixes_positions", self.mixes_positions)
        self.place = place
        self.gives = skips.gives
        self.takes = skips.takes
        self.declared = self._declare()
        for name, key in skips.ties.items():
            if name not in self.declared:
                raise ArgumentError(
                    f"a tie names no parameter: {name!r}",
                    found=", ".join(self.declared) or "no parameters",
                    expected="one of those",
                )
            self.declared[name] = replace(self.declared[name], tie=key)
        self._tied = [name for name, entry in self.declared.items() if entry.tie is not None]

    def forget(self) -> ForeignLayer:
        """Let go of the module and its arrays: what is left says what the layer is."""
        self.entry = None
        declared = {}
        for name, entry in self.declared.items():
            declared[name] = replace(entry, draw=nn.zeros)
        self.declared = declared
        return self

    def bound(self) -> None:
        if self.stage.compute is not self.stage.parameters:
            raise ArgumentError(
                f"layer {self.name} is of PyTorch or JAX, and its stage computes in half precision",
                expected="dtype float32 or float64",
                remedy="torch.autocast, or a cast in JAX, within the layer",
            )

    def random_seed(self, library: str) -> int:
        """Return a seed for random numbers: the same again in a recomputation, others elsewhere."""
        stage: Any = self.stage
        place = stage.index if self.place is None else self.place
        return random_seed(library, stage.seed, place, *stage.position[:3])

    def poll(self) -> None:
        """Let messages move."""
        if self.stage.poll is not None:
            self.stage.poll()

    def forward(self, x: Tree) -> tuple[Tree, Tape]:
        stage = self.stage
        leaves, structures = flatten_parts([x, *map(stage.taken, self.takes)])
        outputs, tape = self._forward(leaves, structures)
        if THREAD.counts:
            for name in self.declared:
                tape.bytes.pop(arrays.address(getattr(self, name)), None)
        y, *named = unflatten_parts(outputs, tape.output)
        for name, tree in zip(self.gives, named):
            stage.give(name, tree)
        return y, tape

    def backward_input(self, dy: Tree, saved: Tape, whole: bool = False) -> tuple[Tree, Tape]:
        """Return the gradient of the input, with None for an array that has none.

        A `whole` backward of PyTorch leaves nothing for `backward_weight`.
        """
        stage = self.stage
        leaves: Leaves = []
        for part, (structure, count) in zip(
            [dy, *map(stage.gradient_of, self.gives)], saved.output
        ):
            leaves += _leaves_like(part, structure, count)
        slopes, pending = self._backward([*compress(leaves, saved.differentiable)], saved, whole)
        dx, *taken = unflatten_parts(spread(slopes, saved.floating), saved.structures)
        for name, gradient in zip(self.takes, taken):
            stage.add_gradient(name, gradient)
        return dx, saved._replace(of_library=pending)


class ForeignStage(nn.Stage):
    """Such a layer as a stage, and perhaps a loss, with a prefix in place of numbers of layers.

    Parameters of 16 bits stay such ones.
    """

    keeps_halves = True

    def __init__(self, layers: Sequence[ForeignLayer], prefix: str, seed: int) -> None:
        devices: set[str] = set()
        for layer in layers:
            devices.update(layer.devices)
        if len(devices) > 1:
            raise ArgumentError(
                "a module on several devices",
                found=", ".join(sorted(devices)),
                expected="one",
                remedy="module.to(device)",
            )
        self.layer = layers[0]
        kinds = self.layer.dtypes
        if len(kinds) > 1 or not kinds.keys() <= {"float64", "float32", "float16", "bfloat16"}:
            raise ArgumentError(
                "the parameters of a module or function must have one dtype, since they lie in one "
                "array",
                found=", ".join(f"{kind} ({name})" for kind, name in kinds.items()),
                expected="float64, float32, float16 or bfloat16, or complex numbers of one of "
                "these",
                remedy=self.layer.cast_remedy,
            )
        self._by_name = dict(zip((prefix.rstrip("."), f"{prefix}loss"), layers))
        super().__init__(layers, min(kinds, default="float32"), seed, min(devices, default="cpu"))

    def _named_layers(self) -> list[tuple[str, nn.Layer]]:
        return [*self._by_name.items()]


# -- Parts as lists of arrays ----------------------------------------------------------------------


def skip_names(names: Sequence[str], what: str) -> tuple[str, ...]:
    """Return names of skips as a tuple. ArgumentError for one text, and for what is no text."""
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise ArgumentError(
            f"{what} of with_skips or of a stage",
            found=repr(names),
            expected='a tuple of names of skips, such as ("far",)',
        )
    return tuple(names)


def returned(output: object, names: Sequence[str]) -> Sequence[Tree]:
    """Return the parts of an output that gives over skips with these names."""
    if not names:
        return [output]
    if isinstance(output, (tuple, list)) and len(output) == 1 + len(names):
        return output
    raise ArgumentError(
        "the output of a module or function that gives over skips",
        found=type(output).__name__,
        expected=f"a tuple of {1 + len(names)}: (y, {', '.join(names)})",
    )


def applied(
    function: Callable[..., Tree], leaves: Leaves, structures: Structures, **options: object
) -> Tree:
    """Return what a function returns for parts with these arrays."""
    main, *taken = unflatten_parts(leaves, structures)
    if isinstance(main, dict):
        return function(*taken, **main, **options)
    if not isinstance(main, tuple):
        main = (main,)
    return function(*main, *taken, **options)


def flatten_parts(
    parts: Sequence[Tree], of: Callable[[Tree], tuple[list, Structure]] = flatten
) -> tuple[list, Structures]:
    """Return the arrays of all parts, one after the other, and the structure of each."""
    leaves: list = []
    structures = []
    for part in parts:
        more, structure = of(part)
        leaves += more
        structures.append((structure, len(more)))
    return leaves, tuple(structures)


def unflatten_parts(leaves: Leaves, structures: Structures) -> list[Tree]:
    """Return the parts with these arrays."""
    source = iter(leaves)
    return [unflatten([*islice(source, count)], structure) for structure, count in structures]


def floating_of(leaves: Leaves) -> tuple[bool, ...]:
    """Tell for each array whether gradients exist for its dtype."""
    return tuple(arrays.is_floating(leaf.dtype) for leaf in leaves)


def spread(
    leaves: Leaves, places: Sequence[bool], others: Iterable[object] = repeat(None)
) -> Leaves:
    """Return the arrays in the places that are true, and what `others` have in the rest."""
    source = iter(leaves)
    return [next(source) if place else other for place, other in zip(places, others)]


def _leaves_like(tree: Tree | None, structure: Structure, count: int) -> Leaves:
    """Return the gradients for arrays of a structure, in their order; None where there is none."""
    if tree is None:
        return [None] * count
    if isinstance(tree, dict) and isinstance(structure, tuple) and tree.keys() == {*structure}:
        return [tree[name] for name in structure]
    leaves, other = flatten(tree)
    if other != structure:
        raise ArgumentError(
            "the gradient of an output has another structure than the output",
            found=other,
            expected=structure,
        )
    return leaves


# -- Facts of a thread -----------------------------------------------------------------------------


class OfThread(threading.local):
    """Facts of a thread for all of its layers.

    turn : the lock of the task whose batches another thread reads ahead. Modules draw random
        numbers only while they hold it, so that no reader draws from the same generators.
    counts : True where layers say what PyTorch and JAX keep
    hooks : how many hooks of tensors of PyTorch the thread has registered
    is_called_back : True within a call that JAX makes back to the host
    """

    turn: AbstractContextManager[object] = nullcontext()
    counts = False
    hooks = 0
    is_called_back = False


THREAD = OfThread()


# -- Random numbers of PyTorch, which has one generator for all of a process -----------------------


# Ranks that are threads share it.
DRAWING = threading.Lock()


def let_draw_in_turn(lock: AbstractContextManager[object]) -> None:
    """Let modules of this thread draw random numbers only while they hold this lock."""
    THREAD.turn = lock


@contextmanager
def seeded(seed: int, place: int, waits: bool = False) -> Iterator[None]:
    """Let PyTorch, where it is there, draw for (seed, place) within, and go on after it as before.

    `waits` says whether the block may wait for other ranks, which must be able to draw meanwhile.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    with nullcontext() if waits else DRAWING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(random_seed("layers", seed, place))
        yield


# -- Memory of PyTorch and JAX, for measurements of what a forward saved ---------------------------


@contextmanager
def counting() -> Iterator[None]:
    """Let forwards of this thread say with what they save how much of it PyTorch and JAX keep."""
    THREAD.counts = True
    try:
        yield
    finally:
        THREAD.counts = False
