"""Pieces of sentences: counts, sizes, names that may have been meant or are gone, installing."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Sequence
from importlib import import_module
from typing import Any

from mpipipe.errors import BackendError, MpipipeError

BYTES = (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10))  # and their powers of two


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: "1 rank", "4 cores" or "2 micro-batches"."""
    if count == 1:
        return f"1 {noun}"
    if noun.endswith("ch"):
        return f"{count} {noun}es"
    return f"{count} {noun}s"


class Unit(int):
    """The number of a unit of a schedule with slices: micro-batch and slice are its `place`."""

    place = 0, 0

    def __str__(self) -> str:
        return "{}, slice {}".format(*self.place)


def units(count: int, slices: int) -> Sequence[int]:
    """Return the numbers from 0 to `count` - 1, as units of a schedule with slices.

    >>> from mpipipe.text import units
    >>> [f"micro-batch {unit}" for unit in units(4, slices=2)][-1]
    'micro-batch 1, slice 1'
    """
    if slices == 1:
        return range(count)
    numbers = [*map(Unit, range(count))]
    for number in numbers:
        number.place = divmod(number, slices)
    return numbers


def name_slice(error: MpipipeError) -> None:
    """Let an error that says a unit say its micro-batch and slice."""
    if isinstance(error.microbatch, Unit):
        error.microbatch, error.slice = error.microbatch.place


def shown_bytes(count: float) -> str:
    """Return a number of bytes in the largest unit that it fills, such as "1.5 KiB"."""
    for unit, power in BYTES:
        if count >= 2**power:
            digits = ".3g"
            if count >= 999.5 * 2**power:
                digits = ".0f"
            return f"{count / 2**power:{digits}} {unit}"
    return counted(round(count), "byte")


def exact_bytes(count: int) -> str:
    """Return bytes for comparison, from 1 KiB on in a unit and exactly: "1.5 KiB (1536 bytes)"."""
    if count >= 1024:
        return f"{shown_bytes(count)} ({count} bytes)"
    return shown_bytes(count)


def shown_seconds(seconds: float) -> str:
    """Show seconds with four digits."""
    if seconds >= 1:
        return f"{seconds:.4g} s"
    return f"{1e3 * seconds:.4g} ms"


def near(name: str, known: Iterable[str]) -> list[str]:
    """Return known names that may have been meant: three that look alike.

    Case, and "-" for "_", are overlooked.

    >>> from mpipipe.text import near
    >>> near("step", ["steps", "seed"])
    ['steps']
    """
    names = {as_word(word): word for word in known}
    return [names[word] for word in difflib.get_close_matches(as_word(name), names, n=3)]


def as_word(name: str) -> str:
    """Return a name as tables of names have it, such as "batch_size" for "Batch-Size"."""
    return name.replace("-", "_").lower()


# Options and commands that are gone, or that other programs have, and what to use in their place.
INSTEAD = {
    "jobscript": "copy a job script: jobs/train.sbatch, train_gpu.sbatch, train_preemptable.sbatch "
    "or train.pbs",
    "launch": "start the job without it: `train` leaves a file `finished` in its folder once all "
    "ranks have ended well",
    "completion": "`mpipipe COMMAND --help` lists the options",
    "on_storage_error": "a checkpoint that cannot be written ends the training, and --resume auto "
    "goes on from the one before",
    "temperature": "the sample of a training has the temperature 0.8: `mpipipe generate "
    "--temperature` draws others",
    "metrics_to": "metrics.jsonl has every number, one JSON object a line: give --tensorboard for "
    "TensorBoard",
    "data_parallel data_parallel_size dp dp_size "
    "replicas": "the replicas are all ranks divided by pipe x seq: give pipe and seq",
    "micro_batch_size microbatch_size per_device_batch_size "
    "per_device_train_batch_size": "a micro-batch has batch / "
    "(replicas x microbatches) sequences: give batch and microbatches",
    "tensor_model_parallel_size tensor_parallel tensor_parallel_size tp "
    "tp_size": "layers are not divided over ranks: "
    "give pipe for large models, and seq for long sequences",
    "init": "give --from: a training of text takes architecture and weights from one folder",
    "save_as save_dtype": "a training leaves weights: `mpipipe convert RUN FOLDER --dtype "
    "bfloat16` makes a folder of Hugging Face of them",
    "survive": "save checkpoints (save_every), and start a job that has ended again with resume = "
    "auto",
    "transfer_model message_bytes": "schedules.Links computes the times of messages in Python",
}


def instead(name: str) -> str | None:
    """Return what to use in place of an option or a command, if it is one of INSTEAD."""
    for names, remedy in INSTEAD.items():
        if as_word(name).strip("_") in names.split():
            return remedy
    return None


def how_to_install(extra: str) -> str:
    """Return the remedy for a missing library of an extra of this package."""
    return f"in a checkout of mpipipe `pip install '.[{extra}]'`"


def optional_library(module: str, purpose: str, extra: str, otherwise: str = "") -> Any:
    """Import a module of an extra's library; BackendError says how to install it."""
    library = module.partition(".")[0]
    try:
        import_module(library)
        return import_module(module)
    except ImportError as error:
        raise BackendError(
            f"the library {library} cannot be imported: {error}",
            expected=f"it, to {purpose}",
            remedy=f"{how_to_install(extra)}{otherwise}",
        ) from error


# -- A table as lines of text ----------------------------------------------------------------------


def text_table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[int] = (0,)
) -> Iterator[str]:
    """Yield the lines of a table: heads, a rule, and rows; `left` columns are to the left."""
    widths = [max(map(len, column)) for column in zip(heads, *rows)]
    for row in (heads, ["-" * width for width in widths], *rows):
        cells = []
        for place, (cell, width) in enumerate(zip(row, widths)):
            cells.append(cell.ljust(width) if place in left else cell.rjust(width))
        yield "  ".join(cells).rstrip()
