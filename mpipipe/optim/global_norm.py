"""The norm of gradients over ranks that keep it on their GPUs: opened once, used in every step."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from types import TracebackType
from typing import Any

from mpipipe.comm.group import Group, group_of
from mpipipe.comm.nccl.choice import choose
from mpipipe.comm.nccl.row import NcclRow
from mpipipe.comm.types import Communicator
from mpipipe.errors import ArgumentError
from mpipipe.optim.norm import Culprit, counted_pieces
from mpipipe.optim.on_device import Squares, gpu_of, owners_of, squares_of_one

WHAT = "the norm of the gradients"


class GlobalNorm:
    """Over which stages and ranks a norm is taken, for `clip_by_global_norm` and `scaled_step`.

    Where each rank has a GPU of its own and NCCL is used, the ranks put the norm together on their GPUs: the host asks
    for the update before it knows the norm. Everywhere else MPI gathers it, as without this object. Norm and update
    have the same bits either way.

    The constructor and `close` are collective. A context manager; after an error nothing collective is done.

    Parameters
    ----------
    stages : sequence of stages
        The stages of this rank, those of the optimizer. Where they belong to a pipeline, it must have been built.
    comm : communicator, optional
        Over which the stages of the model are spread. None: all of them are here.
    skip : collection of str
        Names of parameters that do not count.
    replicas : communicator, optional
        The ranks with the same stages, as for `Pipeline`. They are asked as well whether NCCL can be used.

    Raises
    ------
    BackendError
        On all ranks, where `MPIPIPE_NCCL=on` and NCCL cannot be used.

    Examples
    --------
    >>> from mpipipe import nn, optim
    >>> from mpipipe.comm import inprocess
    >>> def on_each_rank(comm):
    ...     stage = nn.Stage([nn.RMSNorm(2)], first=comm.rank)
    ...     stage.gradients[f"{comm.rank}.gain"][...] = 3 + comm.rank
    ...     optimizer, scaler = optim.SGD([stage], lr=0.5), optim.LossScaler(1.0)
    ...     with optim.GlobalNorm([stage], comm) as over:
    ...         return optim.scaled_step(optimizer, scaler, max_norm=1.0, over=over)
    >>> [round(norm, 4) for norm in inprocess.run(2, on_each_rank)]
    [7.0711, 7.0711]
    """

    def __init__(
        self,
        stages: Sequence[Any],
        comm: Communicator | None = None,
        skip: Collection[str] = (),
        replicas: Communicator | None = None,
    ):
        self.stages, self.comm, self.skip = tuple(stages), comm, frozenset(skip)
        self._row: NcclRow | None = None
        self._owners: list[Culprit] = []
        self._start = self._stop = 0
        self._group = None if comm is None or comm.size == 1 else group_of(comm)
        if self._group is not None:
            others = [] if replicas is None or replicas.size == 1 else [group_of(replicas)]
            if choose([self._group, *others], "cpu" if gpu_of(self.stages) is None else "cuda").sums:
                self._open(self._group)

    def _open(self, group: Group) -> None:
        mine = owners_of(counted_pieces(self.stages, self.skip), group.rank)
        everyone = group.gather(WHAT, mine)
        self._owners = [owner for some in everyone for owner in some]
        self._start = sum(map(len, everyone[: group.rank]))
        self._stop = self._start + len(mine)
        if self._owners:
            self._row = NcclRow(group, len(self._owners), WHAT)

    @property
    def on_device(self) -> bool:
        """Whether the norm stays on the device; the same on all ranks."""
        return self._row is not None or squares_of_one(self.stages, self.comm, self.skip) is not None

    def _squares(self, stages: Sequence[Any]) -> Squares | None:
        """The squares of these stages and those of other ranks, on the device; None if MPI is to gather them.

        Raises ArgumentError if the stages are not those of the constructor, or count other parameters than then.
        The other ranks are told, since they will wait for this one.
        """
        if self._group is None:
            return self._checked(stages)
        self._group.begin()
        with self._group.failing(WHAT):
            return self._checked(stages)

    def _checked(self, stages: Sequence[Any]) -> Squares | None:
        if list(map(id, stages)) != list(map(id, self.stages)):
            raise ArgumentError(
                "the stages of an optimizer are not those of the norm",
                found=f"{len(stages)} stages",
                expected=f"the same {len(self.stages)} that the GlobalNorm was made with, in their order",
            )
        if self._row is None:
            return squares_of_one(stages, self.comm, self.skip)
        counted = counted_pieces(stages, self.skip)
        if owners_of(counted, self._row.group.rank) != self._owners[self._start : self._stop]:
            raise ArgumentError(
                "the parameters that count in a norm have changed",
                found=f"{sum(len(names) for _, names, _ in counted)} on this rank",
                expected=f"the {self._stop - self._start} that there were when the GlobalNorm was made",
                remedy="make it once the pipeline has been built",
            )
        return Squares(counted, self._owners, self._start, self._row)

    def close(self) -> None:
        """Free what NCCL has opened; collective, may be called twice."""
        row, self._row = self._row, None
        if row is not None:
            row.close()

    def __enter__(self) -> GlobalNorm:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()


def resolved(
    stages: Sequence[Any], comm: Communicator | None, skip: Collection[str], over: GlobalNorm | None
) -> tuple[Communicator | None, Collection[str], Squares | None]:
    """Return (comm, skip) of a norm, and the squares on the device; None if MPI, or this rank, is to gather them."""
    if over is None:
        return comm, skip, squares_of_one(stages, comm, skip)
    if comm is not None or skip:
        raise ArgumentError(
            "a GlobalNorm has its own communicator and names to skip",
            found="over with " + " and ".join(["comm"] * (comm is not None) + ["skip"] * bool(skip)),
            expected="over alone",
        )
    return over.comm, over.skip, over._squares(stages)
