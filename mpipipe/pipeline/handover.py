"""What an action takes and gives: over the chain of stages and over skips, from and to other ranks or this one."""

from __future__ import annotations

from typing import Any

from mpipipe.arrays import Tree
from mpipipe.comm.mailbox import Envelope, Lease
from mpipipe.pipeline.aliases import copy_if_aliased
from mpipipe.pipeline.branches import Branches
from mpipipe.pipeline.call_state import CallState
from mpipipe.pipeline.messages import StageMessages
from mpipipe.pipeline.plan import PlannedAction


class Handover:
    """Trees on their way between two actions, on edges: see comm/tags.py for their numbers.

    Parameters
    ----------
    messages : activations and gradients from and to other ranks
    """

    def __init__(self, messages: StageMessages) -> None:
        self.messages = messages

    def take(self, step: PlannedAction, state: CallState) -> tuple[Any, Lease]:
        """Return (what an action works on, lease): a tree, or Branches where it takes over skips."""
        forward = step.op == "F"
        main, lease = self._take(step, state, step.stage if forward else step.stage + 1, step.receive)
        if not step.takes:
            return main, lease
        skips: dict[str, Tree] = {}
        for port in step.takes:
            skips[port.name], more = self._take(step, state, port.edge, port.message)
            lease = (*lease, *more)
        return Branches(main, **skips), lease

    def give(self, step: PlannedAction, state: CallState, main: Tree, skips: dict[str, Tree], lease: Lease) -> None:
        """Hand on what an action made of arrays with this lease, first over the chain: the order of its messages."""
        self._give(step, state, step.stage + 1 if step.op == "F" else step.stage, step.send, main, lease)
        for port in step.gives:
            if port.wanted:
                self._give(step, state, port.edge, port.message, skips[port.name], lease)

    def _take(self, step: PlannedAction, state: CallState, edge: int, message: Envelope | None) -> tuple[Tree, Lease]:
        if message is None:
            return state.local.pop((edge, step.microbatch, "F" if step.op == "F" else "B")), ()
        receive = self.messages.receive_activation if step.op == "F" else self.messages.receive_gradient
        return receive(message)

    def _give(
        self, step: PlannedAction, state: CallState, edge: int, message: Envelope | None, tree: Tree, lease: Lease
    ) -> None:
        if lease:
            tree = copy_if_aliased(tree, lease)
        if message is None:
            state.local[edge, step.microbatch, "F" if step.op == "F" else "B"] = tree
        elif step.op == "F":
            self.messages.send_activation(message, tree)
        else:
            self.messages.send_gradient(message, tree)
