"""Runs the steps of a plan: takes what an action needs, calls the stage, hands on what it made.

There is one loop for every schedule. What a forward saved is kept here, per (stage, micro-batch), until the backward
that needs it; received arrays go back to the mailbox then.
"""

from __future__ import annotations

import math
from collections import defaultdict
from time import perf_counter
from typing import NamedTuple

import numpy as np

from mpipipe import arrays
from mpipipe.comm.reduce import PendingSum
from mpipipe.errors import ArgumentError, MpipipeError, NonFiniteError, PeerError, StageError
from mpipipe.nn import Stage
from mpipipe.pipeline.microbatches import Wire, flatten, unflatten

NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


class Job(NamedTuple):
    """What one call is to do on this rank."""

    training: bool
    feeds: list  # inputs per micro-batch, on the rank of stage 0
    targets: list | None  # targets per micro-batch, on the rank of the last stage; None where no loss is wanted
    weights: list  # weight of each micro-batch in the loss, there too
    wires: dict  # (edge, micro-batch) -> Wire; filled here while `known` is false
    known: bool


class Outcome(NamedTuple):
    """What one call gave on this rank; each by micro-batch, empty where it does not arise."""

    losses: dict
    outputs: dict
    input_grads: dict


class Executor:
    """The state of one rank between and within steps.

    Attributes
    ----------
    peak : largest number of (stage, micro-batch) activations alive at once, in the last training step
    busy : seconds spent in stages and loss, in the last call
    clock : (op, stage) -> [seconds, count] over all training steps
    place : where this rank is, for the report of an interruption
    """

    def __init__(self, rank, stages, mailbox, loss, recompute, replicas):
        self.rank, self.stages, self.mailbox, self.loss = rank, stages, mailbox, loss
        self.recompute, self.replicas = recompute, replicas
        # the losses of this package return a gradient that nobody else holds; a user's may return any array
        self.owns_gradient = getattr(loss, "__module__", "").startswith("mpipipe.")
        self.positions = [stage.position if isinstance(stage, Stage) else None for stage in stages]
        self.actions = {"F": self._forward, "B": self._backward, "I": self._input_gradient, "W": self._weight_gradient}
        self.clock: dict = defaultdict(lambda: [0.0, 0])
        self.recorder = None
        self.place = f"rank {rank}"
        self.busy, self.peak = 0.0, 0

    def run(self, steps, job: Job) -> Outcome:
        """All steps of a plan. Whatever a stage raises comes out as an error that names rank, stage, micro-batch."""
        self.job, self.outcome = job, Outcome({}, {}, {})
        self.kept: dict = {}  # (stage, micro-batch) -> what backward needs, leases
        self.pending: dict = {}  # the same between input gradient and weight gradient
        self.local: dict = {}  # (edge, micro-batch, op) -> tree that stays on this rank
        self.seeds: dict = {}  # micro-batch -> gradient of the loss
        self.sums: list = []
        self.busy, self.alive = 0.0, 0
        if job.training:
            self.peak = 0
        actions = self.actions
        step = steps[0]
        try:
            for step in steps:
                actions[step.op](step)
                if step.completes and self.replicas is not None:
                    self._start_sum(step)
        except PeerError:
            raise
        except MpipipeError as error:
            self._place(error, step)
            raise
        except Exception as error:
            raise StageError(
                f"{NAMES[step.op]} raised {type(error).__name__}: {error}",
                rank=self.rank, stage=step.stage, microbatch=step.microbatch,
            ) from error
        except BaseException:  # SystemExit, KeyboardInterrupt: they stay what they are, the other ranks hear where
            self.place = f"rank {self.rank}, stage {step.stage}, micro-batch {step.microbatch}, {NAMES[step.op]}"
            raise
        return self.outcome

    def _place(self, error, step):
        if error.rank is None:
            error.rank = self.rank
        if error.stage is None:
            error.stage = step.stage
        if error.microbatch is None:
            error.microbatch = step.microbatch

    def _forward(self, step):
        job, microbatch = self.job, step.microbatch
        lease = ()
        if step.first:
            x = job.feeds[microbatch]
        elif step.receive is None:
            x = self.local.pop((step.stage, microbatch, "F"))
        else:
            x, lease = self._receive_activation(step)
        stage = self.stages[step.chunk]
        start = perf_counter()
        position = self.positions[step.chunk]
        if position is not None:
            position.microbatch = microbatch
        result = stage.forward(x)
        if type(result) is not tuple or len(result) != 2:
            raise ArgumentError(
                "the forward of a stage returns (output, saved)",
                found=type(result).__name__,
                expected="a tuple of two",
                remedy="return (y, None) where nothing is saved",
            )
        y, saved = result
        if step.last and job.targets is not None:
            self._evaluate_loss(step, y, job.targets[microbatch])
        self._count(step, start)
        if lease:
            y = _detached(y, lease)
        if not step.last:
            self._hand_on(step, y, "F", step.stage + 1)
        elif not job.training:
            self.outcome.outputs[microbatch] = y
        if job.training:
            self.kept[step.stage, microbatch] = (x if self.recompute else saved), lease
            self.alive += 1
            if self.alive > self.peak:
                self.peak = self.alive
        else:
            self.mailbox.release(lease)

    def _evaluate_loss(self, step, y, target):
        microbatch, job = step.microbatch, self.job
        value, gradient = self.loss(y, target)
        if not math.isfinite(value):
            raise NonFiniteError(
                "the loss is not finite", rank=self.rank, stage=step.stage, microbatch=microbatch, found=value,
                remedy="lower the learning rate, clip gradients, or look at this micro-batch's data",
            )
        self.outcome.losses[microbatch] = value
        if job.training:
            self.seeds[microbatch] = _weighted(gradient, job.weights[microbatch], y, self.owns_gradient)

    def _backward(self, step):
        stage = self.stages[step.chunk]
        dy, lease = self._output_gradient(step)
        saved, kept_lease = self.kept.pop((step.stage, step.microbatch))
        start = perf_counter()
        if self.recompute:
            saved = self._again(step, saved)
        dx = stage.backward(dy, saved)
        self._count(step, start)
        self._return_gradient(step, dx, (*lease, *kept_lease))
        self._drop((*lease, *kept_lease))

    def _input_gradient(self, step):
        stage = self.stages[step.chunk]
        dy, lease = self._output_gradient(step)
        saved, kept_lease = self.kept.pop((step.stage, step.microbatch))
        start = perf_counter()
        if self.recompute:
            saved = self._again(step, saved)
        dx, pending = stage.backward_input(dy, saved)
        self._count(step, start)
        leases = (*lease, *kept_lease)
        self._return_gradient(step, dx, leases)
        self.pending[step.stage, step.microbatch] = pending, leases

    def _weight_gradient(self, step):
        pending, leases = self.pending.pop((step.stage, step.microbatch))
        start = perf_counter()
        self.stages[step.chunk].backward_weight(pending)
        self._count(step, start)
        self._drop(leases)

    def _again(self, step, x):
        position = self.positions[step.chunk]
        if position is not None:
            position.microbatch = step.microbatch
        return self.stages[step.chunk].forward(x)[1]

    def _drop(self, leases):
        self.mailbox.release(leases)
        self.alive -= 1

    def _count(self, step, start):
        end = perf_counter()
        self.busy += end - start
        if self.job.training:
            entry = self.clock[step.op, step.stage]
            entry[0] += end - start
            entry[1] += 1
        if self.recorder is not None:
            self.recorder.add(str(step), start, end)

    def _receive_activation(self, step):
        envelope, job = step.receive, self.job
        if job.known:
            leaves, lease = self.mailbox.take()
            wire = job.wires[envelope.edge, envelope.microbatch]
        else:
            wire = Wire.decode(self.mailbox.take_header(envelope))
            job.wires[envelope.edge, envelope.microbatch] = wire
            leaves, lease = self.mailbox.take_unknown(envelope, wire.leaves)
        return unflatten(leaves, wire.structure), lease

    def _output_gradient(self, step):
        """The gradient of this step's output, and the lease on its arrays."""
        if step.last:
            return self.seeds.pop(step.microbatch), ()
        envelope = step.receive
        if envelope is None:
            return self.local.pop((step.stage + 1, step.microbatch, "B")), ()
        wire = self.job.wires[envelope.edge, envelope.microbatch]
        if self.job.known:
            leaves, lease = self.mailbox.take()
        else:
            leaves, lease = self.mailbox.take_unknown(envelope, wire.gradients)
        return wire.gradient_tree(leaves), lease

    def _hand_on(self, step, y, op, edge):
        """Send an output to the next stage, or keep it for it where that is on this rank."""
        envelope = step.send
        if envelope is None:
            self.local[edge, step.microbatch, op] = y
            return
        key = envelope.edge, envelope.microbatch
        if not self.job.known:
            self.job.wires[key] = wire = Wire.of(y)
            self.mailbox.put_header(envelope, wire.encode())
        elif not self.job.wires[key].fits(y):
            raise ArgumentError(
                "a stage's output depends on more than the shapes of the pipeline's inputs",
                found=Wire.of(y), expected=f"{self.job.wires[key]}, as for the same input shapes before",
                remedy="pad the output to a shape that follows from the input shapes",
            )
        self.mailbox.put(envelope, [y] if isinstance(y, np.ndarray) else flatten(y)[0])

    def _return_gradient(self, step, dx, leases):
        if leases:
            dx = _detached(dx, leases)
        envelope = step.send
        if envelope is not None:
            wire = self.job.wires[envelope.edge, envelope.microbatch]
            self.mailbox.put(envelope, wire.gradient_leaves(dx))
        elif step.first:
            self.outcome.input_grads[step.microbatch] = dx
        else:
            self.local[step.stage, step.microbatch, "B"] = dx

    def _start_sum(self, step):
        gradients = getattr(self.stages[step.chunk], "gradients", None)
        if gradients is None:
            return
        start = perf_counter()
        self.sums.append(PendingSum(self.replicas, gradients.flat))
        if self.recorder is not None:
            self.recorder.add(f"all-reduce {step.stage}", start, perf_counter())

    def poll(self):
        """Let messages and sums advance; stages call this between layers."""
        self.mailbox.poll()
        if self.sums:
            self.sums[0].Test()


