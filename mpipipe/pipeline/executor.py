"""Runs the steps of a plan: takes what an action needs, calls the stage, hands on what it made.

There is one loop for every schedule. What a forward saved is kept here, per (stage, micro-batch), until the backward
that needs it; received arrays go back to the mailbox then.
"""

from __future__ import annotations

import math
from inspect import signature
from time import perf_counter
from typing import NamedTuple

import numpy as np

from mpipipe import arrays
from mpipipe.comm.allreduce import AllReduce
from mpipipe.errors import ArgumentError, MpipipeError, NonFiniteError, PeerError, StageError
from mpipipe.nn import Stage, kernels
from mpipipe.pipeline.clock import DeviceClock, HostClock
from mpipipe.pipeline.microbatches import MessageSpec, flatten, unflatten

NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


class Job(NamedTuple):
    """What one call is to do on this rank."""

    training: bool
    feeds: list  # inputs per micro-batch, on the rank of stage 0
    targets: list | None  # targets per micro-batch, on the rank of the last stage; None where no loss is wanted
    weights: list  # weight of each micro-batch in the loss, there too
    scale: float  # factor on all gradients
    wires: dict  # (edge, micro-batch) -> MessageSpec; filled here while `known` is false
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
    clock : what the actions took
    place : where this rank is, for the report of an interruption
    """

    def __init__(self, rank, stages, mailbox, loss, recompute, replicas, device="cpu"):
        self.rank, self.stages, self.mailbox, self.loss = rank, stages, mailbox, loss
        self.recompute, self.replicas = recompute, replicas
        self.takes_factor = _takes_factor(loss)
        self.positions = [stage.position if isinstance(stage, Stage) else None for stage in stages]
        self.actions = {"F": self._forward, "B": self._backward, "I": self._input_gradient, "W": self._weight_gradient}
        self.clock = DeviceClock() if device == "cuda" else HostClock()
        self.annotates = device == "cuda"
        self.place = f"rank {rank}"
        self.peak = 0
        self.sums: list = []

    def run(self, steps, job: Job) -> Outcome:
        """All steps of a plan. Whatever a stage raises comes out as an error that names rank, stage, micro-batch."""
        self.job, self.outcome = job, Outcome({}, {}, {})
        self.kept: dict = {}  # (stage, micro-batch) -> what backward needs, leases
        self.pending: dict = {}  # the same between input gradient and weight gradient
        self.local: dict = {}  # (edge, micro-batch, op) -> tree that stays on this rank
        self.seeds: dict = {}  # micro-batch -> gradient of the loss
        self.sums = []
        self.alive = 0
        if job.training:
            self.peak = 0
        self.clock.begin()
        actions = self.actions
        annotates = self.annotates and self.clock.recorder is not None
        step = steps[0]
        try:
            for step in steps:
                if annotates:
                    with arrays.annotated(str(step)):
                        actions[step.op](step)
                else:
                    actions[step.op](step)
                if step.completes and self.replicas is not None:
                    self._start_sum(step)
        except PeerError:
            raise
        except MpipipeError as error:
            self._place(error, step)
            raise
        except Exception as error:
            raise self._stage_error(NAMES[step.op], step, error) from error
        except BaseException:  # SystemExit, KeyboardInterrupt: they stay what they are, the other ranks hear where
            self.place = f"rank {self.rank}, stage {step.stage}, micro-batch {step.microbatch}, {NAMES[step.op]}"
            raise
        return self.outcome

    def _stage_error(self, what, step, error) -> StageError:
        text = f"{what} raised {type(error).__name__}: {error}"
        return StageError(text, rank=self.rank, stage=step.stage, microbatch=step.microbatch)

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
        start = self.clock.now()
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
        self.clock.add(step, start, self.job.training)
        if lease:
            y = _copy_if_aliased(y, lease)
        if not step.last:
            self._send_activation(step, y, "F", step.stage + 1)
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
        weight = job.weights[microbatch] * job.scale if job.training else 1.0
        value, gradient = self._call_loss(step, y, target, weight)
        if getattr(value, "size", 1) != 1:
            raise ArgumentError("the value of a loss", found=f"an array of shape {value.shape}", expected="one number")
        if not arrays.is_device(value):  # a value on the device is looked at when the step has ended
            self._check_loss(value, step.stage, microbatch)
        self.outcome.losses[microbatch] = value
        if job.training:
            self.seeds[microbatch] = _weighted(gradient, 1.0 if self.takes_factor else weight, y)

    def _call_loss(self, step, y, target, weight):
        """(value, gradient); an error of the loss is not blamed on the stage."""
        try:
            result = self.loss(y, target, factor=weight) if self.takes_factor else self.loss(y, target)
        except MpipipeError:
            raise
        except Exception as error:
            raise self._stage_error("the loss", step, error) from error
        if type(result) is not tuple or len(result) != 2:
            raise ArgumentError(
                "a loss returns (value, gradient of the output)", found=type(result).__name__, expected="a tuple of two"
            )
        return result

    def _check_loss(self, value, stage, microbatch):
        try:
            finite = math.isfinite(value)
        except (TypeError, ValueError):
            raise ArgumentError("the value of a loss", found=type(value).__name__, expected="one number") from None
        if not finite:
            raise NonFiniteError(
                "the loss is not finite",
                rank=self.rank,
                stage=stage,
                microbatch=microbatch,
                found=value,
                remedy="lower the learning rate, clip gradients, or look at this micro-batch's data",
            )

    def losses(self, last_stage: int) -> dict:
        """The losses of the last call as numbers, by micro-batch; waits for those that are on the device, once."""
        found = self.outcome.losses
        waiting = [microbatch for microbatch, value in found.items() if arrays.is_device(value)]
        if waiting:
            values = arrays.download(*(found[microbatch].reshape(1) for microbatch in waiting))
            for microbatch, value in zip(waiting, values if len(waiting) > 1 else [values]):
                found[microbatch] = float(value[0])
                self._check_loss(found[microbatch], last_stage, microbatch)
        return found

    def _backward(self, step):
        stage = self.stages[step.chunk]
        dy, lease = self._receive_gradient(step)
        saved, kept_lease = self.kept.pop((step.stage, step.microbatch))
        start = self.clock.now()
        if self.recompute:
            saved = self._again(step, saved)
        dx = stage.backward(dy, saved)
        self.clock.add(step, start, self.job.training)
        self._send_gradient(step, dx, (*lease, *kept_lease))
        self._drop((*lease, *kept_lease))

    def _input_gradient(self, step):
        stage = self.stages[step.chunk]
        dy, lease = self._receive_gradient(step)
        saved, kept_lease = self.kept.pop((step.stage, step.microbatch))
        start = self.clock.now()
        if self.recompute:
            saved = self._again(step, saved)
        dx, pending = stage.backward_input(dy, saved)
        self.clock.add(step, start, self.job.training)
        leases = (*lease, *kept_lease)
        self._send_gradient(step, dx, leases)
        self.pending[step.stage, step.microbatch] = pending, leases

    def _weight_gradient(self, step):
        pending, leases = self.pending.pop((step.stage, step.microbatch))
        start = self.clock.now()
        self.stages[step.chunk].backward_weight(pending)
        self.clock.add(step, start, self.job.training)
        self._drop(leases)

    def _again(self, step, x):
        position = self.positions[step.chunk]
        if position is not None:
            position.microbatch = step.microbatch
        return self.stages[step.chunk].forward(x)[1]

    def _drop(self, leases):
        self.mailbox.release(leases)
        self.alive -= 1

    def _receive_activation(self, step):
        envelope, job = step.receive, self.job
        if job.known:
            leaves, lease = self.mailbox.take()
            wire = job.wires[envelope.edge, envelope.microbatch]
        else:
            wire = MessageSpec.decode(self.mailbox.take_header(envelope))
            job.wires[envelope.edge, envelope.microbatch] = wire
            leaves, lease = self.mailbox.take_unknown(envelope, wire.leaves)
        return unflatten(leaves, wire.structure), lease

    def _receive_gradient(self, step):
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

    def _send_activation(self, step, y, op, edge):
        """Send an output to the next stage, or keep it for it where that is on this rank."""
        envelope = step.send
        if envelope is None:
            self.local[edge, step.microbatch, op] = y
            return
        key = envelope.edge, envelope.microbatch
        if not self.job.known:
            self.job.wires[key] = wire = MessageSpec.of(y)
            self.mailbox.put_header(envelope, wire.encode())
        elif not self.job.wires[key].matches(y):
            raise ArgumentError(
                "a stage's output depends on more than the shapes of the pipeline's inputs",
                found=MessageSpec.of(y),
                expected=f"{self.job.wires[key]}, as for the same input shapes before",
                remedy="pad the output to a shape that follows from the input shapes",
            )
        self.mailbox.put(envelope, [y] if arrays.is_array(y) else flatten(y)[0])

    def _send_gradient(self, step, dx, leases):
        if leases:
            dx = _copy_if_aliased(dx, leases)
        envelope = step.send
        if envelope is not None:
            wire = self.job.wires[envelope.edge, envelope.microbatch]
            self.mailbox.put(envelope, wire.gradient_leaves(dx))
        elif step.first:
            self.outcome.input_grads[step.microbatch] = _unscaled(dx, self.job.scale)
        else:
            self.local[step.stage, step.microbatch, "B"] = dx

    def _start_sum(self, step):
        gradients = getattr(self.stages[step.chunk], "gradients", None)
        if gradients is None:
            return
        start = perf_counter()
        self.sums.append(AllReduce(self.replicas, gradients.flat))
        if self.clock.recorder is not None:
            self.clock.recorder.add(f"all-reduce {step.stage}", start, perf_counter())

    def poll(self):
        """Let messages and sums advance; stages call this between layers."""
        self.mailbox.poll()
        if self.sums:
            self.sums[0].progress()


def _takes_factor(loss) -> bool:
    """Whether a loss has a parameter `factor`, by which it multiplies the gradient before rounding."""
    try:
        return "factor" in signature(loss).parameters
    except (TypeError, ValueError):  # no function, or one without a signature
        return False


def _weighted(gradient, weight, output):
    """The loss gradient times the micro-batch's share of the batch."""
    leaves, structure = flatten(gradient)
    outputs, expected = flatten(output)
    if structure != expected:
        raise ArgumentError(
            "the gradient of the loss has another structure than the output", found=structure, expected=expected
        )
    scaled: list = []
    for leaf, like in zip(leaves, outputs):
        if not arrays.is_floating(like.dtype):
            scaled.append(None)  # an integer output has no gradient
            continue
        if not _alike(leaf, like):
            raise ArgumentError(
                "the gradient of the loss does not match the output",
                found="{}{} on {}".format(*_facts(leaf)) if arrays.is_array(leaf) else type(leaf).__name__,
                expected="{}{} on {}".format(*_facts(like)),
            )
        scaled.append(leaf if weight == 1 else kernels.of_array(leaf).scale(leaf, weight))
    return unflatten(scaled, structure)


