"""AdamW, stochastic gradient descent with momentum, and learning-rate curves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from operator import itemgetter
from typing import Any, Protocol, TypeAlias

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array, DeviceArray, Shape
from mpipipe.errors import ArgumentError
from mpipipe.job import Communicator, group_of, runtime
from mpipipe.nn import announce_write
from mpipipe.nn.kernels import AdamWNumbers, Kernels, Update
from mpipipe.optim.shards import Shards
from mpipipe.stages import PipelineStage, StageLike, as_stages
from mpipipe.text import counted

State: TypeAlias = dict[str, Array]  # arrays of a stage by kind


class Optimizer(Protocol):
    """An optimizer, as checkpoints and replicas see it: `AdamW`, `SGD`, or one of your own."""

    steps: int

    def named_state(self) -> dict[str, dict[str, Any]]:
        """Return {kind: {name of a parameter: array or StateShard}}, to be set in place."""


class FlatOptimizer:
    """State buffers that are laid out as the parameters, and steps piece by piece."""

    # It updates a piece: kernels; parameters, gradients and state; learning rate, decay, how.
    _update: Callable[[Kernels, Sequence[Array], float, float, Update], None]

    def __init__(
        self,
        stages: Sequence[object],
        lr: float,
        weight_decay: float,
        groups: Sequence[Group],
        kinds: Sequence[str],
        replicas: Communicator | None,
    ):
        self.stages = tuple(stages)
        self.lr = lr
        self.weight_decay = weight_decay
        self.groups = tuple(groups)
        self._shards: Shards | None = None
        comm = None
        together: AbstractContextManager[None] = nullcontext()
        if replicas is not None and runtime.resolve(replicas).size > 1:
            comm = runtime.resolve(replicas)
            together = group_of(comm).raise_together("optim: the stages of an optimizer")
        with together:
            self._updated = as_stages(self.stages)
            for number, stage in enumerate(self._updated):
                dtype = stage.parameters.flat.dtype
                of_gradients = stage.gradients.flat.dtype
                is_full = dtype in (np.float32, np.float64) and of_gradients == dtype
                if stage.parameters.flat.size and not is_full:
                    raise ArgumentError(
                        f"parameters of the optimizer's stage {number} are in {dtype}",
                        stage=stage.index,
                        found=f"parameters in {dtype}, gradients in {of_gradients}",
                        expected="float32 or float64: in half precision most updates are lost when "
                        "they are rounded",
                        remedy="keep parameters in float32 and compute in half precision, by "
                        "torch.autocast or a cast in JAX",
                    )
            strange = [type(group).__name__ for group in groups if not isinstance(group, Group)]
            if strange:
                raise ArgumentError(
                    "groups of an optimizer",
                    found=", ".join(strange),
                    expected="a list of optim.Group",
                )
        if comm is not None:
            self._shards = Shards(comm, self._updated)
        self.steps = 0
        self.before_write: list[Callable[[], object]] = []
        self.state: list[State] = []
        for number, stage in enumerate(self._updated):
            share = stage.gradients.flat[slice(*self._share(number))]
            self.state.append({kind: arrays.zeros_like(share) for kind in kinds})

    def __repr__(self) -> str:
        stages = counted(len(self.stages), "stage")
        return f"<{type(self).__name__} of {stages}, lr={self.lr}, {counted(self.steps, 'step')}>"

    def _share(self, number: int) -> tuple[int, int]:
        """The range of the flat parameters of a stage that is updated here."""
        if self._shards is not None:
            return self._shards.share_of(number)
        return (0, self._updated[number].gradients.flat.size)

    def step(self, lr: float | None = None, scale: float | DeviceArray = 1.0) -> None:
        """Make one step with the gradients of the stages.

        Parameters
        ----------
        lr : float, optional
            Overrides the learning rate for this step.
        scale : float or cupy.ndarray
            Factor of the gradients, which stay as they are. For stages on a GPU it may be there, ()
            of float64; where it is NaN then, parameters and state stay as they are.

        Raises
        ------
        MismatchError
            The replicas of a sharded optimizer differ in numbers, or in a sample of their
            parameters and gradients.
        """
        rate = self.lr
        if lr is not None:
            rate = lr
        shards = self._shards
        context: AbstractContextManager[None] = nullcontext()
        if shards is not None:
            context = shards.step(
                steps=self.steps,
                lr=float(rate),
                weight_decay=self.weight_decay,
                scale=scale if isinstance(scale, float) else None,
            )
        with context:
            announce_write(self, *self._updated)
            self.steps += 1
            for number, stage in enumerate(self._updated):
                share = self._share(number)
                parameters = None
                if shards is not None:
                    parameters = shards.originals[number]
                if parameters is None:
                    parameters = stage.parameters.flat[slice(*share)]
                gradients = stage.gradients.flat[slice(*share)]
                buffers = [parameters, gradients, *self.state[number].values()]
                copy = stage.kept_copy
                # Pieces are cut in each step, since a pipeline may have shortened the parameters.
                for start, stop, factor, decay in pieces(
                    stage, self.groups, share, self.weight_decay
                ):
                    piece = [x[start - share[0] : stop - share[0]] for x in buffers]
                    update = Update(scale, None if copy is None else copy[start:stop])
                    self._update(stage.kernels, piece, rate * factor, decay, update)
                if shards is not None:
                    shards.give(number)

    def whole_parameters(self) -> AbstractContextManager[None]:
        """Make `stage.parameters` whole within this context; collective.

        With `replicas`, a stage that computes in half precision keeps float32 parameters of this
        replica's share alone, and reading the others raises ArgumentError. Here they are put
        together, at 4 bytes for each. What is written is to be equal on all replicas, and counts
        from the end on; arrays of the parameters are NaN then: take copies. Elsewhere, as without
        `replicas`, parameters are whole anyway.

        Examples
        --------
        >>> from mpipipe import nn, optim
        >>> from mpipipe.job import inprocess
        >>> def on_each_rank(comm):
        ...     stage = nn.Stage([nn.RMSNorm(2)], "bfloat16")
        ...     stage.gradients["0.gain"][...] = 1
        ...     optimizer = optim.SGD([stage], lr=0.5, replicas=comm)
        ...     optimizer.step()
        ...     with optimizer.whole_parameters():
        ...         return stage.parameters["0.gain"].tolist()
        >>> inprocess.run(2, on_each_rank)
        [[0.5, 0.5], [0.5, 0.5]]
        """
        if self._shards is None:
            return nullcontext()
        return self._shards.whole()

    def named_state(self) -> dict[str, dict[str, Any]]:
        """Return the state by kind and parameter name: views to read and to set.

        With `steps` this is all that an optimizer has to remember.

        Returns
        -------
        dict of dict of array
            The kinds are "first" and "second" of AdamW, and "momentum" of SGD if it has any. Each
            array has the shape of its parameter; with `replicas` it is a StateShard, this replica's
            part. A tied parameter that several places of this rank share has one state, under the
            name of each place. ArgumentError is raised for two stages with a parameter of the same
            name, and for one that is shared with a stage that is not here.

        Examples
        --------
        >>> from mpipipe import nn, optim
        >>> stage = nn.Stage([nn.RMSNorm(2)])
        >>> optim.AdamW([stage], lr=0.5).named_state()["second"]
        {'0.gain': array([0., 0.], dtype=float32)}
        """
        # A rank without parameters has the kinds, too.
        named: dict[str, dict[str, Any]] = {kind: {} for state in self.state for kind in state}
        numbers = {id(stage): number for number, stage in enumerate(self._updated)}
        for stage in self._updated:
            for name, like in stage.gradients.items():
                owner, key = stage.owners.get(name, (stage, name))
                if id(owner) not in numbers:
                    raise ArgumentError(
                        f"the tied parameter {name} belongs to a stage that this optimizer does "
                        "not have",
                        stage=stage.index,
                        remedy="give the optimizer all stages of this rank",
                    )
                number = numbers[id(owner)]
                start = self._updated[number].gradients.offsets[key]
                for kind, buffer in self.state[number].items():
                    entries = named[kind]
                    if name in entries:
                        raise duplicate_name_error(name)
                    if self._shards is None:
                        entries[name] = buffer[start : start + like.size].reshape(like.shape)
                    else:
                        entries[name] = self._shards.shard(number, start, like, buffer)
        return named


class AdamW(FlatOptimizer):
    """Adam with decoupled weight decay.

    Loshchilov and Hutter, "Decoupled weight decay regularization" (2019).

    Their algorithm 2: m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2; p -= lr * weight_decay * p;
    then p -= lr * (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps). Updates are in place, in the
    dtype of the stage's parameters, with the scalars of the bias correction in float64.

    Parameters
    ----------
    stages : sequence of stages
        The stages of this rank: each an nn.Stage, or any object whose `parameters` and `gradients`
        have one flat array `flat` each (see `nn.FlatBuffer`).
    lr : float
        Learning rate.
    betas : (float, float)
        b1 and b2.
    eps : float
        Keeps the denominator away from 0.
    weight_decay : float
        Decay of the parameters whose `Parameter.decay` is set.
    groups : sequence of Group
        Parameters with another learning rate or weight decay; where several match, the first
        counts. A pattern may match nothing here: other ranks have other parameters.
    replicas : communicator, optional
        The ranks with the same stages and gradients, as for `Pipeline`: each keeps the state of a
        share of the parameters and updates that, and gets the rest from the others, for the same
        bits as without. The constructor, which comes after that of the pipeline, and each step are
        collective over them then. Parameters of stages in half precision are read and written by
        `whole_parameters` from then on.

    Attributes
    ----------
    state : list of dict
        For each stage `{"first": flat array m, "second": flat array v}`; with `replicas` of this
        replica's share.
    before_write : list of callable
        Called without arguments before a step writes anything; so are those of the stages.
    steps : int
        Number of steps made, t.

    Examples
    --------
    >>> from mpipipe import nn, optim
    >>> stage = nn.Stage([nn.RMSNorm(3)])
    >>> stage.gradients["0.gain"][...] = 1
    >>> optim.AdamW([stage], lr=0.5).step()
    >>> stage.parameters["0.gain"]
    array([0.5, 0.5, 0.5], dtype=float32)
    """

    def __init__(
        self,
        stages: Sequence[StageLike],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        groups: Sequence[Group] = (),
        replicas: Communicator | None = None,
    ):
        super().__init__(stages, lr, weight_decay, groups, ("first", "second"), replicas)
        self.betas = betas
        self.eps = eps

    def _update(
        self, kernels: Kernels, buffers: Sequence[Array], rate: float, decay: float, how: Update
    ) -> None:
        b1, b2 = self.betas
        numbers = AdamWNumbers(
            b1, b2, self.eps, rate, 1 - b1**self.steps, 1 - b2**self.steps, shrink=1 - rate * decay
        )
        parameters, gradients, first, second = buffers
        kernels.adamw(parameters, gradients, first, second, numbers, how)


class SGD(FlatOptimizer):
    """Stochastic gradient descent: u = momentum * u + gradient + weight_decay * p; p -= lr * u.

    Updates are in place, in the dtype of the stage's parameters.

    Parameters
    ----------
    stages, lr : sequence of stages, float
        As for `AdamW`.
    momentum : float
        Factor of u from step to step; with 0 no u is kept.
    weight_decay, groups, replicas : float, sequence of Group, communicator
        As for `AdamW`.

    Attributes
    ----------
    state : list of dict
        For each stage `{"momentum": flat array u}`, or `{}` without momentum; all else is as for
        `AdamW`.
    """

    def __init__(
        self,
        stages: Sequence[StageLike],
        lr: float,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        groups: Sequence[Group] = (),
        replicas: Communicator | None = None,
    ):
        kinds: tuple[str, ...] = ()
        if momentum:
            kinds = ("momentum",)
        super().__init__(stages, lr, weight_decay, groups, kinds, replicas)
        self.momentum = momentum

    def _update(
        self, kernels: Kernels, buffers: Sequence[Array], rate: float, decay: float, how: Update
    ) -> None:
        parameters, gradients, *kept = buffers
        momentum = kept[0] if kept else None
        kernels.sgd(parameters, gradients, momentum, self.momentum, decay, rate, how)


# -- Groups of parameters with their own learning rate and weight decay, as pieces of flat buffers
#
# flat     | 0.weight | 2.weight | 0.gain | 2.bias |     Group("*.bias", lr=2): three pieces, and
# pieces   |       decay         |        |  2 lr  |     calls of the kernel that updates them


@dataclass(frozen=True)
class Group:
    """Parameters with a learning rate or a weight decay of their own, for an optimizer.

    Parameters
    ----------
    match : str or callable
        Which parameters: a pattern of names as in a shell, such as `"*.bias"`, or a function
        `match(name, shape)` that returns a bool. A tied parameter goes by its tie, which is the
        same in all places.
    lr : float
        Factor of the optimizer's learning rate, and of what overrides that for a step. 0 keeps them
        as they are.
    weight_decay : float, optional
        In place of the optimizer's, and for vectors too. By default that of the optimizer, where a
        parameter decays.

    Examples
    --------
    >>> from mpipipe import nn, optim
    >>> stage = nn.Stage([nn.LayerNorm(2)])
    >>> stage.gradients["0.gain"][...] = stage.gradients["0.bias"][...] = 1
    >>> optim.SGD([stage], lr=0.5, groups=[optim.Group("*.bias", lr=2)]).step()
    >>> stage.parameters["0.gain"], stage.parameters["0.bias"]
    (array([0.5, 0.5], dtype=float32), array([-1., -1.], dtype=float32))
    """

    match: str | Callable[[str, Shape], bool]
    lr: float = 1.0
    weight_decay: float | None = None

    def __post_init__(self) -> None:
        for name, number in (("lr", self.lr), ("weight_decay", self.weight_decay or 0.0)):
            if not 0 <= number < math.inf:
                raise ArgumentError(
                    f"{name} of a group", found=repr(number), expected="0 or more, and finite"
                )

    def _has(self, name: str, shape: Shape) -> bool:
        if isinstance(self.match, str):
            return fnmatchcase(name, self.match)
        return bool(self.match(name, shape))


def pieces(
    stage: PipelineStage, groups: Sequence[Group], share: tuple[int, int], weight_decay: float
) -> Iterator[tuple[int, int, float, float]]:
    """Cut a share of the flat buffers of a stage where groups or the decay of parameters change.

    Yields start, stop, factor of the optimizer's learning rate, and weight decay of each piece. A
    gap goes with the parameter before it.
    """
    ties = {name: key for key, names in stage.ties.items() for name in names}
    # Complex parameters have one more axis here, of real and imaginary parts.
    pair = getattr(stage.gradients, "parts", 1) - 1
    default = Group("*")
    cuts = [(0, default)]
    places: Mapping[str, int] = {}
    if groups:
        places = stage.gradients.offsets
    for name, start in sorted(places.items(), key=itemgetter(1)):
        shape = stage.gradients[name].shape
        matching = (g for g in groups if g._has(ties.get(name, name), shape[: len(shape) - pair]))
        group = next(matching, default)
        if 0 in shape or group is cuts[-1][1]:
            continue
        if cuts[-1][0] == start:
            cuts.pop()
        cuts.append((start, group))
    ends = [start for start, _ in cuts[1:]] + [share[1]]
    for low, high, decays in stage.decay_ranges:
        for (begin, group), end in zip(cuts, ends):
            start = max(low, begin, share[0])
            stop = min(high, end, share[1])
            decay = group.weight_decay
            if decay is None:
                decay = weight_decay * bool(decays)
            if start < stop:
                yield start, stop, group.lr, decay


def duplicate_name_error(name: str, ranks: Sequence[int] = ()) -> ArgumentError:
    """Make the error for two parameters of one name, on one rank or on these."""
    where = "of this rank"
    if ranks:
        where = f"on ranks {' and '.join(map(str, ranks))}"
    return ArgumentError(
        f"two stages {where} have a parameter {name}",
        expected="names that are the parameters' own in the whole model",
        remedy="give each nn.Stage its place in the model: first=0 for the first, and so on; "
        "torch_stage and jax_stage "
        "a prefix; and the arrays of a stage of your own names with its number in front",
    )


# -- Learning-rate curves --------------------------------------------------------------------------


def warmup_cosine(step: int, steps: int, peak: float, warmup: int, floor: float = 0.1) -> float:
    """Return the learning rate of a step: a line up to `peak`, then half a cosine down.

    Loshchilov and Hutter, "SGDR" (2017), without restarts.

    Parameters
    ----------
    step, steps : int
        The step, 0 ... steps - 1, and their number; every later step has the rate of the last.
    peak, warmup : float, int
        The rate of step warmup - 1, and the number of steps of the line.
    floor : float
        The rate of the last step, as a fraction of `peak`.

    Examples
    --------
    >>> from mpipipe import optim
    >>> [round(optim.warmup_cosine(step, 6, peak=1.0, warmup=2), 3) for step in range(6)]
    [0.5, 1.0, 0.868, 0.55, 0.232, 0.1]
    """
    if steps < 1 or not 0 <= warmup <= steps or step < 0:
        raise ArgumentError(
            "wrong learning-rate curve",
            found=f"step={step}, steps={steps}, warmup={warmup}",
            expected="step >= 0, steps >= 1, 0 <= warmup <= steps",
        )
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = 1.0
    if steps > warmup:
        progress = min(1.0, (step + 1 - warmup) / (steps - warmup))
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))