def _weighted(gradient, weight, output, own):
    """The loss gradient times the micro-batch's share of the batch; in place where `own`."""
    leaves, structure = flatten(gradient)
    outputs, expected = flatten(output)
    if structure != expected:
        raise ArgumentError("the gradient of the loss has another structure than the output", found=structure,
                            expected=expected)
    scaled: list = []
    for leaf, like in zip(leaves, outputs):
        if not arrays.is_floating(like.dtype):
            scaled.append(None)  # an integer output has no gradient
            continue
        if leaf is None or leaf.shape != like.shape or leaf.dtype != like.dtype:
            raise ArgumentError(
                "the gradient of the loss does not match the output",
                found="None" if leaf is None else f"{leaf.dtype.name}{list(leaf.shape)}",
                expected=f"{like.dtype.name}{list(like.shape)}",
            )
        scaled.append(np.multiply(leaf, weight, out=leaf if own else None))
    return unflatten(scaled, structure)


def _detached(tree, leases):
    """`tree` with a copy of each leaf that shares memory with a received array, which is about to be used again."""
    if tree is None:
        return None
    buffers = [array for _, array in leases]
    if isinstance(tree, np.ndarray):
        return tree.copy() if _shares(tree, buffers) else tree
    leaves, structure = flatten(tree)
    if not any(_shares(leaf, buffers) for leaf in leaves):
        return tree
    return unflatten([leaf.copy() if _shares(leaf, buffers) else leaf for leaf in leaves], structure)


def _shares(leaf, buffers):
    if leaf is None:
        return False
    if leaf.base is None:  # owns its memory, and a received array never does
        return False
    return any(np.may_share_memory(leaf, buffer) for buffer in buffers)
