"""The errors of mpipipe: what was found and expected, where, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

__all__ = [
    "ArgumentError",
    "MismatchError",
    "MpipipeError",
    "NonFiniteError",
    "PeerError",
    "ScheduleError",
    "StageError",
]
__dir__ = __all__.copy


class MpipipeError(Exception):
    """Base of all errors raised here.

    Parameters
    ----------
    message : str
        What went wrong, in one sentence.
    rank : int or str, optional
        Where: the rank in the communicator that was handed in, or several as in "0-3, 7" or "all
        12".
    stage, microbatch, slice : int, optional
        Where: the logical stage, the micro-batch, and the slice of its sequences.
    found, expected : object, optional
        Both sides of a disagreement.
    remedy : str, optional
        What the reader can do.

    Attributes
    ----------
    reported_elsewhere : bool
        Whether another rank raises and reports this same error.
    agreed : frozenset of int
        World ranks that all raise this same error, in the same call.

    Examples
    --------
    >>> from mpipipe.errors import ArgumentError
    >>> print(ArgumentError("wrong shape", stage=2, found="(3,)", expected="(4,)", remedy="pad it"))
    stage 2: wrong shape
      found: (3,)
      expected: (4,)
      remedy: pad it
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | str | None = None,
        stage: int | None = None,
        microbatch: int | None = None,
        slice: int | None = None,
        found: object = None,
        expected: object = None,
        remedy: str | None = None,
    ):
        self.message = message
        self.rank = rank
        self.stage = stage
        self.microbatch = microbatch
        self.slice = slice
        self.found = found
        self.expected = expected
        self.remedy = remedy
        self.reported_elsewhere = False
        self.agreed: frozenset[int] = frozenset()
        super().__init__(message)

    def __reduce__(self) -> tuple[Callable[..., MpipipeError], tuple[()]]:
        # Errors travel between ranks.
        fields: dict[str, Any] = {name: _sendable(getattr(self, name)) for name in _FIELDS}
        return partial(type(self), self.message, **fields), ()

    def __str__(self) -> str:
        places = []
        if self.rank is not None:
            places.append(_named(str(self.rank)))
        names = (("stage", self.stage), ("micro-batch", self.microbatch), ("slice", self.slice))
        places += [f"{name} {number}" for name, number in names if number is not None]
        text = self.message
        if places:
            text = f"{', '.join(places)}: {text}"
        for name in ("found", "expected", "remedy"):
            detail = getattr(self, name)
            if detail is not None:
                text += f"\n  {name}: {detail}"
        return text


class ArgumentError(MpipipeError, ValueError):
    """An argument is wrong on this rank."""


class ConfigError(ArgumentError):
    """A configuration key or value is wrong."""


class DataError(ArgumentError):
    """Training data is unreadable, empty or too short."""


class StorageError(ArgumentError):
    """Files cannot be written: the disk is full, a folder is gone or may not be written to."""


class OwnerError(ArgumentError):
    """Another job owns the folder that this one would write to."""


class ScheduleError(ArgumentError):
    """A schedule is incomplete, not causal, or would deadlock; the text marks the cell."""


class MismatchError(ArgumentError):
    """Ranks disagree about what they are to do together.

    `fact` is the one in which they differ, if it is among those that the ranks of a call compare;
    else None.
    """

    fact: str | None = None


class StageError(MpipipeError, RuntimeError):
    """A stage raised while it computed; the original exception is the cause."""


class NonFiniteError(MpipipeError, FloatingPointError):
    """A loss or a gradient is NaN or infinite."""


class ReplicaError(MpipipeError, RuntimeError):
    """Ranks that must hold the same parameters or optimizer state have different values in them."""


class PeerError(MpipipeError, RuntimeError):
    """Another rank failed or left; its own report says why.

    `failure` is what this rank knows of it.
    """

    failure: Any = None


class StallError(MpipipeError, TimeoutError):
    """One wait of a rank was longer than MPIPIPE_TIMEOUT seconds."""


class HangError(MpipipeError, TimeoutError):
    """No rank has made progress for MPIPIPE_WATCHDOG seconds; processes end instead."""


class BackendError(MpipipeError, RuntimeError):
    """MPI, a device or a library that was asked for is not there."""


class LaunchError(BackendError):
    """The processes were not started as one MPI job."""


_FIELDS = ("rank", "stage", "microbatch", "slice", "found", "expected", "remedy")


def _named(ranks: str) -> str:
    if ranks.startswith("all "):
        return f"{ranks} ranks"
    return f"{'rank' if ranks.isdigit() else 'ranks'} {ranks}"


def _sendable(value: object) -> int | float | str | None:
    """Return a value as it can be sent to another rank."""
    if value is None or isinstance(value, (int, float, str)):
        return value
    return str(value)
