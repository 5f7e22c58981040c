"""Pipeline parallelism and ring attention over MPI, on plain arrays: numpy on CPUs, CuPy on GPUs.

`import mpipipe` needs neither MPI nor a GPU; MPI is initialised when the first communicator is asked for.
"""

from mpipipe.comm import Mesh, Preemption, select_device
from mpipipe.pipeline import Branches, PendingStep, Pipeline, StepResult

__version__ = "0.1.0"  # the one place: pyproject.toml reads it from here
__all__ = ["Branches", "Mesh", "PendingStep", "Pipeline", "Preemption", "StepResult", "select_device"]
