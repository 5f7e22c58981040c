"""A rank raises: in its stage, in its loss, or between the calls that the ranks make together."""

from faults.blocks import OPENING, failing, on
from faults.fault import NONZERO, PLAIN, RUN, Fault

BROKEN_BACKWARD = """
def broken(dy, saved):
    raise ValueError("wet paint")
if rank == 2:
    stages[0].backward = broken
train()
"""
AT_RANK_2 = "StageError: rank 2, stage 2, micro-batch 0: backward raised ValueError: wet paint"
IMPORT_FAILS = (
    """
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 1:
    import no_such_paint
"""
    + OPENING
    + "train()"
)

C_LOCALE = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
# place -> (what the rank that fails does, what all ranks do then, whether the report is a StageError)
PLACES = {
    "in a forward": ("breaks('forward', fail)", "train()", True),
    "in a weight gradient": (
        "breaks('backward_weight', fail)",
        "schedule = schedules.zero_bubble_h1(size, 4)\ntrain()",
        True,
    ),
    "between steps": ("between = fail", "train(between=between)", False),
    "between rings": ("between = fail", "ring()\nbetween()\nring()", False),
    "while others make a mesh": ("fail()", "mpipipe.Mesh(comm, pipe=size)", False),
    "while others make their first ring": ("fail()", "ring()", False),
}
WHO = {"0": (1, 3), "last": (2, 4)}


def _at(place, who, ranks) -> Fault:
    act, rest, in_stage = PLACES[place]
    text = "raised ValueError: wet paint" if in_stage else "ValueError: wet paint"
    body = "between = lambda: None\n" + on(who, act) + rest
    return failing(f"{place} on rank {who}", "exception", body, text, ranks=ranks)


def _raises(name, body, *says, **options) -> Fault:
    return failing(name, "exception", body, *says, **options)


def _kind(what, statement, *says, **options) -> Fault:
    body = f"def act():\n    {statement}\n" + on("last", "breaks('forward', act)") + "train()"
    return failing(f"{what} in a forward", "exception", body, *says, **{"ranks": (1, 2), **options})


FAULTS = (
    _raises("traceback of a backward", BROKEN_BACKWARD, AT_RANK_2, "in broken", ranks=(3, 4), modes=(RUN,),
        quick=(3, RUN)),
    Fault("a failure reaches the peers without the runner", "exception", OPENING + BROKEN_BACKWARD, ranks=(3, 4),
        modes=(PLAIN,), code=NONZERO, says=("PeerError", "wet paint"), quick=(3, PLAIN)),
    _raises("out of paint before training", "if rank == 1: raise RuntimeError('out of paint')\ntrain()",
        "RuntimeError: out of paint", ranks=(2, 4), quick=(2, RUN)),
    *(_at(place, who, ranks) for place in PLACES for who, ranks in WHO.items()),
    Fault(
        "in a ring, caught, and all make a mesh",
        "exception",
        OPENING
        + """
q = np.ones((1, 16, 2, 4))
rings = attention.Ring(comm)
if rank == size // 2:
    rings.poll = fail
try:
    rings.forward(q, q, q)
except (ValueError, errors.PeerError):
    pass
try:
    mpipipe.Mesh(comm)
except errors.PeerError:
    print("caught", flush=True)
""",
        code=0,
        by_all=("caught",),
        reports=0,
        ranks=(2, 3, 4),
        quick=(2, RUN),
    ),
    _raises("after the pipeline", "train()\n" + on("last", "fail()"), "ValueError: wet paint", ranks=(1, 2, 4),
        never=()),
    failing("in every rank", "exception", "fail()", "ValueError: wet paint", ranks=(1, 2, 4)),
    Fault("before mpipipe is imported", "exception", IMPORT_FAILS, modes=(RUN,), says=("no_such_paint",),
        never=("finished",)),
    _raises("foreign letters in the C locale", on("last", "fail('gr\\u00fcn')") + "train()", "ValueError: gr",
        env=C_LOCALE, quick=(2, RUN)),
    _raises("a surrogate as text of an exit", on("0", "sys.exit(os.fsdecode(b'caf\\xe9'))") + "train()", "caf",
        modes=(RUN,)),
    _kind("a base exception", "raise type('Stop', (BaseException,), {})('wet paint')", "wet paint"),
    _kind("an exception without a text", "raise type('Mute', (Exception,), {'__str__': lambda self: 1 / 0})", "Mute"),
)  # fmt: skip
