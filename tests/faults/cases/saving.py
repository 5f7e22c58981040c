"""Trainings that save at every step are broken: they end as they should, and their last checkpoint can be loaded."""

from __future__ import annotations

import signal

from faults.blocks import PLAIN, RUN, on
from faults.saving_blocks import dies_in_forward, dies_outside, raises, refused, saving, signalled

FAULTS = (
    raises("a forward", "nn.Stage", "forward", "micro-batch", modes=(RUN, PLAIN)),
    raises("an optimizer", "optim.AdamW", "step", quick=(2, RUN)),
    *dies_in_forward(signal.SIGKILL),
    *dies_outside(signal.SIGKILL),
    *dies_outside(signal.SIGKILL, ", without the runner", modes=(PLAIN,)),
    signalled(signal.SIGTERM, 1, "SIGTERM of rank 1 from outside"),
    signalled(signal.SIGINT, "group", "Ctrl-C under MPICH", mpi="mpich", code=130, reports=1),
    signalled(signal.SIGINT, "group", "Ctrl-C under Open MPI", mpi="openmpi"),
    saving(
        "a rank that comes to its limit of memory (ulimit -v)",
        on(
            "last",
            """
def limit():
    held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + (1 << 26), held + (1 << 26)))
    np.ones(1 << 27)
during(nn.Stage, "forward", limit)
""",
        ),
        "MemoryError",
        "micro-batch",
    ),
    refused("another schedule on one rank", "keys.update(schedule='gpipe')", "MismatchError: rank {last}", "schedule"),
    saving(
        "a disk that is full at a checkpoint",
        on("last", "during(Trainer, 'step', lambda: no_room(1000))"),
        "the checkpoint cannot be written",
        "step-0000000",
        code=(0, 1, 2),
        reports=None,
        quick=(2, RUN),
    ),
    saving(
        "a disk that is full for metrics",
        "keys.update(steps=9)\n"
        + on(
            "0",
            """
def full():
    links = {int(name): os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")}
    for descriptor, path in links.items():
        if path.endswith("metrics.jsonl"):
            os.dup2(os.open("/dev/full", os.O_WRONLY), descriptor)
during(Trainer, "step", full)
""",
        ),
        "metrics.jsonl cannot be written: No space left on device; the training goes on",
        code=0,
        reports=0,
        never=(),
        by_all=("finished",),
    ),
)
