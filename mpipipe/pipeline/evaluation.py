"""The loss of the micro-batches of a call: values and gradients, by unit."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from mpipipe import arrays
from mpipipe.arrays import Tree
from mpipipe.errors import MpipipeError
from mpipipe.pipeline.batch import Call
from mpipipe.pipeline.diagnostics import action_error
from mpipipe.pipeline.loss import Loss, Weighing
from mpipipe.pipeline.units import in_order


class LossEvaluation:
    """Evaluates the loss of one pipeline; `loss` is None on ranks without one."""

    def __init__(self, loss: Loss | None, weighing: Weighing):
        self.loss = loss
        self.weighing = weighing
        # True if a loss over the batch waits for all outputs.
        self.gathers = loss is not None and loss.over_batch
        self.use_output = self.evaluate
        if self.gathers:
            self.use_output = self.gather

    def taking_head(self, call: Call) -> AbstractContextManager[None]:
        """Let the last stage leave its head to a loss that is made for that, in a `with` block."""
        if self.loss is None or call.targets is None:
            return nullcontext()
        return self.loss.taking_head()

    def gather(self, call: Call, y: Tree, target: Tree, unit: int) -> None:
        """Keep an output until all are there, then evaluate the loss over the batch."""
        call.awaiting[unit] = y, target
        units = range(len(self.weighing.shares))
        if len(call.awaiting) < len(units):
            return
        outputs, targets = zip(*in_order(call.awaiting))
        # It counts as the loss of unit 0.
        self.evaluate(call, [*outputs], [*targets], 0)
        call.awaiting = {}
        call.losses = dict.fromkeys(units, call.losses[0])
        call.loss_gradients = dict(enumerate(call.loss_gradients.get(0, ())))
        self._download(call)

    def evaluate(self, call: Call, y: Tree, target: Tree, unit: int) -> None:
        """Evaluate the loss of a unit, and make the gradient with which its backward begins."""
        loss = self.loss
        assert loss is not None  # agreed at the start of the call
        weighing = self.weighing
        factor = 1.0
        weigh = None
        if call.training:
            factor = weighing.shares[unit] * call.scale
            if loss.weighs:
                weigh = partial(weighing.take, unit, training=True)
        try:
            result = loss.call(y, target, factor, call.positions[unit], weigh)
        except MpipipeError:
            raise
        except Exception as error:
            # It is not blamed on the stage.
            raise action_error("the loss", error) from error

        is_usual = type(result) is tuple and len(result) == 2 and type(result[0]) is float
        if is_usual and math.isfinite(result[0]):
            value, gradient = result
            weight = None
        else:
            value, gradient, weight = loss.checked(result)
        call.losses[unit] = value

        # From the presumed share of the micro-batch to the real one.
        correction = 1.0
        if weigh is not None:
            # The loss has multiplied its gradient. Without a weight that counts it is zero.
            correction = float(weight != 0)
        elif weight is not None or not weighing.shares_are_final:
            correction = weighing.take(unit, weight, call.training)
        if call.training:
            if not loss.takes_factor:
                correction *= factor
            call.loss_gradients[unit] = loss.scaled(gradient, correction, y)
        if len(call.losses) == len(weighing.shares):
            self._download(call)

    @staticmethod
    def _download(call: Call) -> None:
        """Copy losses to the host, which need not wait for the backwards to come."""
        waiting = {}
        for unit, value in call.losses.items():
            if type(value) is not float and arrays.is_device(value):
                waiting[unit] = value
        if waiting:
            call.download = [*waiting], arrays.Download([*waiting.values()])
