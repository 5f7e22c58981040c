"""After a death: which survivor takes which place in the new mesh, and behind which step all go on; pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mpipipe import optim
from mpipipe.arrays import Array
from mpipipe.train.commitment import Commitment
from mpipipe.train.config import TrainConfig


class Told(NamedTuple):
    """What a survivor tells the others.

    Attributes
    ----------
    pipe : its place in its pipeline, and so which stages it has
    step : number of steps that it has made
    can_follow : whether it can make one more step, once it knows that another rank has made that step
    facts : what else belongs to the state after `step`
    """

    pipe: int
    step: int
    can_follow: bool
    facts: dict[str, Any]


class Remains:
    """What is left of a training on this rank.

    Parameters
    ----------
    pipe : its place in its pipeline
    commitment : of its trainer
    facts : what else belongs to the steps it has made
    arrays : parameters and the state of the optimizer
    optimizer : whose state it is
    """

    def __init__(
        self,
        pipe: int,
        commitment: Commitment,
        facts: dict[str, Any],
        arrays: list[Array],
        optimizer: optim.AdamW | optim.SGD,
    ) -> None:
        self.pipe, self.commitment, self.facts, self.arrays, self.optimizer = pipe, commitment, facts, arrays, optimizer

    @property
    def step(self) -> int:
        """Number of steps made."""
        return self.commitment.made

    @property
    def optimizer_steps(self) -> int:
        """Those of them that the optimizer has made."""
        return self.optimizer.steps

    def told(self) -> Told:
        """Return what the others are to know."""
        return Told(self.pipe, self.step, self.commitment.pending is not None, self.facts)

    def catch_up(self, step: int) -> None:
        """Make the step that another rank has made, too, where this one can; else nobody will make it any more.

        Other ranks make the step after `step` from now on, and it is another one: with fewer replicas.
        """
        if self.step == step - 1:
            self.commitment.make()
        self.commitment.pending = None


@dataclass(frozen=True)
class Survivors:
    """What follows from what all survivors have.

    Attributes
    ----------
    step : number of steps made, behind which the training goes on
    facts : of that step
    order : ranks of the communicator of survivors, in the order of the new mesh; the others are spares
    problem : why the training cannot go on; "" where it can
    """

    step: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    order: tuple[int, ...] = ()
    problem: str = ""

    @classmethod
    def of(cls, told: Sequence[Told | None], pipe: int, config: TrainConfig) -> Survivors:
        """Find the largest mesh of the survivors in which every stage has a rank that knows its state.

        Parameters
        ----------
        told : of each rank; None for one that has no state
        pipe : ranks of one pipeline
        config : with the batch, which must divide among the replicas, and `seq`
        """
        known = [each for each in told if each is not None]
        if not known:
            return cls(problem="no step had been made")
        step = max(each.step for each in known)
        having: dict[int, list[int]] = {place: [] for place in range(pipe)}
        for rank, each in enumerate(told):
            if each is not None and step in (each.step, each.step + each.can_follow):
                having[each.pipe].append(rank)
        lacking = [place for place, ranks in having.items() if not ranks]
        if lacking:
            return cls(problem=f"and no rank has the state of place {lacking[0]} of {pipe} in the pipeline")
        replicas = len(told) // (pipe * config.seq)
        while replicas and config.batch % replicas:
            replicas -= 1
        if replicas == 0:
            return cls(problem=f"too few for a pipeline of {pipe} x seq {config.seq}")
        facts = next(each for each in known if each.step == step).facts | {"step": step}
        return cls(step, facts, _order(having, len(told), replicas * config.seq))


def _order(having: dict[int, list[int]], size: int, each: int) -> tuple[int, ...]:
    """Deal `each` ranks to each place: those that have its state, then others."""
    chosen = {place: ranks[:each] for place, ranks in having.items()}
    taken = {rank for ranks in chosen.values() for rank in ranks}
    free = iter([rank for rank in range(size) if rank not in taken])
    return tuple(
        rank for ranks in chosen.values() for rank in [*ranks, *(next(free) for _ in range(each - len(ranks)))]
    )
