"""Signals: a rank dies of one, sleeps through one, or the launcher gets it."""

import signal

from faults.blocks import failing, good, on
from faults.fault import NONZERO, PLAIN, RUN, Send

KILL_ITSELF = "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ntrain(100000)"
INTERRUPTED = 130
MANY = 10**6  # steps: until a signal ends them


def _in_forward(name):
    body = on("last", f"breaks('forward', lambda: os.kill(os.getpid(), signal.{name}))") + "train()"
    return failing(f"{name} in a forward", "signal", body, code=NONZERO, reports=None, ranks=(1, 2, 4))


def _from_outside(name, to, suffix="", **options):
    target = to if isinstance(to, str) else f"rank {to}"
    sends = (Send(getattr(signal, name), to),)
    options = {"code": NONZERO, "reports": None, **options}
    return failing(f"{name} to the {target}{suffix}", "signal", f"train({MANY})", sends=sends, **options)


def _interrupted(to):
    """Ctrl-C: MPICH hands it on to the ranks, Open MPI ends them without a word and returns 1."""
    return (
        _from_outside("SIGINT", to, " of MPICH", mpi="mpich", code=INTERRUPTED, reports=1),
        _from_outside("SIGINT", to, " of Open MPI", mpi="openmpi"),
    )


FAULTS = (
    failing("a killed rank", "signal", KILL_ITSELF, code=NONZERO, reports=None, ranks=(2, 4), limit=15,
        quick=(2, PLAIN)),
    *(_in_forward(name) for name in ("SIGKILL", "SIGTERM", "SIGSEGV")),
    failing("SIGINT of one rank before training", "signal",
        "if rank == 1: os.kill(os.getpid(), signal.SIGINT); time.sleep(1)\ntrain()", "KeyboardInterrupt", code=NONZERO,
        ranks=(2, 4), quick=(2, RUN)),
    _from_outside("SIGKILL", 1),
    _from_outside("SIGTERM", 0),
    _from_outside("SIGINT", 1),
    *_interrupted("launcher"),
    *_interrupted("group"),
    _from_outside("SIGTERM", "launcher", quick=(2, RUN)),
    _from_outside("SIGTERM", "group"),
    good("a rank that sleeps for 3 s of SIGSTOP", "train(10, between=lambda: time.sleep(1))", kind="signal",
        sends=(Send(signal.SIGSTOP, 1), Send(signal.SIGCONT, 1, after=3.0)), by_all=("finished",)),
    good("SIGUSR1 that the user handles",
        "signal.signal(signal.SIGUSR1, lambda *a: None)\ntrain(between=lambda: os.kill(os.getpid(), signal.SIGUSR1))",
        kind="signal", modes=(RUN, PLAIN)),
)  # fmt: skip
