"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpipipe import arrays
from mpipipe.arrays import Array, DeviceArray
from mpipipe.nn.unfinished import check_all_finished
from mpipipe.nn.writing import announce_write
from mpipipe.optim.groups import Group, checked, pieces
from mpipipe.optim.named import named
from mpipipe.optim.stages import updated


class SGD:
    """Stochastic gradient descent: u = momentum * u + gradient + weight_decay * p, then p -= lr * u.

    Updates are in place, in the dtype of the stage's parameters.

    Parameters
    ----------
    stages : sequence of stages
        The stages of this rank: each an nn.Stage, or any object whose `parameters` and `gradients` have one flat array
        `flat` each (see `nn.FlatBuffer`).
    lr : float
        Learning rate.
    momentum : float
        Factor of u from step to step; with 0 no u is kept.
    weight_decay : float
        Decay of the parameters whose `Parameter.decay` is set.
    groups : sequence of Group
        Parameters with another learning rate or weight decay; where several match, the first counts. A pattern may
        match nothing here: other ranks have other parameters.

    Attributes
    ----------
    state : list of dict
        For each stage `{"momentum": flat array u}`, or `{}` without momentum.
    before_write : list of callable
        Called without arguments before a step writes anything; so are those of the stages.
    steps : int
        Number of steps made.

    Examples
    --------
    >>> from mpipipe import nn, optim
    >>> stage = nn.Stage([nn.RMSNorm(3)])
    >>> stage.gradients["0.gain"][...] = 1
    >>> optim.SGD([stage], lr=0.5).step()
    >>> stage.parameters["0.gain"]
    array([0.5, 0.5, 0.5], dtype=float32)
    """

    def __init__(
        self,
        stages: Sequence[Any],
        lr: float,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        groups: Sequence[Group] = (),
    ):
        self.stages, self.lr = tuple(stages), lr
        self.momentum, self.weight_decay = momentum, weight_decay
        self._updated, self.groups = updated(self.stages), checked(groups)
        self.steps = 0
        self.before_write: list[Callable[[], object]] = []
        self.state: list[dict[str, Array]] = [
            {"momentum": arrays.zeros_like(stage.parameters.flat)} if momentum else {} for stage in self._updated
        ]

    def step(self, lr: float | None = None, scale: float | DeviceArray = 1.0) -> None:
        """Make one step with the gradients of the stages.

        Parameters
        ----------
        lr : float, optional
            Overrides the learning rate for this step.
        scale : float or cupy.ndarray
            Factor of the gradients. They stay as they are. For stages on a GPU it may be there, () of float64; where it
            is NaN then, parameters and state stay as they are.

        Raises
        ------
        ArgumentError
            A step that `begin_step` has begun with these stages has not ended.
        """
        check_all_finished(self.stages)
        rate = self.lr if lr is None else lr
        announce_write(self, *self._updated)
        for stage, state in zip(self._updated, self.state):
            parameters, gradients, copy = stage.parameters.flat, stage.gradients.flat, stage.kept_copy
            for at, factor, decay, ranges in pieces(stage, self.groups):
                stage.kernels.sgd(
                    parameters[at],
                    gradients[at],
                    state["momentum"][at] if state else None,  # a pipeline may have shortened the parameters
                    momentum=self.momentum,
                    decay=self.weight_decay if decay is None else decay,
                    rate=rate * factor,
                    g_scale=scale,
                    ranges=ranges,
                    copy=None if copy is None else copy[at],
                )
        self.steps += 1

    def named_state(self) -> dict[str, dict[str, Array]]:
        """Return the state by kind and by the names of parameters: views, which may be read and set.

        With `steps` this is all that an optimizer has to remember.

        Returns
        -------
        dict of dict of array
            The kind is "momentum"; without momentum there is none. Each array has the shape of its parameter. A tied
            parameter that several places of this rank share has one state, under the name of each place.

        Raises
        ------
        ArgumentError
            Two stages have a parameter of the same name, or one is shared with a stage that is not here.

        Examples
        --------
        >>> from mpipipe import nn, optim
        >>> stage = nn.Stage([nn.RMSNorm(2)])
        >>> optimizer = optim.SGD([stage], lr=0.5, momentum=0.9)
        >>> optimizer.named_state()
        {'momentum': {'0.gain': array([0., 0.], dtype=float32)}}
        """
        return named(self._updated, self.state)
