"""Small things that all ranks of a communicator must know: values, and each other's errors."""

from __future__ import annotations

from contextlib import contextmanager

from mpipipe.errors import ArgumentError, MpipipeError


def broadcast(comm, value, root: int = 0):
    """`value` of rank `root`, on every rank; any small picklable object."""
    return comm.bcast(value, root)


def agree(comm, error: Exception | None, value=None) -> list:
    """Every rank's `value`, in rank order, unless some rank has an error: then all ranks raise the first one.

    Collective. Errors from outside this package are raised as ArgumentError with the original as the text.
    """
    if error is not None and not isinstance(error, MpipipeError):
        error = ArgumentError(f"{type(error).__name__}: {error}")
    entries = comm.allgather((error, value))
    failed = [(rank, problem) for rank, (problem, _) in enumerate(entries) if problem is not None]
    if failed:
        raise_everywhere(comm.rank, failed)
    return [entry for _, entry in entries]


def raise_everywhere(rank: int, failed):
    """Raise the first of `failed` = [(rank, error), ...]; only the rank that found it will report it."""
    origin, problem = failed[0]
    if problem.rank is None:
        problem.rank = ", ".join(str(r) for r, other in failed if str(other) == str(problem))
    problem.echo = problem.echo or rank != origin
    raise problem


@contextmanager
def together(comm):
    """Run the block on every rank of `comm`; an error of any rank is raised on all of them at the block's end."""
    error = None
    try:
        yield
    except Exception as caught:
        error = caught
    agree(comm, error)
