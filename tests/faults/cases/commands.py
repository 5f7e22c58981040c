"""Command lines and folders that differ between ranks."""

from faults.blocks import NONZERO, TEXT, TRAIN, command

HELP = ("-m", "mpipipe", "train", "--help")
ONE_FOLDER = (
    "-c",
    "import glob; found = glob.glob('*/o/**/*.safetensors', recursive=True)\n"
    "assert found and len({name.split('/')[0] for name in found}) == 1, found",
)


def _differs(name, of, says, **options):
    """Each rank trains, but those of `of` do something else."""
    options = {"code": NONZERO, "reports": None, **options}
    return command(name, "usage", *TRAIN, before=(TEXT,), arguments_of=of, says=(says,), **options)


FAULTS = (
    _differs("an unknown flag on one rank", {1: (*TRAIN, "--bogus")}, "there is no option", quick=(2, "command")),
    _differs("a help on one rank", {1: HELP}, "rank 1"),  # Open MPI ends a job in which a rank did not call MPI_Init
    command("working folders that differ", "storage", *TRAIN[:-1], "../text.txt", "--out", "o", before=(TEXT,),
        folders=("a", "b"), after=(ONE_FOLDER,), code=0, reports=0, ranks=(2,), quick=(2, "command")),
)  # fmt: skip
