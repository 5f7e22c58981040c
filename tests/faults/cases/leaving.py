"""A rank ends: with a code of its own, without a word, or before the others call what needs all of them."""

from faults.blocks import OPENING, failing, on
from faults.fault import NONZERO, PLAIN, RUN, Fault

# what the others do together -> its text
TOGETHER = {
    "make a pipeline": "build()",
    "make a mesh": "mpipipe.Mesh(comm, pipe=size)",
    "make their first ring": "ring()",
    "clip": "optim.clip_by_global_norm(stages, 1.0, comm)",
    "train": "train()",
}
QUICK = (("make a pipeline", "last"),)


def _never_joins(what, who, ranks, **options) -> tuple[Fault, ...]:
    body = on(who, "sys.exit(0)") + TOGETHER[what]
    leaver = who.replace("last", "{last}")
    known = failing(
        f"rank {who} exits with 0 before others {what}",
        "never joins",
        body,
        f"world rank {leaver}",
        "PeerError",
        ranks=ranks,
        modes=(RUN,),
        **options,
    )
    return (known, _unknown(known, body)) if what == "make a pipeline" else (known,)


def _unknown(fault, body) -> Fault:
    """The same without `run`: no rank is told of one that leaves before its first call; a limit ends the wait."""
    return failing(
        f"{fault.name}, with a limit",
        fault.kind,
        body,
        "StallError",
        "nothing came within 3 s",
        env={"MPIPIPE_TIMEOUT": "3"},
        ranks=fault.ranks,
        modes=(PLAIN,),
        reports=None,
    )


def _code(code, wanted) -> Fault:
    """Rank 0 exits with `code` while the others train."""
    body = on("0", f"sys.exit({code})") + "train()"
    return failing(f"rank 0 exits with {code}", "exit", body, code=wanted, ranks=(2, 4), modes=(RUN,))


def _agreed(code) -> Fault:
    return Fault(
        f"all ranks exit with {code}",
        "exit",
        OPENING + f"train()\nsys.exit({code})",
        code=code,
        plain_code=code,
        reports=0,
        ranks=(1, 2, 4),
        by_all=("finished",),
        never=("ended by",),
        quick=(2, RUN) if code == 75 else None,
    )


FAULTS = (
    *(
        fault
        for what in TOGETHER
        for who, ranks in (("0", (3,)), ("last", (2, 4)))
        for fault in _never_joins(what, who, ranks, quick=(2, RUN) if (what, who) in QUICK else None)
    ),
    failing("the last rank exits with 0 before others make a pipeline, watched", "never joins",
        on("last", "sys.exit(0)") + "build()", "no rank has made progress", "rank {last} does not answer: it has left",
        env={"MPIPIPE_WATCHDOG": "2"}, plain_code=124, ranks=(2, 4), modes=(PLAIN,), reports=None,
        quick=(2, PLAIN)),
    failing("rank 2 exits with 3", "exit", "if rank == 2: sys.exit(3)\ntrain()", "rank 2", code=3, ranks=(3, 4),
        modes=(RUN,), quick=(3, RUN)),
    _code(75, 75),
    _code(256, NONZERO),
    _code("'wet paint'", 1),
    _code("None", 1),
    *(_agreed(code) for code in (0, 1, 75)),
    Fault("ranks exit with codes of their own", "exit", OPENING + "train()\nsys.exit(3 + rank)", code=(3, 4, 5, 6),
        ranks=(2, 4), reports=None, says=("exited with code 3, unlike other ranks",), plain_says=()),
    failing("os._exit(0) before training", "vanishes", on("last", "os._exit(0)") + "train()", "rank {last}",
        code=NONZERO, reports=None, plain_says=(), plain_code="any", quick=(2, RUN)),
    Fault("MPI_Abort by the user", "vanishes", OPENING + on("last", "comm.Abort(7)") + "train()", code=7, plain_code=7,
        reports=None, modes=(RUN, PLAIN)),
)  # fmt: skip
