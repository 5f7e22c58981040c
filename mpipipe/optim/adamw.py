"""Adam with decoupled weight decay."""

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


class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter, "Decoupled weight decay regularization", 2019).

    Their algorithm 2: m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2; p -= lr * weight_decay * p; then
    p -= lr * (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps). Updates are in place, in the dtype of the stage's
    parameters, with the scalars of the bias correction in float64.

    Parameters
    ----------
    stages : sequence of stages
        The stages of this rank: each an nn.Stage, or any object whose `parameters` and `gradients` have one flat array
        `flat` each (see `nn.FlatBuffer`).
    lr : float
        Learning rate.
    betas : (float, float)
        b1 and b2.
    eps : float
        Keeps the denominator away from 0.
    weight_decay : float
        Decay of the parameters whose `Parameter.decay` is set.
    groups : sequence of Group
        Parameters with another learning rate or weight decay; where several match, the first counts. A pattern may
        match nothing here: other ranks have other parameters.

    Attributes
    ----------
    state : list of dict
        For each stage `{"first": flat array m, "second": flat array v}`.
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
        stages: Sequence[Any],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        groups: Sequence[Group] = (),
    ):
        self.stages, self.lr, self.betas, self.eps, self.weight_decay = tuple(stages), lr, betas, eps, weight_decay
        self._updated, self.groups = updated(self.stages), checked(groups)
        self.steps = 0
        self.before_write: list[Callable[[], object]] = []
        self.state: list[dict[str, Array]] = [
            {name: arrays.zeros_like(stage.parameters.flat) for name in ("first", "second")} for stage in self._updated
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
        self.steps += 1
        b1, b2 = self.betas
        for stage, state in zip(self._updated, self.state):
            parameters, gradients, copy = stage.parameters.flat, stage.gradients.flat, stage.kept_copy
            for at, factor, decay, ranges in pieces(stage, self.groups):
                stage.kernels.adamw(
                    parameters[at],
                    gradients[at],
                    state["first"][at],  # by places: a pipeline may have shortened the parameters since the start
                    state["second"][at],
                    b1=b1,
                    b2=b2,
                    eps=self.eps,
                    rate=rate * factor,
                    correction1=1 - b1**self.steps,
                    correction2=1 - b2**self.steps,
                    shrink=1 - rate * factor * (self.weight_decay if decay is None else decay),
                    g_scale=scale,
                    ranges=ranges,
                    copy=None if copy is None else copy[at],
                )

    def named_state(self) -> dict[str, dict[str, Array]]:
        """Return the state by kind and by the names of parameters: views, which may be read and set.

        With `steps` this is all that an optimizer has to remember.

        Returns
        -------
        dict of dict of array
            The kinds are "first" and "second"; each array has the shape of its parameter. A tied parameter that
            several places of this rank share has one state, under the name of each place.

        Raises
        ------
        ArgumentError
            Two stages have a parameter of the same name, or one is shared with a stage that is not here.

        Examples
        --------
        >>> from mpipipe import nn, optim
        >>> stage = nn.Stage([nn.RMSNorm(2)])
        >>> optimizer = optim.AdamW([stage], lr=0.5)
        >>> optimizer.named_state()["second"]
        {'0.gain': array([0., 0.], dtype=float32)}
        """
        return named(self._updated, self.state)
