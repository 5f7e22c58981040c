"""What travels between stages: the arrays of a message, and the messages of one rank, as trees.

The shapes of all messages follow from the shapes of the inputs. The first call with new input
shapes sends a header before each activation; the specs of its messages are kept, so that later
calls with the same shapes send no headers and post their receives before the data is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TypeAlias

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array, Branches, Tree, flatten, read_only, unflatten
from mpipipe.comm import BACKWARD, Envelope, Incoming, Leaf, Lease, Mailbox
from mpipipe.errors import ArgumentError, StageError
from mpipipe.nn import sum_of
from mpipipe.pipeline.plan import ActionPlan, PlannedAction, Port
from mpipipe.pipeline.units import MessageSpec

# (edge, unit, whether it is an activation) -> data that stays on the rank.
Local: TypeAlias = "dict[tuple[int, int, bool], Tree]"
KNOWN_SHAPES = 32  # input shapes whose specs and receive buffers are kept


@dataclass(eq=False)
class KnownShapes:
    """What calls with inputs of the same shapes have in common on a rank."""

    # By (edge, unit).
    specs: dict[tuple[int, int], MessageSpec] = field(default_factory=dict)
    # What `Mailbox.begin_call` takes, by plan.
    receives: dict[ActionPlan, tuple[list[Incoming], int]] = field(default_factory=dict)
    # The bound actions of each plan, for the executor.
    programs: dict[ActionPlan, list] = field(default_factory=dict)


@dataclass(eq=False)
class StageMessages:
    """Activations and gradients of one rank, sent and received as trees.

    A received tree comes with a lease on its buffers, which goes back through `mailbox.release`
    once nothing reads the tree.
    """

    mailbox: Mailbox
    known: bool = False  # whether this call's specs were kept by an earlier one
    # Of this call, and of earlier ones by signature of the inputs.
    shapes: KnownShapes = field(default_factory=KnownShapes)
    kept: dict[int, KnownShapes] = field(default_factory=dict)
    plan: ActionPlan | None = None  # the plan of the last call

    def begin(self, plan: ActionPlan, signature: int) -> None:
        """Begin a call whose inputs have this signature; every rank of the pipeline does so."""
        self.plan = plan
        self.known = signature in self.kept
        if not self.known:
            # Every rank drops them at the same call.
            if len(self.kept) == KNOWN_SHAPES:
                self.kept.clear()
                self.mailbox.slots.clear()
            self.shapes = KnownShapes()
            self.mailbox.begin_call([], 0)
            return
        self.shapes = self.kept[signature]
        receives = self.shapes.receives
        if plan not in receives:
            leaves = [*map(self._leaves, plan.receives)]
            window = plan.window * max(map(len, leaves), default=0)
            receives[plan] = self.mailbox.receive_schedule(plan.receives, leaves), window
        self.mailbox.begin_call(*receives[plan])

    def end(self, signature: int) -> None:
        """Wait until everything sent has left, and keep the specs."""
        self.mailbox.flush()
        self.kept[signature] = self.shapes

    def spec_of(self, envelope: Envelope) -> MessageSpec:
        """Return the spec of the activation of a message's edge and unit."""
        return self.shapes.specs[envelope.edge, envelope.unit]

    def _leaves(self, envelope: Envelope) -> Sequence[Leaf]:
        spec = self.spec_of(envelope)
        if envelope.direction == BACKWARD:
            return spec.gradients
        return spec.leaves

    @property
    def bytes_per_edge(self) -> dict[tuple[int | str, str], int]:
        """Bytes that the last call sent, by (edge or name of a skip, direction).

        After a failure they are those of a whole call.
        """
        totals: dict[tuple[int | str, str], int] = {}
        if self.plan is not None and self.kept:
            for envelope in self.plan.sends:
                key = envelope.skip or envelope.edge, ("forward", "backward")[envelope.direction]
                leaves = self._leaves(envelope)
                nbytes = sum(prod(shape) * kind.itemsize for shape, kind in leaves)
                totals[key] = totals.get(key, 0) + nbytes
        return totals

    def receive(self, envelope: Envelope) -> tuple[Tree, Lease]:
        """Return an activation, or the gradient of one, and its lease."""
        mailbox = self.mailbox
        is_gradient = envelope.direction == BACKWARD
        if not self.known and not is_gradient:
            spec = MessageSpec.decode(mailbox.take_header(envelope))
            self.shapes.specs[envelope.edge, envelope.unit] = spec
        leaves = self._leaves(envelope)
        if self.known:
            lease: Lease = [mailbox.take() for _ in leaves]
        else:
            lease = mailbox.take_unknown(envelope, leaves)
        spec = self.spec_of(envelope)
        if is_gradient:
            return spec.gradient_tree(_views(lease)), lease
        return unflatten(_views(lease), spec.structure), lease

    def send(self, envelope: Envelope, tree: Tree) -> None:
        """Start sending an activation, or the gradient of one that was received.

        Raises ArgumentError if shapes differ from calls with the same inputs.
        """
        if envelope.direction == BACKWARD:
            leaves = self.spec_of(envelope).gradient_leaves(tree)
        else:
            if not self.known or not self.spec_of(envelope).matches(tree):
                tree = arrays.in_c_order(tree)
            if not self.known:
                spec = MessageSpec.of(tree)
                self.shapes.specs[envelope.edge, envelope.unit] = spec
                self.mailbox.put_header(envelope, spec.encode())
            elif not self.spec_of(envelope).matches(tree):
                raise ArgumentError(
                    "a stage's output depends on more than the shapes of the pipeline's inputs",
                    found=MessageSpec.of(tree),
                    expected=f"{self.spec_of(envelope)}, as for the same input shapes before",
                    remedy="pad the output to a shape that follows from the input shapes",
                )
            leaves = flatten(tree)[0]
        self.mailbox.put(envelope, leaves)

    # -- what comes to an action and leaves it, along the chain of stages and over skips -----------

    def take(self, action: PlannedAction, local: Local) -> tuple[Tree | Branches, Lease]:
        """Return what comes to an action, in Branches if some comes over skips, and its lease."""
        trees: dict[str, Tree] = {}
        lease: Lease = ()
        for name, edge, message, _ in action.takes:
            if message is None:
                tree = local.pop((edge, action.unit, action.op == "F"))
            else:
                tree, more = self.receive(message)
                lease = (*lease, *more)
            # Several takers of one name each give a gradient.
            if name in trees:
                tree = sum_of(trees[name], tree)
            trees[name] = tree
        main = trees.pop("")
        if not trees:
            return main, lease
        return Branches(main, **trees), lease

    def give(
        self, action: PlannedAction, local: Local, main: Tree, skips: dict[str, Tree], lease: Lease
    ) -> None:
        """Hand on what an action gives: to the next stage, then over skips.

        Both ends know this order.

        `lease` is that of the arrays which the action took.
        """
        trees = {"": main, **skips}
        for name, edge, message, is_wanted in action.gives:
            if not is_wanted:
                continue
            tree = copy_if_aliased(trees[name], lease)
            if message is None:
                local[edge, action.unit, action.op == "F"] = read_only(tree)
            else:
                self.send(message, tree)


