"""Command lines and folders that differ between ranks."""

from faults.blocks import NONZERO, PLAIN, Fault, training

APART = """
os.mkdir(f"folder-{rank}")
os.chdir(f"folder-{rank}")
try:
    main()
finally:
    assert os.path.exists("o/finished") == (rank == 0)
"""


def _differs(name, more, says, **options):
    """Each rank trains, but rank 1 has other words."""
    return Fault(name, "usage", training(more=more), modes=(PLAIN,), plain_code=NONZERO, says=(says,), **options)


FAULTS = (
    _differs("an unknown flag on one rank", "['--bogus'] * rank", "there is no option", ranks=(2,), quick=(2, PLAIN)),
    # Open MPI ends a job in which a rank did not call MPI_Init
    _differs("a help on one rank", "['--help'] * rank", "rank 1", ranks=(2,)),
    Fault("working folders that differ", "storage", training("['--out', 'o']", APART), modes=(PLAIN,), plain_code=0,
        ranks=(2,), quick=(2, PLAIN)),
)  # fmt: skip
