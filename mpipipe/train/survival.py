"""A training that goes on when ranks die, where MPI has ULFM: `mpipipe train --survive`.

    pipe 2 x data 2        rank 0 | rank 1      a step:  ... sums of gradients, norm | all have them | optimizer
                           rank 2 | rank 3                                           ^ one agreement
    rank 1 dies            those that live find out, and come together (job/lifeline.py)
    pipe 2 x data 1        rank 2 | rank 3      go on, from what they have in memory; rank 0 waits as a spare

No rank changes its parameters before all ranks have what they need for it. So after a death either no survivor has made
the step that was under way, and it is made again by fewer replicas, or one has, and then all others can: their
gradients and their norm are complete. Either way all that have a stage have the same state of it, to the bit.

Any survivor can take any place: its replicas send it the state. Where nobody has the state of some stage, all leave
with the exit code 75 (PREEMPTED), for a start from the newest checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mpipipe import checkpoint, optim
from mpipipe.arrays import Array
from mpipipe.checkpoint import owner_of
from mpipipe.comm import Mesh
from mpipipe.errors import ArgumentError, BackendError
from mpipipe.job import PREEMPTED, Communicator, Preempted, StopSignals, exit, group_of, lifeline, own, write
from mpipipe.text import counted
from mpipipe.train import metrics, resume
from mpipipe.train.config import TaskConfig
from mpipipe.train.progress import Progress, StepBarrier
from mpipipe.train.report import Record, Reporter

if TYPE_CHECKING:
    from mpipipe.train.trainer import Trainer


class ElasticRun:
    """One rank of a training that outlives ranks; the constructor is collective over all ranks of the job.

    `goes_on` says whether ranks have died, so that the state of the training is in memory.
    """

    def __init__(self, config: TaskConfig, comm: Communicator, pipe: int, out: Path) -> None:
        group = group_of(comm)
        with group.raise_together("train: --survive"):
            self.line = lifeline.demand()
            if comm.size != len(self.line.places):
                raise ArgumentError("train: --survive on a part of the job", found=counted(comm.size, "rank"))
            # between two meshes, and on a rank that waits for a place, a signal ends nothing; the next mesh hears of it
            self._signals = StopSignals(config.preempt_signals)
        self.config, self.pipe, self.out = config, pipe, out
        self.everyone, self.active = comm, comm
        self.takes_part, self.first, self.goes_on = True, 0, False
        self.trainer: Trainer | None = None
        self.retained: RetainedState | None = None
        self.facts: dict[str, Any] = {}
        self.line.revoke_on_loss(comm, group.comm)

    def train(self, run: Callable[[Mesh], Record]) -> Record:
        """Call `run(mesh)` until a mesh has come to the end of the training; return what it returned, on all ranks."""
        found: Communicator | None = None
        try:
            while True:
                try:
                    if found is not None:
                        self._divide(found)
                    record = self._take_part(run)
                    found = self.line.finish()
                    if found is None:
                        return record
                except Exception as error:
                    if not self.line.explains(error):
                        raise
                    found = self.line.gather()
        finally:
            self._signals.close()

    def check_device(self, device: str) -> None:
        """Raise BackendError for GPUs, whose messages by NCCL do not end when a peer dies."""
        if device != "cpu":
            raise BackendError(
                "a training on GPUs cannot outlive a rank: nothing of that has been tried",
                found=f"device {device}",
                expected="device cpu",
                remedy="leave --survive out, and start again from checkpoints: --save-every, --resume auto",
            )

    # -- after a death ------------------------------------------------------------------------------------------

    def _divide(self, everyone: Communicator) -> None:
        """Give each survivor its place, and bring those that have a state to the same step."""
        exit.outlive(everyone)  # type: ignore[arg-type]  # of MPI, since ranks have died
        self.everyone, self.goes_on = everyone, True
        group = group_of(everyone)
        self.line.revoke_on_loss(everyone, group.comm)
        if self.trainer is not None:
            self.retained, self.trainer = RetainedState.of(self.trainer), None
        told = None if self.retained is None else self.retained.report()
        places = Assignment.of(group.gather("train: what survivors have", told), self.pipe, self.config)
        left = counted(everyone.size, "rank")
        text = f"mpipipe: {self.line.name(self.line.lost)}; {left} {'is' if everyone.size == 1 else 'are'} left"
        if places.problem:
            newest = checkpoint.newest(resume.checkpoints_of(self.out))
            rest = "there is no checkpoint" if newest is None else f"the newest checkpoint is {newest}"
            raise exit.Stop(f"{text}, {places.problem}; {rest}\n", PREEMPTED)
        if self.retained is not None:
            self.retained.catch_up(places.step)
        self.facts, self.first = places.facts, places.order[0]
        owned = owner_of(self.out)
        if owned is not None:
            owned.hand_on(group, self.first)
        self.takes_part = group.rank in places.order
        place = places.order.index(group.rank) if self.takes_part else group.rank
        if group.rank == 0:
            spare = everyone.size - len(places.order)
            write(
                f"{text}; {len(places.order)} of them go on after step {places.step}"
                + (f", {spare} more can take the places of others\n" if spare else "\n")
            )
        self.active = group.split(0 if self.takes_part else 1, place, "survivors")
        self.line.revoke_on_loss(everyone, group.comm, self.active, group_of(self.active).comm)

    def _take_part(self, run: Callable[[Mesh], Record]) -> Record:
        record = None
        if self.takes_part:
            with suppress(Preempted), Mesh(self.active, pipe=self.pipe, seq=self.config.seq) as mesh:
                record = run(mesh)
        group = group_of(self.everyone)
        end: Record | None = group.broadcast("train: the end", record, self.first)
        if end is None:  # all leave, also those that waited for a place
            self._signals.leave()
            raise Preempted(group)
        return end

    # -- what a trainer asks ------------------------------------------------------------------------------------

    def restore(self, progress: Progress) -> None:
        """Set the state of the training from that of the survivors; collective over the new mesh."""
        facts, retained = self.facts, self.retained
        group, targets = group_of(progress.mesh.replicas), _arrays_of(progress)
        if retained is not None and (retained.pipe, retained.step) != (progress.mesh.pipe.rank, facts["step"]):
            retained = None  # of another stage or step
        known = [0, 0] if retained is None else [1, retained.optimizer.steps]
        table = group.agree("train: who has the state", values=known)
        root = int(table[:, 0].argmax())
        if retained is not None:
            for target, source in zip(targets, retained.arrays, strict=True):
                target[...] = source
        if not table[:, 0].all():
            what = "the state of a stage, for a rank that takes a new place"
            for target in targets:
                with group.failing(what):
                    group.wait(own(group.comm.Ibcast(target, root)), what, everyone=True)
        progress.optimizer.steps = int(table[root, 1])
        progress.step, progress.record = facts["step"], facts["record"]
        progress.scalars, progress.rows = facts["scalars"], facts["rows"]
        for stage in progress.pipeline.stages:
            stage.sync_compute()

    def reporter(self, unit: str, oversubscribed: str | None) -> Reporter:
        """Make the reporter of rank 0, which goes on with the metrics that the old one has left."""
        step, record = self.facts["step"], self.facts["record"]
        done = step if self.facts["reported"] == step else step - 1  # after which records are made again
        last = metrics.cut(self.out, done)
        reporter = Reporter(self.config.steps, self.out, unit=unit, oversubscribed=oversubscribed, done=step)
        if last < record.step <= done:
            reporter.record(record)
        return reporter

    def enlist(self, trainer: Trainer) -> None:
        """From now on the state of the training is that of `trainer`."""
        if self.goes_on:
            progress = trainer.progress
            progress.outcome, progress.reported = self.facts["outcome"], self.facts["reported"]
            progress.in_memory = True
            trainer.checkpoints.owed = self.facts["owed"]
        self.trainer, self.retained = trainer, None


def _arrays_of(progress: Progress) -> list[Array]:
    """All that is not drawn, as flat arrays: parameters, trained and frozen, and the state of the optimizer."""
    arrays = []
    for stage, state in zip(progress.pipeline.stages, progress.optimizer.state):
        size = stage.parameters.flat.size
        arrays += [stage.parameters.flat, stage.buffers.held.flat, *(state[kind][:size] for kind in sorted(state))]
    return arrays


# -- After a death: which survivor takes which place in the new mesh, and after which step all continue; pure functions


class SurvivorReport(NamedTuple):
    """What a survivor tells the others."""

    pipe: int  # its place in its pipeline, and so which stages it has
    step: int  # number of steps that it has made
    can_follow: bool  # whether it can make one more, once it knows that another rank has made that
    facts: dict[str, Any]  # what else belongs to the state after `step`


@dataclass(frozen=True)
class RetainedState:
    """What is left of a training on this rank: its place in the pipeline, and the state of the steps it has made."""

    pipe: int
    step_barrier: StepBarrier
    facts: dict[str, Any]
    arrays: list[Array]
    optimizer: optim.AdamW | optim.SGD

    @classmethod
    def of(cls, trainer: Trainer) -> RetainedState:
        """Keep what a trainer leaves, whose mesh has lost ranks."""
        progress = trainer.progress
        facts = {
            "scalars": trainer.step_barrier.scalars(),
            "rows": trainer.progress.rows,
            "outcome": progress.outcome,
            "reported": progress.reported,
            "owed": trainer.checkpoints.owed,
            "record": progress.record,
        }
        place = progress.mesh.pipe.rank
        return cls(place, trainer.step_barrier, facts, _arrays_of(progress), progress.optimizer)

    @property
    def step(self) -> int:
        return self.step_barrier.made

    def report(self) -> SurvivorReport:
        return SurvivorReport(self.pipe, self.step, self.step_barrier.pending is not None, self.facts)

    def catch_up(self, step: int) -> None:
        """Make the step that another rank has made, too, where this one can; else it is not made any more.

        Other ranks make the step after `step` from now on, and it is another one: with fewer replicas.
        """
        if self.step == step - 1:
            self.step_barrier.make()
        self.step_barrier.pending = None


@dataclass(frozen=True)
class Assignment:
    """The mesh and the step from which the survivors continue."""

    step: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    order: tuple[int, ...] = ()  # ranks of the survivors, in the order of the new mesh; the others are spares
    problem: str = ""  # why the training cannot go on

    @classmethod
    def of(cls, told: Sequence[SurvivorReport | None], pipe: int, config: TaskConfig) -> Assignment:
        """Find the largest mesh in which every stage has a rank with its state; `told` is of each rank, or None."""
        known = [report for report in told if report is not None]
        if not known:
            return cls(problem="no step had been made")
        step = max(report.step for report in known)
        having: dict[int, list[int]] = {place: [] for place in range(pipe)}
        for rank, report in enumerate(told):
            if report is not None and step in (report.step, report.step + report.can_follow):
                having[report.pipe].append(rank)
        lacking = [place for place, ranks in having.items() if not ranks]
        if lacking:
            return cls(problem=f"and no rank has the state of place {lacking[0]} of {pipe} in the pipeline")
        replicas = len(told) // (pipe * config.seq)
        while replicas and config.batch % replicas:
            replicas -= 1
        if replicas == 0:
            return cls(problem=f"too few for a pipeline of {pipe} x seq {config.seq}")
        facts = next(report for report in known if report.step == step).facts | {"step": step}
        # to each place those that have its state, then others
        count = replicas * config.seq
        chosen = [ranks[:count] for ranks in having.values()]
        free = iter(sorted({*range(len(told))}.difference(*chosen)))
        order = [rank for ranks in chosen for rank in [*ranks, *islice(free, count - len(ranks))]]
        return cls(step, facts, tuple(order))
