"""Pipeline parallelism and ring attention over MPI, on plain arrays: numpy on CPUs, CuPy on GPUs.

`import mpipipe` needs neither MPI nor a GPU; MPI is initialised when the first communicator is
asked for. Names and rooms are imported when they are first used, so that a command which computes
nothing starts at once.
"""

from __future__ import annotations

from importlib import import_module

from mpipipe.faces import lazy_face

TYPE_CHECKING = False
if TYPE_CHECKING:
    from mpipipe import (
        adapters,
        attention,
        checkpoint,
        errors,
        exchange,
        language,
        nn,
        optim,
        planning,
        schedules,
        tracing,
        train,
    )
    from mpipipe.attention import Ring
    from mpipipe.comm import Mesh, select_device
    from mpipipe.job import Preemption, world
    from mpipipe.pipeline import Branches, LossFunction, Pipeline, StepResult
    from mpipipe.planning import cut
    from mpipipe.stages import StageLike

__version__ = "0.1.0rc1"  # the one place: pyproject.toml reads it from here
__all__ = [
    "Branches",
    "LossFunction",
    "Mesh",
    "Pipeline",
    "Preemption",
    "Ring",
    "StageLike",
    "StepResult",
    "__version__",
    "adapters",
    "attention",
    "checkpoint",
    "cut",
    "errors",
    "exchange",
    "language",
    "nn",
    "optim",
    "planning",
    "schedules",
    "select_device",
    "tracing",
    "train",
    "world",
]
__dir__ = __all__.copy
if not TYPE_CHECKING:  # a checker of types would take each wrong name for an object
    _names, _named = lazy_face(__name__, __file__)

    def __getattr__(name: str) -> object:
        """Import a name of `__all__`, or a room such as `mpipipe.optim`."""
        if name in _names:
            # For each name: threads that ask at once wait for one import.
            import_module(f"{__name__}.pipeline")
            value = _named(name)
            globals()[name] = value
            return value
        if name in __all__:
            return import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
