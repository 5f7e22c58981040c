"""How much each micro-batch counts in the loss of a step, where the loss itself says so: (value, doutput, weight).

The loss of a step is sum(w v) / sum(w), over all micro-batches of all replicas. A backward begins before the last
weight is known. So each one carries a provisional share w c, and the whole is divided by their sum at the end:

    last stage    share w0 c   share w1 c   share w2 c | sum s of all shares |
    all ranks     backward 0   backward 1   backward 2 | ................... | gradients / s, loss / s

c is a power of two, near 1 / sum(w) of the step before, and the same on all ranks: it changes the exponents of what is
computed, and no bits. With it half-precision gradients keep the range that they have without weights. The first step
takes the weights for numbers of target entries.

Without weights from the loss the shares are known before: by target entries where the loss declares that it is a mean
over them (`mean_over_entries`), else by rows. They add up to 1, and nothing is corrected. A loss that declares nothing
is refused where the two differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array, Download, Tree
from mpipipe.comm.allreduce import AllReduce
from mpipipe.comm.mailbox import Lease
from mpipipe.errors import ArgumentError, MismatchError, MpipipeError
from mpipipe.job.consensus import found_by_all
from mpipipe.job.group import Group
from mpipipe.job.requests import own
from mpipipe.nn import Position, kernels
from mpipipe.pipeline.batch import UNSAID
from mpipipe.pipeline.call_agreement import Agreed
from mpipipe.stages import StageAdapter

LARGEST = 1000  # exponent of c, so that weights may have any size that a float has


class Weighing:
    """The shares of micro-batches in the loss of a pipeline, on one rank.

    Parameters
    ----------
    pipe : group of the ranks of the pipeline
    replicas : group of the ranks with the same stages, or None

    Attributes
    ----------
    given : whether the loss of this rank returns weights; None before its first micro-batch, and where there is no loss
    agreed : the same of all replicas, as far as all ranks know it: since the first call with a loss has ended
    shares : of this rank's micro-batches in the call under way
    known : whether a loss without a weight leaves them as they are
    """

    def __init__(self, pipe: Group, replicas: Group | None) -> None:
        self.pipe, self.replicas = pipe, replicas
        self.given: bool | None = None
        self.agreed: bool | None = None
        self.shares: list[float] = []
        self.known = False
        self._facts: Agreed | None = None
        self._exponent: int | None = None  # c is 2 to the power of minus this one

    def begin(self, facts: Agreed, counts: list[int]) -> None:
        """Begin a call with the shares that are known before: by rows, or by target entries."""
        self._facts, self.known = facts, self.given is False and not facts.uneven
        self.shares = [count / (facts.total or 1) for count in counts]

    @property
    def exponent(self) -> int:
        """Return that of c, before the first training step with weights by the number of target entries."""
        assert self._facts is not None  # asked for within a call
        return _exponent(self._facts.entries) if self._exponent is None else self._exponent

    def take(self, microbatch: int, weight: float | None, training: bool) -> float:
        """Take the weight of a micro-batch; return the factor from the share that was presumed to the one it has.

        Raises ArgumentError where the loss should have given a weight, or should have given none.
        """
        facts = self._facts
        assert facts is not None  # a loss is evaluated within a call
        if self.given is None:
            self.given = weight is not None
        if self.given != (weight is not None):
            raise ArgumentError(
                "the loss returns a weight for some micro-batches only",
                found="no weight" if weight is None else f"the weight {weight}",
                expected=f"{'a weight' if self.given else 'none'}, as for the first micro-batch of this pipeline",
                remedy="return (value, doutput, weight) always, or (value, doutput) always",
            )
        if weight is None:
            if facts.uneven and facts.mean_over == UNSAID:
                raise ArgumentError(
                    "rows of some micro-batches have more target entries than rows of others, and the loss does not "
                    "say what its value is a mean over",
                    found="(value, doutput)",
                    expected="a weight for each micro-batch",
                    remedy="return (value, doutput, weight), where weight is how many things value is a mean over, "
                    "such as target.size; or set loss.mean_over_entries = True or False (rows)",
                )
            return 1.0
        if facts.mean_over != UNSAID:
            raise ArgumentError(
                "the loss has mean_over_entries, and returns a weight as well",
                found=f"the weight {weight}",
                expected="one of both",
                remedy="leave out mean_over_entries",
            )
        if training and facts.bare:
            raise ArgumentError(
                "the loss returns weights, and a stage does not show its gradients, which the sum of weights divides",
                expected="stages with an attribute `gradients`",
                remedy="give the stage `gradients`: an object with one array `flat`, or None where there are none",
            )
        presumed, share = self.shares[microbatch], weight * math.ldexp(1.0, -self.exponent)
        if math.isinf(share):
            raise ArgumentError("the weight of a loss is too large", found=weight, expected="one near those before it")
        self.shares[microbatch] = share
        return share / presumed

    def settle(
        self, shared: SharedLoss, stages: Sequence[StageAdapter] = (), *, wait: bool
    ) -> tuple[float, MpipipeError | None]:
        """Return (sum of all shares, error that all ranks are to raise), and divide the gradients of `stages` by it.

        It is 1 where the loss gives no weights. Waits for the losses if `wait`, or if the loss gives weights.
        """
        if wait or self.agreed is not False:
            shared.wait()
        if self.agreed is False:
            return 1.0, None
        problem = self._problem(shared)
        self.agreed = shared.givers > 0 if problem is None else None
        if not self.agreed:
            self.given = self.agreed
            return 1.0, problem
        if stages:
            done: list[Array] = []  # two stages of a user's own may add to one array
            for gradients in (flat for stage in stages for flat in stage.gradient_arrays if shared.total != 1):
                if not any(arrays.shares_memory(gradients, other) for other in done):
                    kernels.of_array(gradients).scale(gradients, 1 / shared.total, gradients)
                    done.append(gradients)
            self._exponent = min(max(self.exponent + _exponent(shared.total), -LARGEST), LARGEST)
        return shared.total, None

    def _problem(self, shared: SharedLoss) -> MpipipeError | None:
        """Return what all ranks find wrong in the same numbers; rank 0 of all is to report it."""
        groups = [self.pipe] if self.replicas is None else [self.pipe, self.replicas]
        givers, total, replicas = shared.givers, shared.total, 1 if self.replicas is None else self.replicas.size
        if 0 < givers < replicas:
            problem: MpipipeError = MismatchError(
                "the loss returns weights on some replicas only",
                found=f"{givers} of {replicas} replicas with weights",
                expected="all or none",
                remedy="give the same loss to all replicas",
            )
        elif givers and not 0 < total < math.inf:
            problem = ArgumentError(
                f"the weights of {shared.what} add up to {total}",
                found="all weights 0" if total == 0 else "weights too large",
                expected="something that counts, in one micro-batch of one replica at least",
                remedy="leave out a batch in which nothing is valid, on all ranks",
            )
        else:
            return None
        return found_by_all(problem, groups)


def _exponent(count: float) -> int:
    """Return the e of the power 2^e next to a count; 0 for 0."""
    return math.frexp(count)[1] - 1 if count else 0


# -- What one call is to do on this rank, what it holds while it runs, and what it gives ------------------------------


class CallInputs(NamedTuple):
    """What one call is to do on this rank.

    Attributes
    ----------
    training : whether backwards follow
    inputs : inputs of each micro-batch, on the rank of stage 0; else empty
    targets : targets of each micro-batch, on the rank of the last stage; None if no loss is wanted
    weighing : share of each micro-batch in the loss, on that rank
    scale : factor on all gradients
    positions : Position of each micro-batch, for layers that draw random numbers
    """

    training: bool
    inputs: list[Tree]
    targets: list[Tree] | None
    weighing: Weighing
    scale: float
    positions: list[Position]


@dataclass(slots=True)
class CallState:
    """What this rank holds while a call runs.

    Attributes
    ----------
    saved : (stage, micro-batch) -> (what backward needs, lease), from forward until backward; the input until an R
    pending : the same from input gradient until weight gradient
    local : (edge, micro-batch, "F" or "B") -> tree for an action on this rank
    loss_gradients : micro-batch -> gradient of the loss
    alive, peak : whole activations (stage, micro-batch) held now, and at most
    under_way, peak_under_way : the same with those of which the input alone is kept, for an R
    losses_underway : (micro-batches, copies of their losses to the host), once the device was asked for all losses
    losses, outputs, input_gradients : results, by micro-batch; empty if they do not arise
    """

    inputs: CallInputs
    saved: dict[tuple[int, int], tuple[Any, Lease]] = field(default_factory=dict)
    pending: dict[tuple[int, int], tuple[Any, Lease]] = field(default_factory=dict)
    local: dict[tuple[int, int, str], Tree] = field(default_factory=dict)
    loss_gradients: dict[int, Tree] = field(default_factory=dict)
    alive: int = 0
    peak: int = 0
    under_way: int = 0
    peak_under_way: int = 0
    losses_underway: tuple[list[int], Download] | None = None
    losses: dict[int, Any] = field(default_factory=dict)
    outputs: dict[int, Tree] = field(default_factory=dict)
    input_gradients: dict[int, Tree] = field(default_factory=dict)

    def count_activation(self) -> None:
        """One more whole activation is held."""
        self.alive += 1
        self.peak = max(self.peak, self.alive)

    def drop_activation(self) -> None:
        """The last backward of an activation has ended."""
        self.alive -= 1
        self.under_way -= 1


# -- The losses of a call, on their way from the rank of the last stage to all ranks of its pipeline ------------------
#
# table    losses of this pipeline's micro-batches | sum of share x loss | sum of shares | replicas with weights |
#                                                    these three are sums over all replicas


class SharedLoss:
    """Mean loss over all replicas, and losses of this pipeline's micro-batches, on every rank once `wait` returns.

    The constructor is collective. It waits on the ranks of the last stage alone, for each other; these have waited for
    each other's gradients already. The others are told by a broadcast, which a later call of the pipeline may overtake.

    Parameters
    ----------
    pipe : group of the ranks of the pipeline
    replicas : group of the ranks with the same stages, or None
    root : the rank of the last stage
    microbatches : how many losses there are
    losses, shares : of each micro-batch, on rank `root`; None, or empty, where there is no loss. What has no share has
        no loss either.
    gives : whether the shares are weights that the loss gave
    call : which call it is, for errors
    """

    def __init__(
        self,
        pipe: Group,
        replicas: Group | None,
        root: int,
        microbatches: int,
        losses: Sequence[float] | None,
        shares: Sequence[float],
        gives: bool,
        *,
        call: str,
    ) -> None:
        self.pipe, self.what = pipe, f"the loss of {call}"
        self.table = np.zeros(microbatches + 3)
        if losses is not None:
            self.table[:-3] = losses
            self.table[-3] = sum(share * loss for share, loss in zip(shares, losses) if share)
            if gives:
                self.table[-2:] = sum(shares), 1
        if replicas is not None and pipe.rank == root:
            replicas.wait(AllReduce(replicas.comm, self.table[-3:]), f"{self.what} of the replicas", everyone=True)
        self._request = own(pipe.comm.Ibcast(self.table, root)) if pipe.size > 1 else None

    def is_here(self) -> bool:
        """Whether the losses have arrived; never waits."""
        if self._request is not None and self._request.Test():
            self._request = None
        return self._request is None

    def wait(self) -> None:
        """Wait until they have."""
        if self._request is not None:
            self.pipe.wait(self._request, self.what, everyone=True)
            self._request = None

    @property
    def mean(self) -> float:
        """Mean loss over all replicas."""
        return float(self.table[-3] / self.total if self.givers else self.table[-3])

    @property
    def total(self) -> float:
        """Sum of the shares of all micro-batches of all replicas."""
        return float(self.table[-2])

    @property
    def givers(self) -> int:
        """How many replicas have a loss that gave weights."""
        return int(self.table[-1])

    @property
    def losses(self) -> list[float]:
        """Losses of the micro-batches of this pipeline."""
        return self.table[:-3].tolist()
