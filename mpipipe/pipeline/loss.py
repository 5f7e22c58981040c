"""The loss of a pipeline: the function, the weights of micro-batches, what all ranks learn.

The loss of a step is sum(w v) / sum(w), over all micro-batches of all replicas. A backward begins
before the last weight is known. So each one carries a provisional share w c, and the whole is
divided by their sum at the end:

    last stage   share w0 c   share w1 c   share w2 c | s: sum of these |
    all ranks    backward 0   backward 1   backward 2 | ............... | gradients / s, loss / s

c is a power of two, near 1 / sum(w) of the step before, and the same on all ranks: it changes the
exponents of what is computed, and no bits. With it half-precision gradients keep the range that
they have without weights. The first step takes the weights for numbers of target entries.

Without weights from the loss the shares are known before: by target entries where the loss declares
that it is a mean over them (`mean_over_entries`), else by rows. They add up to 1, and nothing is
corrected. A loss that declares nothing is refused where the two differ.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array, Tree, flatten
from mpipipe.comm import AllReduce
from mpipipe.errors import ArgumentError, MismatchError, MpipipeError, NonFiniteError
from mpipipe.job import RankGroup, found_by_all, own
from mpipipe.nn import HeadCrossEntropy, Position, kernels
from mpipipe.pipeline.attached import AttachedStage
from mpipipe.pipeline.batch import UNSAID, BatchFacts, Call, LossFunction, Value
from mpipipe.pipeline.units import MessageSpec, in_order
from mpipipe.stages import takes_parameter

# Gives the factor that a weight asks for.
Weigh: TypeAlias = Callable[[float | None], float]
LARGEST = 1000  # exponent of c, so that weights may have any size that a float has


class Loss:
    """A user's loss function.

    With a parameter `factor` it multiplies its gradient by it before rounding; others are
    multiplied after.

    One with a parameter `weigh` has gradients of its own parameters, which nobody can scale after
    it. In a training step it calls weigh(weight or None) once, and multiplies all its gradients by
    the result.
    """

    def __init__(self, function: LossFunction):
        self.function = function
        # How many of these it takes: one that takes a later one takes those before it.
        self.options = 0
        for number, name in enumerate(("factor", "position", "weigh"), 1):
            if takes_parameter(function, name):
                self.options = number
        self.takes_factor = self.options > 0
        self.takes_position = self.options > 1
        self.weighs = self.options == 3
        # True if it takes and gives lists, once for all micro-batches.
        self.over_batch = bool(getattr(function, "over_batch", False))
        self.uploads = not getattr(function, "wants_host_targets", False)
        # Lets the last stage leave its head to a loss that is made for that, in a `with` block.
        self.taking_head: Callable[[], AbstractContextManager[None]] = nullcontext
        if isinstance(function, HeadCrossEntropy):
            self.taking_head = function.taking_over

    def call(
        self,
        output: Tree,
        target: Tree,
        factor: float,
        position: Position | None = None,
        weigh: Weigh | None = None,
    ) -> Any:
        """Return what the function returns; the target is on the GPU if the output is."""
        if self.uploads and type(output) is not np.ndarray:
            target = _beside(output, target)
        if self.options == 1:  # the common case
            return self.function(output, target, factor=factor)
        options = ("factor", factor), ("position", position), ("weigh", weigh)
        return self.function(output, target, **dict(options[: self.options]))

    def checked(self, result: Any) -> tuple[Value, Tree, float | None]:
        """Return (value, gradient, weight or None); ArgumentError for another result.

        Weight 0 has value NaN.
        """
        if type(result) is not tuple or len(result) not in (2, 3):
            found = type(result).__name__
            if found == "tuple":
                found = f"a tuple of {len(result)}"
            raise ArgumentError(
                "a loss returns (value, gradient of the output), or (value, gradient of the "
                "output, weight)",
                found=found,
                expected="a tuple of two or three",
                remedy="adapters.torch_loss and adapters.jax_loss make such a loss of one that "
                "returns a number",
            )
        value = result[0]
        gradient = result[1]
        weight = None
        if len(result) == 3:
            weight = checked_weight(result[2])
            if weight == 0:
                return math.nan, gradient, weight
        if isinstance(value, np.generic) or arrays.is_array(value):
            if value.size == 1 and value.dtype.kind != "c" and arrays.is_device(value):
                # It is looked at when the step has ended.
                return value, gradient, weight
            if value.size == 1:
                value = value.item()
        check_finite(value)
        return value, gradient, weight

    @staticmethod
    def scaled(gradient: object, factor: float, output: object) -> Any:
        """Return the gradient times a factor; ArgumentError if it does not fit the output.

        0 gives zeros.
        """
        # The common case, on the hot path.
        if factor == 1 and type(gradient) is type(output) is np.ndarray:
            is_alike = gradient.shape == output.shape and gradient.dtype == output.dtype
            if is_alike and output.dtype.kind == "f":
                return gradient
        if type(output) is list:  # the loss is over the batch
            if not factor:  # all are zeroed
                gradient = output
            if not isinstance(gradient, (list, tuple)) or len(gradient) != len(output):
                raise ArgumentError(
                    "the gradient of a loss over the batch",
                    found=type(gradient).__name__,
                    expected=f"a list of {len(output)}: the gradient of each output",
                )
            pairs = zip(gradient, output)
            return [Loss.scaled(part, factor, of_output) for part, of_output in pairs]
        outputs, structure = flatten(output)
        spec = MessageSpec(structure, tuple((leaf.shape, leaf.dtype) for leaf in outputs))
        likes = spec.with_gradients(outputs)
        if not factor:
            return spec.gradient_tree([*map(arrays.zeros_like, likes)])
        leaves = spec.gradient_leaves(gradient, "the gradient of the loss", "the output")
        for leaf, like in zip(leaves, likes):
            if arrays.is_device(leaf) != arrays.is_device(like):
                raise ArgumentError(
                    "the gradient of the loss does not match the output",
                    found=f"an array on {arrays.device_of(leaf)}",
                    expected=f"an array on {arrays.device_of(like)}",
                )
        if factor != 1:
            leaves = [kernels.of_array(leaf).scale(leaf, factor) for leaf in leaves]
        return spec.gradient_tree(leaves)


def _beside(output: Tree | list[Tree], target: Tree | list[Tree]) -> Tree | list[Tree]:
    """Return a target whose arrays are on the GPU if the output is there."""
    if isinstance(target, list):  # the loss is over the batch
        return [_beside(*pair) for pair in zip(output, target, strict=True)]
    if not any(map(arrays.is_device, flatten(output)[0])):
        return target
    return arrays.mapped(
        lambda array: array if arrays.is_device(array) else arrays.upload(array), target
    )


def checked_weight(weight: Any) -> float:
    """Return the weight of a loss as a float; ArgumentError unless it is finite and at least 0."""
    if isinstance(weight, (np.ndarray, np.generic)) and weight.ndim == 0:
        weight = weight.item()
    if type(weight) not in (int, float) or not 0 <= weight <= sys.float_info.max:
        raise ArgumentError(
            "the weight of a loss",
            found=f"{type(weight).__name__} {weight}",
            expected="a finite number of at least 0",
            remedy="return how many things the value is a mean over, such as target.size or "
            "float(mask.sum())",
        )
    return float(weight)


def check_finite(value: Any) -> None:
    """Raise NonFiniteError for a loss that is infinite or NaN, ArgumentError for no number."""
    try:
        finite = math.isfinite(value)
    except (TypeError, ValueError):
        raise ArgumentError(
            "the value of a loss", found=type(value).__name__, expected="one real number"
        ) from None
    if not finite:
        raise NonFiniteError(
            "the loss is not finite",
            found=value,
            remedy="lower the learning rate, clip gradients, or look at this micro-batch's data",
        )


def unscaled(tree: Tree, scale: float) -> Tree:
    """Input gradients without the factor that all gradients of the step carry."""
    if scale == 1:
        return tree
    factor = 1 / scale

    def unscaled_leaf(leaf: Array | None) -> Array | None:
        if leaf is None:
            return None
        return kernels.of_array(leaf).scale(leaf, factor)

    return arrays.mapped(unscaled_leaf, tree)


# -- What each micro-batch counts ------------------------------------------------------------------


@dataclass(eq=False)
class Weighing:
    """The shares of micro-batches in the loss of a pipeline, on one rank."""

    pipe: RankGroup
    replicas: RankGroup | None
    root: int  # the rank of the last stage
    # Whether this rank's loss returns weights; None where none was evaluated yet.
    gives_weights: bool | None = None
    # The same of all replicas, once all ranks know it.
    all_give_weights: bool | None = None
    # Shares of this rank's units in the call under way.
    shares: list[float] = field(default_factory=list)
    shares_are_final: bool = False  # whether a loss without a weight leaves them as they are
    _facts: BatchFacts = field(default_factory=BatchFacts)  # the facts of that call
    _exponent: int | None = None  # c is 2 to the power of minus this one

    def begin(self, facts: BatchFacts, counts: Sequence[float]) -> None:
        """Begin a call with the shares that are known before: by rows, or by target entries."""
        self._facts = facts
        self.shares_are_final = self.gives_weights is False and not facts.uneven
        total = facts.total or 1
        self.shares = [count / total for count in counts]

    @property
    def exponent(self) -> int:
        """Exponent of c; before the first step with weights that of the number of entries."""
        if self._exponent is None:
            return _exponent(self._facts.entries)
        return self._exponent

    def weight_of(self, shared: SharedLoss) -> float:
        """Return the sum of the weights of a call, or the rows or entries of all targets."""
        if shared.givers:
            return math.ldexp(shared.total, self.exponent)
        return float(self._facts.total)

    def take(self, microbatch: int, weight: float | None, training: bool) -> float:
        """Take the weight of a unit; return the factor from its presumed share to the real one.

        Raises ArgumentError where the loss should have given a weight, or no weight.
        """
        facts = self._facts
        if self.gives_weights is None:
            self.gives_weights = weight is not None
        if self.gives_weights != (weight is not None):
            found = "no weight"
            expected = "a weight"
            if weight is not None:
                found = f"the weight {weight}"
                expected = "none"
            raise ArgumentError(
                "the loss returns a weight for some micro-batches only",
                found=found,
                expected=f"{expected}, as for the first micro-batch of this pipeline",
                remedy="return (value, doutput, weight) always, or (value, doutput) always",
            )
        if weight is None:
            if facts.uneven and facts.mean_over == UNSAID:
                raise ArgumentError(
                    "rows of some micro-batches have more target entries than rows of others, or "
                    "are in slices, and the loss does not say what its value is a mean over",
                    found="(value, doutput)",
                    expected="a weight for each micro-batch",
                    remedy="return (value, doutput, weight), where weight is how many things "
                    "value is a mean over, "
                    "such as target.size; or set loss.mean_over_entries = True or False (rows)",
                )
            return 1.0
        if training and facts.bare:
            raise ArgumentError(
                "the loss returns weights, and a stage does not show its gradients, which the sum "
                "of weights divides",
                expected="stages with an attribute `gradients`",
                remedy="give the stage `gradients`: an object with one array `flat`, or None "
                "where there are none",
            )
        presumed = self.shares[microbatch]
        share = weight * math.ldexp(1.0, -self.exponent)
        if math.isinf(share):
            raise ArgumentError(
                "the weight of a loss is too large",
                found=weight,
                expected="one near those before it",
            )
        self.shares[microbatch] = share
        return share / presumed

    def settle(
        self, shared: SharedLoss, stages: Sequence[AttachedStage] = ()
    ) -> tuple[float, MpipipeError | None]:
        """Divide gradients by the sum of all shares; return it, and an error for all ranks.

        The sum is 1 where the loss gives no weights.
        """
        if self.all_give_weights is False:
            return 1.0, None
        self.all_give_weights = None
        problem = self._problem(shared)
        if problem is None:
            self.all_give_weights = shared.givers > 0
        if not self.all_give_weights:
            self.gives_weights = self.all_give_weights
            return 1.0, problem
        if stages:
            if shared.total != 1:
                _divide_gradients(stages, shared.total)
            self._exponent = min(max(self.exponent + _exponent(shared.total), -LARGEST), LARGEST)
        return shared.total, None

    def _problem(self, shared: SharedLoss) -> MpipipeError | None:
        """Return what all ranks find wrong in the same numbers; rank 0 of all is to report it."""
        groups = [self.pipe]
        replicas = 1
        if self.replicas is not None:
            groups.append(self.replicas)
            replicas = self.replicas.size
        if 0 < shared.givers < replicas:
            problem: MpipipeError = MismatchError(
                "the loss returns weights on some replicas only",
                found=f"{shared.givers} of {replicas} replicas with weights",
                expected="all or none",
                remedy="give the same loss to all replicas",
            )
        elif shared.givers and not 0 < shared.total < math.inf:
            found = "weights too large"
            if shared.total == 0:
                found = "all weights 0"
            problem = ArgumentError(
                f"the weights of the loss of {shared.title} add up to {shared.total}",
                found=found,
                expected="something that counts, in one micro-batch of one replica at least",
                remedy="leave out a batch in which nothing is valid, on all ranks",
            )
        else:
            return None
        return found_by_all(problem, groups)


def _divide_gradients(stages: Sequence[AttachedStage], divisor: float) -> None:
    done: list[Array] = []
    for stage in stages:
        for gradients in stage.gradient_arrays:
            # Two stages of a user's own may add to one array.
            if not arrays.shares_any(gradients, done):
                kernels.of_array(gradients).scale(gradients, 1 / divisor, gradients)
                done.append(gradients)


def _exponent(count: float) -> int:
    """Return the e of the power 2^e next to a count; 0 for 0."""
    return math.frexp(count)[1] - 1 if count else 0


# -- The losses of a call: from the rank of the last stage to all ranks of its pipeline ------------
#
# table    losses of micro-batches | sum of share x loss | sum of shares | replicas with weights |
#                                    these three are sums over all replicas


class SharedLoss:
    """Mean loss over all replicas, and losses of this pipeline's micro-batches; collective.

    Where there is no other rank, losses that a call has left on the device may stay there until
    somebody reads them.
    """

    def __init__(self, weighing: Weighing, call: Call) -> None:
        pipe = weighing.pipe
        replicas = weighing.replicas
        self.title = call.title
        self.was_read = call.targets is None  # whether nothing is left on the device
        self._losses = call.losses
        self._download = call.download
        self._where = pipe.rank, call.plan.schedule.stages - 1
        self._shares = weighing.shares
        self._table = np.zeros(call.agreed.microbatches + 3)
        if not self.was_read and weighing.gives_weights:
            self._table[-2:] = sum(self._shares), 1
        if self._download is not None and pipe.size == 1 and replicas is None:
            return
        self.read()
        if replicas is not None and pipe.rank == weighing.root:
            total = AllReduce(replicas.comm, self._table[-3:])
            replicas.wait(total, f"the loss of {self.title}, of the replicas")
        if pipe.size > 1:
            pipe.wait(
                own(pipe.comm.Ibcast(self._table, weighing.root)), f"the loss of {self.title}"
            )

    def is_here(self) -> bool:
        """Whether `read` will not wait."""
        return self._download is None or self._download[1].is_done()

    def read(self) -> None:
        """Take the losses of this rank; NonFiniteError for the first one that is not finite."""
        if self.was_read:
            return
        if self._download is not None:
            units, download = self._download
            for unit, value in zip(units, download.result()):
                self._losses[unit] = float(value.item())
                try:
                    check_finite(self._losses[unit])
                except MpipipeError as error:
                    error.rank, error.stage = self._where
                    error.microbatch = unit
                    error.message = f"{error.message} in {self.title}"
                    raise
        self.was_read = True
        self._download = None
        losses = [*map(float, in_order(self._losses))]
        self._table[:-3] = self._by_microbatch(losses)
        mean = 0.0
        for share, loss in zip(self._shares, losses):
            if share:  # without a share there is no loss
                mean += share * loss
        self._table[-3] = mean

    def _by_microbatch(self, losses: Sequence[float]) -> Sequence[float] | np.ndarray:
        """Return the loss of each micro-batch: the mean of its slices by their shares."""
        microbatches = len(self._table) - 3
        if len(losses) == microbatches:
            return losses
        shares = np.reshape(self._shares, (microbatches, -1))
        sums = np.where(shares > 0, shares * np.reshape(losses, shares.shape), 0).sum(1)
        means = np.full(microbatches, np.nan)
        return np.divide(sums, shares.sum(1), out=means, where=shares.any(1))

    @property
    def mean(self) -> float:
        mean = float(self._table[-3])
        if self.givers:
            mean /= self.total
        return mean

    @property
    def total(self) -> float:
        """Sum of the shares of all micro-batches of all replicas."""
        return float(self._table[-2])

    @property
    def givers(self) -> int:
        """How many replicas have a loss that gave weights."""
        return int(self._table[-1])

    @property
    def losses(self) -> list[float]:
        return self._table[:-3].tolist()