# -- Arrays that more than one owner reads ---------------------------------------------------------
#
# A stage may return what it has received, or a view of it. The mailbox uses the buffers of received
# arrays again, so such a result is copied before it is kept or sent. A stage must not write to what
# it has received: on the host it is handed read-only views.


def copy_if_aliased(tree: Tree, leases: Lease) -> Tree:
    """Return `tree`, with copies of the leaves that share memory with received arrays."""
    # An array that owns its memory shares none: a received array on the host does not own its.
    if type(tree) is np.ndarray and tree.base is None:
        return tree
    buffers = _views(leases)

    def owned(leaf: Array | None) -> Array | None:
        is_owner = isinstance(leaf, np.ndarray) and leaf.base is None
        if leaf is None or is_owner or not arrays.shares_any(leaf, buffers):
            return leaf
        return arrays.copy(leaf)

    return arrays.mapped(owned, tree)


def _views(lease: Lease) -> list[Array]:
    """Return the received arrays."""
    return [received.view for received in lease]


def remedy_of(error: Exception) -> str | None:
    """Return what helps if a stage or loss wrote to an array that it was handed; None otherwise."""
    if not isinstance(error, ValueError) or "read-only" not in str(error):
        return None
    return (
        "copy an array that you were handed (x, dy, targets) before you write to it: it "
        "belongs to others, too"
    )


def wrong_result(result: object) -> ArgumentError:
    """Return the error for a forward that returned something else than (output, saved)."""
    return ArgumentError(
        "the forward of a stage returns (output, saved)",
        found=type(result).__name__,
        expected="a tuple of two",
        remedy="return (y, None) where nothing is saved",
    )


# -- What a stage with skips returned, taken apart -------------------------------------------------


def parted(
    result: Tree | Branches, ports: Sequence[Port], what: str
) -> tuple[Tree, dict[str, Tree]]:
    """Take apart what a stage returned: the tree for the chain, and the tree for each skip by name.

    Raises StageError if one of these is missing, or one is there that the stage does not have.
    `what` is the action.
    """
    main = result
    trees: dict[str, Tree] = {}
    found = type(result).__name__
    if type(result) is Branches:
        main = result.main
        trees = result.skips
        found = f"Branches with {', '.join(trees) or 'no skips'}"
    wanted = {port.name for port in ports if port.wanted}
    if not wanted <= {*trees} <= {port.name for port in ports}:
        expected = "no skips"
        if wanted:
            expected = f"mpipipe.Branches with {', '.join(sorted(wanted))}"
        raise StageError(
            f"the {what} of a stage does not give what its skips want",
            found=found,
            expected=expected,
            remedy="return Branches(tree, name=tree) with a tree for each skip of "
            "schedules.with_skips, and no other",
        )
    return main, trees
