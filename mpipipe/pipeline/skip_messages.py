"""Data on skips: what an action takes and gives over them, besides what it exchanges with the next stages."""

from __future__ import annotations

from mpipipe.arrays import Tree
from mpipipe.arrays.trees import read_only
from mpipipe.comm.mailbox import Lease
from mpipipe.pipeline.aliases import copy_if_aliased
from mpipipe.pipeline.branches import Branches
from mpipipe.pipeline.call_state import CallState
from mpipipe.pipeline.messages import StageMessages
from mpipipe.pipeline.plan import PlannedAction


class SkipMessages:
    """Takes and gives trees over skips, by messages to other ranks or within this rank.

    Parameters
    ----------
    messages : activations and gradients from and to other ranks
    """

    def __init__(self, messages: StageMessages) -> None:
        self.messages = messages

    def join(self, step: PlannedAction, state: CallState, main: Tree, lease: Lease) -> tuple[Branches, Lease]:
        """Return what came from the next stage together with what comes over skips, and the lease of all of it."""
        way = "F" if step.op == "F" else "B"
        receive = self.messages.receive_activation if way == "F" else self.messages.receive_gradient
        skips: dict[str, Tree] = {}
        for port in step.takes:
            if port.message is None:
                skips[port.name] = state.local.pop((port.edge, step.microbatch, way))
            else:
                skips[port.name], more = receive(port.message)
                lease = (*lease, *more)
        return Branches(main, **skips), lease

    def give(self, step: PlannedAction, state: CallState, skips: dict[str, Tree], lease: Lease) -> None:
        """Hand on what an action gives over skips, after what it has sent to the next stage.

        Both ends keep this order of the messages of one action. `lease` is that of the arrays which the action took.
        """
        way = "F" if step.op == "F" else "B"
        send = self.messages.send_activation if way == "F" else self.messages.send_gradient
        for port in step.gives:
            if port.wanted:
                tree = copy_if_aliased(skips[port.name], lease) if lease else skips[port.name]
                if port.message is None:
                    state.local[port.edge, step.microbatch, way] = read_only(tree)
                else:
                    send(port.message, tree)
