"""What travels between stages: the arrays of a message, and the messages of one rank, as trees.

The shapes of all messages follow from the shapes of the inputs. The first call with new input
shapes sends a header before each activation; the specs of its messages are kept, so that later
calls with the same shapes send no headers and post their receives before the data is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
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

# (edge, micro-batch, "F" or "B") -> data that stays on the rank.
Local: TypeAlias = "dict[tuple[int, int, str], Tree]"
KNOWN_SHAPES = 32  # input shapes whose specs and receive buffers are kept


class StageMessages:
    """Activations and gradients of one rank, sent and received as trees.

    A received tree comes with a lease on its buffers, which goes back through `mailbox.release`
    once nothing reads the tree.
    """

    def __init__(self, mailbox: Mailbox):
        self.mailbox = mailbox
        self.known = False  # whether this call's specs were kept by an earlier one
        # Specs of this call, by (edge, unit), and of earlier ones, by signature of the inputs.
        self.specs: dict[tuple[int, int], MessageSpec] = {}
        self.kept: dict[int, dict[tuple[int, int], MessageSpec]] = {}
        self.drops = 0  # how often all of them were dropped
        # By (signature, id of the plan), with the window.
        self.receive_schedules: dict[tuple[int, int], tuple[list[Incoming], int]] = {}
        # The plan of the last call, and the signature of its inputs.
        self.plan: ActionPlan | None = None
        self.signature = 0

    def begin(self, plan: ActionPlan, signature: int) -> None:
        """Begin a call whose inputs have this signature; every rank of the pipeline does so."""
        key = signature, id(plan)
        self.known = signature in self.kept
        # Every rank drops them at the same call.
        if not self.known and len(self.kept) == KNOWN_SHAPES:
            self.drops += 1
            self.kept.clear()
            self.receive_schedules.clear()
            self.mailbox.drop_buffers()
        self.plan = plan
        self.signature = signature
        self.specs = self.kept.get(signature, {})
        if self.known and key not in self.receive_schedules:
            leaves = []
            for message in plan.receives:
                leaves.append(self._leaves(self.specs[message.edge, message.unit], message))
            window = plan.window * max(map(len, leaves), default=0)
            self.receive_schedules[key] = (
                self.mailbox.receive_schedule(plan.receives, leaves),
                window,
            )
        if self.known:
            self.mailbox.begin_call(*self.receive_schedules[key])
        else:
            self.mailbox.begin_call([], 0)

    def end(self, signature: int) -> None:
        """Wait until everything sent has left, and keep the specs."""
        self.mailbox.flush()
        self.kept[signature] = self.specs

    @staticmethod
    def _leaves(spec: MessageSpec, envelope: Envelope) -> Sequence[tuple[arrays.Shape, np.dtype]]:
        if envelope.direction == BACKWARD:
            return spec.gradients
        return spec.leaves

    def bytes_of(self, envelope: Envelope) -> int | None:
        """Bytes of a message; None where its spec is not known."""
        spec = self.specs.get((envelope.edge, envelope.unit))
        if spec is None:
            return None
        return sum(prod(shape) * kind.itemsize for shape, kind in self._leaves(spec, envelope))

    @property
    def bytes_per_edge(self) -> dict[tuple[int | str, str], int]:
        """Bytes that the last call sent, by (edge or name of a skip, direction).

        After a failure they are those of a whole call.
        """
        totals: dict[tuple[int | str, str], int] = {}
        if self.plan is None:
            return totals
        for envelope in self.plan.sends:
            nbytes = self.bytes_of(envelope)
            if nbytes is not None:
                key = envelope.skip or envelope.edge, ("forward", "backward")[envelope.direction]
                totals[key] = totals.get(key, 0) + nbytes
        return totals

    def receive_activation(self, envelope: Envelope) -> tuple[Tree, Lease]:
        key = envelope.edge, envelope.unit
        if not self.known:
            self.specs[key] = MessageSpec.decode(self.mailbox.take_header(envelope))
        spec = self.specs[key]
        lease = self._take(envelope, spec.leaves)
        return unflatten(_views(lease), spec.structure), lease

    def receive_gradient(self, envelope: Envelope) -> tuple[Tree, Lease]:
        """Return the gradient of the activation of this edge and unit, and its lease."""
        spec = self.specs[envelope.edge, envelope.unit]
        lease = self._take(envelope, spec.gradients)
        return spec.gradient_tree(_views(lease)), lease

    def _take(self, envelope: Envelope, leaves: Sequence[Leaf]) -> Lease:
        mailbox = self.mailbox
        if not self.known:
            return mailbox.take_unknown(envelope, leaves)
        return [mailbox.take() for _ in leaves]

    def send_activation(self, envelope: Envelope, tree: Tree) -> None:
        """Start sending; ArgumentError if shapes differ from calls with the same inputs."""
        key = envelope.edge, envelope.unit
        if not self.known:
            tree = arrays.in_c_order(tree)
            self.specs[key] = spec = MessageSpec.of(tree)
            self.mailbox.put_header(envelope, spec.encode())
        else:
            spec = self.specs[key]
            if not spec.matches(tree) and not spec.matches(tree := arrays.in_c_order(tree)):
                raise ArgumentError(
                    "a stage's output depends on more than the shapes of the pipeline's inputs",
                    found=MessageSpec.of(tree),
                    expected=f"{spec}, as for the same input shapes before",
                    remedy="pad the output to a shape that follows from the input shapes",
                )
        self.mailbox.put(envelope, flatten(tree)[0])

    def send_gradient(self, envelope: Envelope, tree: Tree) -> None:
        """Start sending the gradient of an activation that was received."""
        spec = self.specs[envelope.edge, envelope.unit]
        if spec.structure is None and spec.gradients and spec.matches(tree):
            self.mailbox.put(envelope, [tree])
        else:
            self.mailbox.put(envelope, spec.gradient_leaves(tree))

    # -- what comes to an action and leaves it, along the chain of stages and over skips -----------

    def take(self, action: PlannedAction, local: Local) -> tuple[Tree | Branches, Lease]:
        """Return what comes to an action, in Branches if some comes over skips, and its lease."""
        receive = self.receive_activation
        edge = action.stage
        way = "F"
        if action.op != "F":
            receive = self.receive_gradient
            edge += 1
            way = "B"
        lease: Lease = ()
        if action.receive is None:
            main = local.pop((edge, action.unit, way))
        else:
            main, lease = receive(action.receive)
        if not action.takes:
            return main, lease
        skips: dict[str, Tree] = {}
        for port in action.takes:
            if port.message is None:
                tree = local.pop((port.edge, action.unit, way))
            else:
                tree, more = receive(port.message)
                lease = (*lease, *more)
            # Several takers of one name each give a gradient.
            if port.name in skips:
                tree = sum_of(skips[port.name], tree)
            skips[port.name] = tree
        return Branches(main, **skips), lease

    def give(
        self, action: PlannedAction, local: Local, main: Tree, skips: dict[str, Tree], lease: Lease
    ) -> None:
        """Hand on what an action gives: to the next stage, then over skips.

        Both ends know this order.

        `lease` is that of the arrays which the action took.
        """
        send = self.send_gradient
        edge = action.stage
        way = "B"
        if action.op == "F":
            send = self.send_activation
            edge += 1
            way = "F"
        if action.send is None:
            local[edge, action.unit, way] = read_only(main)
        else:
            send(action.send, main)
        for port in action.gives:
            if port.wanted:
                tree = skips[port.name]
                if lease:
                    tree = copy_if_aliased(tree, lease)
                if port.message is None:
                    local[port.edge, action.unit, way] = read_only(tree)
                else:
                    send(port.message, tree)


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
    if tree is None:
        return None
    buffers = _views(leases)
    leaves, structure = flatten(tree)
    owned = []
    for leaf in leaves:
        owns_memory = isinstance(leaf, np.ndarray) and leaf.base is None
        if leaf is not None and not owns_memory and arrays.shares_any(leaf, buffers):
            leaf = arrays.copy(leaf)
        owned.append(leaf)
    return unflatten(owned, structure)


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
    return main, {name: tree for name, tree in trees.items() if name in wanted}
