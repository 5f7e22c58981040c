"""The environment, the launcher and MPI itself are not as they should be."""

from faults.blocks import OPENING, failing, good
from faults.fault import NONZERO, PLAIN, RUN, Fault

NOT_INITIALISED = "import mpi4py\nmpi4py.rc.initialize = False\n"


def _state(name, body, *says, **options) -> Fault:
    return failing(name, "MPI state", body, *says, **{"code": NONZERO, "reports": None, **options})


FAULTS = (
    failing("MPIPIPE_TIMEOUT=abc", "settings", "train()", "MPIPIPE_TIMEOUT", env={"MPIPIPE_TIMEOUT": "abc"},
        code=NONZERO, ranks=(1, 2, 4), quick=(2, RUN)),
    Fault(
        "all ranks refuse, and can open no more files",
        "settings",
        OPENING
        + """
import resource
held = len(os.listdir("/proc/self/fd")) - 1
resource.setrlimit(resource.RLIMIT_NOFILE, (held, held))
raise errors.ArgumentError("wet paint")
""",
        modes=(RUN,),
        code=2,
        says=("ArgumentError: wet paint",),
        never=("Traceback",),
        quick=(2, RUN),
    ),
    failing("a lone process where PMI_SIZE promises four", "launcher", "train()", "LaunchError", "found: 1 rank",
        "PMI_SIZE", env={"PMI_SIZE": "4"}, ranks=(0,), modes=(PLAIN, RUN), code=NONZERO, reports=None,
        quick=(0, PLAIN)),
    good("no launcher", "train()", kind="launcher", ranks=(0,)),
    _state("MPI finalized before a pipeline", "from mpi4py import MPI\nMPI.Finalize()\ntrain()", "inalised",
        ranks=(1, 2)),
    _state("MPI finalized by one rank", "from mpi4py import MPI\nif rank == last: MPI.Finalize()\ntrain()",
        "rank {last}", ranks=(2,), plain_says=("StallError",), env={"MPIPIPE_TIMEOUT": "5"}),
    Fault("MPI finalized after training", "MPI state", OPENING + "from mpi4py import MPI\ntrain()\nMPI.Finalize()",
        code=0, ranks=(1, 2), reports=0, quiet=True),
    _state("an exception after MPI was finalized", "from mpi4py import MPI\ntrain()\nMPI.Finalize()\nfail()",
        "ValueError: wet paint", ranks=(1, 2), never=()),
    Fault("MPI is not initialised", "MPI state", NOT_INITIALISED + OPENING + "train()", modes=(PLAIN,), code=NONZERO,
        ranks=(0, 2), says=("initiali", "mpipipe.errors"), never=("finished",)),
    Fault("MPI initialised by the user", "MPI state",
        NOT_INITIALISED + "from mpi4py import MPI\nMPI.Init()\n" + OPENING + "train()\nMPI.Finalize()", modes=(PLAIN,),
        code=0, ranks=(1, 2), quiet=True),
)  # fmt: skip
