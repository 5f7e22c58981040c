"""mpipipe tokenize: text to a file of tokens, which `mpipipe train --data` takes."""

from __future__ import annotations

import sys
from time import monotonic
from typing import Annotated

import typer

from mpipipe.comm import runtime
from mpipipe.comm.abort import run_or_abort
from mpipipe.train.data.tokenize import tokenize as run_tokenize
from mpipipe.train.outlet import Outlet

SECONDS = 5.0  # between two lines of progress


def tokenize(
    text: Annotated[
        list[str], typer.Argument(help="files of text or JSON lines (*.jsonl), folders of such", show_default=False)
    ],
    tokenizer: Annotated[str, typer.Option(help="folder with a tokenizer.json", show_default=False)],
    out: Annotated[str, typer.Option(help="new file for the tokens", show_default=False)],
    end_of_text: Annotated[
        str | None,
        typer.Option(help="token behind each document; default: what the tokenizer's folder says", show_default=False),
    ] = None,
) -> None:
    """Tokenize text (mpiexec -n 4 python -m mpipipe tokenize --tokenizer DIR text/ --out tokens).

    A text file is a document, and so is each line of a file of JSON lines, which has its text in the field "text".
    The file is the same for any number of ranks. `mpipipe train --data tokens` takes it.
    """

    def work() -> None:
        comm = runtime.world()
        outlet, latest = Outlet(sys.stdout), monotonic()

        def progress(done: int, total: int) -> None:
            nonlocal latest
            if comm.rank == 0 and (done == total or monotonic() - latest > SECONDS):
                latest = monotonic()
                outlet.write(f"mpipipe: {done:,} of {total:,} bytes of text\n")

        done = run_tokenize(text, tokenizer, out, comm, end=end_of_text, progress=progress)
        if comm.rank == 0:
            header = done.header
            rate = header.nbytes / max(done.seconds, 1e-9) / 1e6
            outlet.write(
                f"mpipipe: tokenized files={done.files} documents={header.documents} tokens={header.tokens} "
                f"bytes={header.nbytes} vocabulary={header.vocab} end_of_text={header.end} MB/s={rate:.2f} "
                f"into {done.path}\n"
            )

    raise typer.Exit(run_or_abort(work))
