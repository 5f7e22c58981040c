"""Functions that do the work of another one in a better way, and classes that redefine that other one."""

from __future__ import annotations

from collections.abc import Mapping


def keep_redefined(cls: type, base: type, passed: Mapping[str, tuple[str, ...]]) -> None:
    """Give a new class the functions of `base` again where inherited ones would go past what the class redefines.

    Parameters
    ----------
    cls : type
        A subclass of `base`; called by `__init_subclass__`.
    base : type
        Its functions call the ones that subclasses redefine.
    passed : mapping of str to tuple of str
        Name of a function to the names of those that may do without it.
    """
    for name, others in passed.items():
        for other in others:
            if _place(cls, name) < _place(cls, other):
                setattr(cls, other, getattr(base, other))


def _place(cls: type, name: str) -> int:
    """Return how far from a class the class is that defines a name."""
    return next(place for place, each in enumerate(cls.__mro__) if name in vars(each))
