"""Command lines and files: wrong usage, absurd sizes, files that are no files, folders that differ."""

from __future__ import annotations

from faults.blocks import NONZERO, SMALL, TEXT, TRAIN, command

FIFO = ("-c", "import os; os.mkfifo('pipe')")
COMMON = ("-m", "mpipipe", "train", *SMALL, "--steps", "3", "--data")
HELP = ("-m", "mpipipe", "train", "--help")


ONE_FOLDER = (
    "-c",
    "import glob; found = glob.glob('*/o/**/*.safetensors', recursive=True)\n"
    "assert found and len({name.split('/')[0] for name in found}) == 1, found",
)


def _train(name, *flags, says=(), **options):
    options.setdefault("before", (TEXT,))
    return command(name, "storage", *TRAIN, *flags, says=says, **{"code": (1, 2), **options})


def _files(name, *arguments, **options):
    return command(name, "storage", *arguments, **{"code": (1, 2), **options})


def _differs(name, of, says, **options):
    """Each rank trains, but those of `of` do something else."""
    options = {"code": NONZERO, "reports": None, **options}
    return command(name, "usage", *TRAIN, before=(TEXT,), arguments_of=of, says=(says,), **options)


def _usage(name, *arguments, **options):
    return command(name, "usage", *arguments, **{"code": 2, "reports": None, "ranks": (1, 2, 4), **options})


FAULTS = (
    _usage("an unknown flag", *TRAIN, "--bogus", once=("there is no option",), quick=(2, "command")),
    _usage("no such script", "-m", "mpipipe", "run", "absent.py", code=(1, 2), says=("absent.py",)),
    _differs("an unknown flag on one rank", {1: (*TRAIN, "--bogus")}, "there is no option", quick=(2, "command")),
    _differs("a help on one rank", {1: HELP}, "rank 1"),  # Open MPI ends a job in which a rank did not call MPI_Init
    _differs("other flags on one rank", {1: (*TRAIN, "--lr", "0.5")}, "MismatchError", code=(1, 2), reports=1),
    _files("a FIFO as data", *COMMON, "pipe", before=(FIFO,), says=("pipe",), quick=(2, "command")),
    _train("an output folder that is a file", "--out", "text.txt", says=("text.txt",)),
    _train("10^8 layers", "--layers", "100000000", says=("layers",), limit=30),
    _files(
        "working folders that differ",
        *TRAIN[:-1],
        "../text.txt",
        "--out",
        "o",
        before=(TEXT,),
        folders=("a", "b"),
        after=(ONE_FOLDER,),
        code=0,
        reports=0,
        ranks=(2,),
        quick=(2, "command"),
    ),
)
