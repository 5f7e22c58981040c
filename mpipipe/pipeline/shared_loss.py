"""The losses of a call, on their way from the rank of the last stage to all ranks of its pipeline.

table    losses of this pipeline's micro-batches | sum of share x loss | sum of shares | replicas with weights |
                                                   these three are sums over all replicas
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpipipe.comm.allreduce import AllReduce
from mpipipe.comm.group import Group
from mpipipe.comm.requests import own


class SharedLoss:
    """Mean loss over all replicas, and losses of this pipeline's micro-batches, on every rank once `wait` returns.

    The constructor is collective. It waits on the ranks of the last stage alone, for each other; these have waited for
    each other's gradients already. The others are told by a broadcast, which a later call of the pipeline may overtake.

    Parameters
    ----------
    pipe : group of the ranks of the pipeline
    replicas : group of the ranks with the same stages, or None
    root : the rank of the last stage
    microbatches : how many losses there are
    losses, shares : of each micro-batch, on rank `root`; None, or empty, where there is no loss. What has no share has
        no loss either.
    gives : whether the shares are weights that the loss gave
    call : which call it is, for errors
    """

    def __init__(
        self,
        pipe: Group,
        replicas: Group | None,
        root: int,
        microbatches: int,
        losses: Sequence[float] | None,
        shares: Sequence[float],
        gives: bool,
        *,
        call: str,
    ) -> None:
        self.pipe, self.what = pipe, f"the loss of {call}"
        self.table = np.zeros(microbatches + 3)
        if losses is not None:
            self.table[:-3] = losses
            self.table[-3] = sum(share * loss for share, loss in zip(shares, losses) if share)
            if gives:
                self.table[-2:] = sum(shares), 1
        if replicas is not None and pipe.rank == root:
            replicas.wait(AllReduce(replicas.comm, self.table[-3:]), f"{self.what} of the replicas", everyone=True)
        self._request = own(pipe.comm.Ibcast(self.table, root)) if pipe.size > 1 else None

    def is_here(self) -> bool:
        """Whether the losses have arrived; never waits."""
        if self._request is not None and self._request.Test():
            self._request = None
        return self._request is None

    def wait(self) -> None:
        """Wait until they have."""
        if self._request is not None:
            self.pipe.wait(self._request, self.what, everyone=True)
            self._request = None

    @property
    def mean(self) -> float:
        """Mean loss over all replicas."""
        return float(self.table[-3] / self.total if self.givers else self.table[-3])

    @property
    def total(self) -> float:
        """Sum of the shares of all micro-batches of all replicas."""
        return float(self.table[-2])

    @property
    def givers(self) -> int:
        """How many replicas have a loss that gave weights."""
        return int(self.table[-1])

    @property
    def losses(self) -> list[float]:
        """Losses of the micro-batches of this pipeline."""
        return self.table[:-3].tolist()
