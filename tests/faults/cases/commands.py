"""Command lines and files: wrong usage, absurd sizes, files that are no files, folders that differ."""

from __future__ import annotations

from faults.blocks import NONZERO, RUN, SMALL, TEXT, TRAIN, command, failing, on

FIFO = ("-c", "import os; os.mkfifo('pipe')")
COMMON = ("-m", "mpipipe", "train", *SMALL, "--steps", "3", "--data")
TRAINED = (TEXT, (*TRAIN, "--out", "run"))
GENERATE = ("-m", "mpipipe", "generate", "run", "--bytes", "20")
HELP = ("-m", "mpipipe", "train", "--help")


def _damage(code) -> tuple[str, ...]:
    """Python that changes the first file of weights in the folder `run`."""
    return (
        "-c",
        "import glob, numpy as np\nfrom safetensors.numpy import load_file, save_file\n"
        f"name = sorted(glob.glob('run/**/*.safetensors', recursive=True))[0]\n{code}",
    )


NAN = _damage("arrays = load_file(name)\nfor each in arrays.values(): each[...] = np.nan\nsave_file(arrays, name)")
CUT = _damage("data = open(name, 'rb').read()\nopen(name, 'wb').write(data[:len(data) // 2])")
ONE_FOLDER = (
    "-c",
    "import glob; found = glob.glob('*/o/**/*.safetensors', recursive=True)\n"
    "assert found and len({name.split('/')[0] for name in found}) == 1, found",
)
TWO_TEXTS = (
    "-c",
    "import random\nfor name in 'ab':\n"
    " open(name + '/text.txt', 'w').write(name.join('%06d' % random.randrange(10**6) for _ in range(50000)))",
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
    _differs("an unknown flag on rank 0", {0: (*TRAIN, "--bogus")}, "there is no option"),
    _differs("a help on one rank", {1: HELP}, "rank 1"),  # Open MPI ends a job in which a rank did not call MPI_Init
    _differs("another command on one rank", {1: ("-m", "mpipipe", "info")}, "rank", reports=1),
    _differs("other flags on one rank", {1: (*TRAIN, "--lr", "0.5")}, "MismatchError", code=(1, 2), reports=1),
    command(
        "a script of another name on one rank",
        "usage",
        "-m",
        "mpipipe",
        "run",
        "a.py",
        before=(("-c", "open('a.py', 'w').write('from mpipipe.job import runtime; runtime.world()')"),),
        arguments_of={1: ("-m", "mpipipe", "run", "absent.py")},
        says=("absent.py",),
        code=NONZERO,
    ),
    _files("a FIFO as data", *COMMON, "pipe", before=(FIFO,), says=("pipe",), quick=(2, "command")),
    _files("a FIFO as config", "-m", "mpipipe", "train", "--config", "pipe", before=(FIFO,), says=("pipe",)),
    _files("/dev/zero as data", *COMMON, "/dev/zero", says=("/dev/zero",)),
    _files("no such data", *COMMON, "absent.txt", says=("absent.txt",), code=2, ranks=(1, 2, 4)),
    _files(
        "an empty file as data", *COMMON, "empty", before=(("-c", "open('empty', 'w')"),), says=("DataError",), code=2
    ),
    _train("an output folder that is a file", "--out", "text.txt", says=("text.txt",)),
    _train("an output folder in a file", "--out", "text.txt/run", says=("text.txt",)),
    _train("an output folder in /proc", "--out", "/proc/run", says=("/proc/run",)),
    _train("10^8 layers", "--layers", "100000000", says=("layers",), limit=30),
    _train("10^6 chunks", "--chunks", "1000000", "--schedule", "looped_bfs", says=("Error",), limit=30),
    _train("10^9 columns", "--dim", "1000000000", says=("Error",), limit=30),
    _train("10^9 micro-batches", "--microbatches", "1000000000", says=("Error",), limit=30),
    _train("a mesh of more ranks", "--pipe", "7", says=("mesh",), code=2),
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
    _files("data that differ", *TRAIN, folders=("a", "b"), before=(TWO_TEXTS,), says=("MismatchError",)),
    _files(
        "weights that are not numbers",
        *GENERATE,
        before=(*TRAINED, NAN),
        says=("Error",),
        never=("bytes must be in range",),
        limit=40,
    ),
    _files("weights that are cut off", *GENERATE, before=(*TRAINED, CUT), says=("Error",), limit=40),
    _files("no such training", *GENERATE, says=("run",), code=2, ranks=(1, 2)),
    failing(
        "a limit on the size of files",
        "storage",
        on(
            "0",
            """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
def between(): print("x" * 5000, file=open("out", "w"), flush=True)
""",
        )
        + on("last", "between = lambda: None")
        + "train(between=between)",
        "File too large",
        ranks=(2,),
        modes=(RUN,),
    ),
)