def _alike(leaf, like) -> bool:
    """Whether both are arrays of one shape and dtype on one kind of device; refuses a masked array."""
    if type(leaf) is not type(like):
        arrays.refuse_mask(leaf)
        if not arrays.is_array(leaf) or arrays.is_device(leaf) != arrays.is_device(like):
            return False
    return leaf.shape == like.shape and leaf.dtype == like.dtype


def _facts(array):
    return array.dtype.name, list(array.shape), arrays.device_of(array)


def _unscaled(tree, scale):
    """Input gradients without the factor that all gradients of the step carry."""
    if tree is None or scale == 1:
        return tree
    leaves, structure = flatten(tree)
    return unflatten([None if x is None else kernels.of_array(x).scale(x, 1 / scale) for x in leaves], structure)


def _copy_if_aliased(tree, leases):
    """`tree` with a copy of each leaf that shares memory with a received array, which is about to be used again."""
    if tree is None:
        return None
    buffers = [array for _, array in leases]
    if arrays.is_array(tree):
        return arrays.copy(tree) if _shares(tree, buffers) else tree
    leaves, structure = flatten(tree)
    if not any(_shares(leaf, buffers) for leaf in leaves):
        return tree
    return unflatten([arrays.copy(leaf) if _shares(leaf, buffers) else leaf for leaf in leaves], structure)


def _shares(leaf, buffers):
    if leaf is None:
        return False
    if isinstance(leaf, np.ndarray) and leaf.base is None:  # owns its memory, as no received array on the host does
        return False
    return any(arrays.shares_memory(leaf, buffer) for buffer in buffers)
