"""The state of a pipeline: open, closed, or failed for good; its calls, and how far one is.

All ranks of the pipeline, and of its replicas, agree on each call at its start.

Nothing extra is noted for an action. The clock makes two marks for each action of the plan anyway:

    marks  0 . . 1 . . 2 . . 3        an even number: the next action waits for its message
           |0F0 |     |0F1 |          an odd number: an action computes
"""

from __future__ import annotations

from functools import lru_cache
from threading import get_ident

from mpipipe.errors import ArgumentError, MismatchError, MpipipeError
from mpipipe.job import Ballot, Snapshot, digest, is_rank, whoami
from mpipipe.pipeline.batch import BatchFacts
from mpipipe.pipeline.construction import AgreedRanks
from mpipipe.pipeline.executor import Executor
from mpipipe.pipeline.plan import NAMES, PlannedAction
from mpipipe.text import counted, name_slice

CALLS = ("step", "forward_train", "backward", "evaluate", "forward", "durations", "close")
DIFFERENT = (
    "ranks call different methods of a pipeline, or with different scales or values of accumulate"
)
REMEDY = (
    f"call {', '.join(CALLS[:-1])} and {CALLS[-1]} on all ranks, in the same order and with "
    "the same arguments"
)
MOST_MADE = 256  # actions whose messages a report of a hang knows: it is sent from rank to rank


class PipelineState:
    """Whether a pipeline is "open", "closed" or "failed", and what it does on this rank.

    Any error inside `with state:` ends it on all ranks. While a call is under way, `running` is
    true.
    """

    def __init__(self, name: str, ranks: AgreedRanks, executor: Executor) -> None:
        self.name = name
        self.pipe = ranks.pipe
        self.replicas = ranks.replicas
        # The ranks that must learn of a failure.
        self.groups = ranks.groups
        self.executor = executor
        self.state = "open"
        self.running = False
        self.thread = 0  # the thread of the last call
        self.calls = 0  # calls that were begun, also those on which the ranks did not agree
        self.pipe.context.add_inspectable(self)
        for group in self.groups:
            group.related = self.groups

    @property
    def is_open(self) -> bool:
        return self.state == "open"

    def check(self, call: str) -> None:
        """Raise ArgumentError if a call cannot begin."""
        rank = self.pipe.rank
        if not self.is_open:
            remedy = "call step before close"
            if self.state == "failed":
                remedy = "start the job anew"
            raise ArgumentError(f"the pipeline is {self.state}", rank=rank, remedy=remedy)
        if self.running:
            raise ArgumentError(
                f"{call} was called within another call of {self.name}",
                rank=rank,
                remedy="a stage, or a loss, must not call the pipeline that runs it",
            )

    def agree(
        self,
        call: str,
        batch: BatchFacts,
        error: Exception | None,
        scale: float = 1.0,
        accumulate: bool = False,
    ) -> BatchFacts:
        """Agree on a call; return what all ranks know, or raise the `error` of any on all ranks."""
        self.calls += 1
        if isinstance(error, MpipipeError) and error.rank is None:
            error.rank = self.pipe.rank
        facts = (("scale", float(scale)), ("accumulate", accumulate))
        ballot = Ballot(
            call,
            facts,
            error,
            DIFFERENT,
            REMEDY,
            number=self.calls,
            where=f" of {self.name}",
            code=_code(call, facts),
        )
        table = ballot.cast(self.pipe, batch)
        whole = BatchFacts(*table.max(0).tolist())
        rows = whole.rows
        target_rows = whole.target_rows
        if not ballot.failed and rows and target_rows not in (0, rows):
            ballot.refuse(
                MismatchError(
                    "inputs and targets have different numbers of rows",
                    found=f"{counted(target_rows, 'row')} of targets",
                    expected=f"{rows}, as the inputs have",
                )
            )
        if self.replicas is not None:
            # What replicas add up or compare.
            own = whole.counted, whole.entries, whole.mean_over, whole.uneven
            of_replicas = ballot.cast(self.replicas, own)
            counted_rows, entries, mean_over, uneven = of_replicas.T
            if not ballot.failed and len(set(mean_over.tolist())) > 1:
                ballot.refuse(
                    MismatchError(
                        "the losses of replicas are means over different things",
                        found="mean_over_entries differs",
                        expected="the same on all replicas",
                        remedy="give the same loss to all replicas",
                    )
                )
            unlike = entries * counted_rows[0] != entries[0] * counted_rows
            whole = whole._replace(
                counted=int(counted_rows.sum()),
                entries=int(entries.sum()),
                mean_over=int(mean_over[0]),
                uneven=int(uneven.any() or unlike.any()),
            )
        ballot.decide()
        return whole

    def __enter__(self) -> None:
        self.thread = get_ident()
        self.running = True

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.running = False
        if error is not None:
            self.fail(error)

    def fail_alone(self, error: BaseException) -> None:
        """End the pipeline for an error that not all ranks raise."""
        if not all(group.agreed_on(error) for group in self.groups):
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """End the pipeline if it is open, and let the other ranks know.

        Messages and kernels of the broken call may be under way.
        """
        if not self.is_open:
            return
        self.state = "failed"
        if isinstance(error, MpipipeError):
            name_slice(error)
        if not is_rank():  # a process that a stage has forked must not call MPI
            return
        text = f"rank {self.pipe.rank} ({whoami()}) failed: {type(error).__name__}: {error}"
        for group in self.groups:
            group.fail(error, text)
        self.executor.abandon(self.pipe.context.recorders)

    # -- How far it is, for the report of a job that hangs

    def progress_token(self) -> object:
        call = self.executor.call
        marks = call.marks if call else ()
        return self.running, len(marks), self.executor.messages.mailbox.polls

    def snapshot(self) -> Snapshot:
        call = self.executor.call
        if call is None or not self.running:
            return Snapshot()
        done, computes = divmod(len(call.marks), 2)
        steps = call.plan.steps
        doing = f"the end of {call.title}"
        if done < len(steps):
            doing = f"{_named(steps[done])}, in {call.title}"
        made = []
        for step in steps[max(0, done - MOST_MADE) : done]:
            for message in step.sends:
                made.append((str(message._replace(peer=self.pipe.rank)), _named(step)))
        return Snapshot(doing, bool(computes), self.thread, tuple(made))


def _named(action: PlannedAction) -> str:
    return f"{NAMES[action.op]} of stage {action.stage}, micro-batch {action.unit}"


_code = lru_cache(maxsize=16)(digest)  # the next call nearly always has the same facts
