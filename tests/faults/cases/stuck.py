"""A rank that comes late or never: it loops, waits for a thing of its own, or calls from another thread."""

from faults.blocks import OPENING, failing, on
from faults.fault import PLAIN, RUN, Fault

SHORT = {"MPIPIPE_TIMEOUT": "3"}
LOOP = "breaks('forward', lambda: [None for _ in iter(int, 1)])"


def _stalls(name, body, *says, **options) -> Fault:
    """The others wait, and raise StallError after 3 s that names the rank which is missing."""
    return failing(name, "loop", body, "StallError", *says, env=SHORT, limit=30, **options)


OTHER_THREAD = """
pipeline, errors_seen = build(), []
def work():
    try:
        pipeline.step(inputs, targets)
    except BaseException as error:
        errors_seen.append(error)
thread = threading.Thread(target=work)
thread.start()
thread.join()
if errors_seen: raise errors_seen[0]
print("finished")
"""

FAULTS = (
    _stalls("an endless loop in a forward", on("last", LOOP) + "train()", "rank {last}", quick=(2, RUN)),
    _stalls(
        "a collective of the user in place of a step",
        """
with build() as pipeline:
    if rank == 1: comm.Barrier()
    pipeline.step(inputs, targets)
""",
        "rank 1",
        quick=(2, PLAIN),
    ),
    failing(
        "a sleep before a ring, watched",
        "hang",
        on("last", "time.sleep(1000)") + "ring()",
        "no rank has made progress",
        "rank {last} on",
        "has been busy elsewhere",
        # before their first common call ranks do not watch each other
        plain_says=("no rank has made progress", "rank {last} does not answer"),
        code=124,
        plain_code=124,
        env={"MPIPIPE_WATCHDOG": "3"},
        limit=15,
        quick=(2, RUN),
    ),
    failing("an exception in a step of another thread", "thread", on("last", "breaks('forward', fail)") + OTHER_THREAD,
        "ValueError: wet paint", "micro-batch 0", quick=(2, RUN)),
    Fault(
        "an exception in a thread of the user's own",
        "thread",
        OPENING
        + """
thread = threading.Thread(target=fail)
if rank == last:
    thread.start()
    thread.join()
train()
""",
        code=0,
        plain_code=0,
        reports=0,
        says=("wet paint",),
        by_all=("finished",),
    ),
    Fault(
        "a fork in a stage",
        "thread",
        OPENING
        + """
def act():
    child = os.fork()
    if child == 0:
        sys.exit(0)
    os.waitpid(child, 0)
"""
        + on("last", "breaks('forward', act)")
        + "train()",
        code=("any"),
        reports=None,
        modes=(RUN,),
        ranks=(2,),
        never=("left the job",),
        limit=20,
    ),
)  # fmt: skip
