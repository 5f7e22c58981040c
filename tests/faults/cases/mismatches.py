"""Ranks that disagree, and arguments that are wrong: every rank raises the same, and one reports it."""

from faults.blocks import refused
from faults.fault import RUN


def _misuse(name, body, *says, **options):
    return refused(name, "misuse", body, *says, **{"ranks": (1, 2, 4), **options})


def _mismatch(name, body, *says, **options):
    return refused(name, "mismatch", body, *says, **options)


FAULTS = (
    _mismatch("micro-batches of rank 1", "if rank == 1: schedule = schedules.one_f_one_b(size, 5)\ntrain()",
        "MismatchError: rank 1", ranks=(2, 4), quick=(2, RUN)),
    _misuse("missing targets", "targets = None\ntrain()", "ArgumentError: rank {last}: targets are missing",
        quick=(2, RUN)),
    _misuse("a loss that is not a number", "if rank == last: targets[700] = np.nan\ntrain()",
        "NonFiniteError: rank {last}, stage {last}, micro-batch 1", code=(1, 2), quick=(2, RUN)),
    _mismatch("number of steps differs", "train(3 if rank == last else 4)", "MismatchError", "close", never=()),
    _mismatch("ranks step different pipelines",
        "a, b = build(), build()\n(a if rank == last else b).step(inputs, targets)", "MismatchError", code=(1, 2),
        ranks=(2, 4), quick=(2, RUN)),
)  # fmt: skip
