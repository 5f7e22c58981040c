"""Pipeline parallelism and ring attention over MPI, on plain arrays: numpy on CPUs.

`import mpipipe` needs neither MPI nor a GPU; MPI is initialised when the first communicator is asked for.
"""

from mpipipe.comm import Mesh
from mpipipe.pipeline import Pipeline, StepResult

__version__ = "0.1.0"
__all__ = ["Mesh", "Pipeline", "StepResult"]
