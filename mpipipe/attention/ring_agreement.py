"""The ranks of a ring agree on what they do: one small all-gather before each forward and each backward."""

from __future__ import annotations

from typing import Any, NamedTuple

from mpipipe import arrays
from mpipipe.arrays import Array
from mpipipe.attention import kernels
from mpipipe.attention.checks import check_arrays
from mpipipe.attention.kernels import AttentionKernel
from mpipipe.attention.ring_plan import RingOptions, RingPlan, RingShapes, make_plan
from mpipipe.comm.attributes import cached
from mpipipe.comm.consensus import Ballot, raise_on_all
from mpipipe.comm.group import group_of
from mpipipe.comm.types import Communicator
from mpipipe.errors import ArgumentError

KEPT_PLANS = 64
REMEDY = "give the same options and arrays of the same kind on all ranks, and make the same calls in the same order"


class Agreed(NamedTuple):
    """What the ranks agreed on for a forward: the plan, this rank's kernel, and the number of the call."""

    plan: RingPlan
    kernel: AttentionKernel
    call: int


class RingAgreement:
    """The agreements of all rings on one communicator.

    Every method is collective, and raises the same error on every rank if the ranks differ or one of them has an error.

    Attributes
    ----------
    group : the comm.group.Group of the ranks
    calls : number of forwards so far
    plans : by what they are made of, at most KEPT_PLANS
    """

    def __init__(self, comm: Communicator) -> None:
        self.group = group_of(comm)
        self.calls = 0
        self.plans: dict[tuple, RingPlan] = {}

    def agree_on_options(self, given: dict[str, Any]) -> RingOptions:
        """Check the options of a ring, and that all ranks have the same."""
        error: Exception | None = None
        options: RingOptions | None = None
        try:
            options = RingOptions.checked(**given, ranks=self.group.size)
        except Exception as caught:
            error = caught
        facts = () if options is None else options.facts
        self.group.agree("construction of a Ring", facts, error=error, remedy=REMEDY)
        assert options is not None  # else the agreement has raised
        return options

    def agree_on_forward(
        self, options: RingOptions, digest: str, q: Array, k: Array, v: Array, *, error: Exception | None = None
    ) -> Agreed:
        """Compare shapes and dtype. `digest` is the hash of the options; `error` tells why this rank has no options."""
        self.calls += 1
        kernel: AttentionKernel | None = None
        shapes: RingShapes | None = None
        facts: tuple = ()
        lengths = 0, 0
        try:
            check_arrays(q, k, v)
            kernel = kernels.chosen(q, k, v)  # a rank without it must not leave the others waiting
            sizes = q.shape[0], q.shape[2], k.shape[2], q.shape[3], v.shape[3]
            shapes = RingShapes(*sizes, q.dtype.name, arrays.device_of(q))
            facts, lengths = (*zip(shapes._fields, shapes), ("options", digest)), (q.shape[1], k.shape[1])
        except Exception as caught:
            error = error or caught
        ballot = Ballot("forward", facts, error, None, REMEDY, number=self.calls, where=" of a ring")
        rows, keys = ballot.cast(self.group, lengths).T.tolist()
        ballot.decide()
        assert kernel is not None and shapes is not None  # else the agreement has raised
        return Agreed(self._plan(options, shapes, rows, keys), kernel, self.calls)

    def _plan(self, options: RingOptions, shapes: RingShapes, rows: list[int], keys: list[int]) -> RingPlan:
        key = shapes, options, tuple(rows), tuple(keys)
        if key not in self.plans:
            if len(self.plans) == KEPT_PLANS:
                self.plans.clear()
            try:
                self.plans[key] = make_plan(options, shapes, self.group.rank, rows, keys)
            except ArgumentError as found:  # every rank finds the same in the same table
                raise_on_all(0, found, self.group)
        return self.plans[key]

    def agree_on_backward(self, call: int, dout: Array, out: Array) -> None:
        """Check that all ranks begin the backward of the same forward, with a fitting gradient."""
        error = None
        if _described(dout) != _described(out):
            error = ArgumentError(
                "the gradient of the output does not fit the output", found=_described(dout), expected=_described(out)
            )
        ballot = Ballot("backward", (), error, None, REMEDY, number=call, where=" of a ring")
        ballot.cast(self.group)
        ballot.decide()

    def close(self) -> None:
        """Drop the plans."""
        self.plans.clear()


def ring_agreement_of(comm: Communicator) -> RingAgreement:
    """The one for all rings on a communicator; collective the first time."""
    return cached(comm, "ring agreement", lambda: RingAgreement(comm))


def _described(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)} on {arrays.device_of(x)}" if arrays.is_array(x) else type(x).__name__
