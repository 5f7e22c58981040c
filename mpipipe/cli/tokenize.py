"""mpipipe tokenize: text to a file of tokens, which `mpipipe train --data` takes."""

from __future__ import annotations

import sys
from time import monotonic
from typing import Annotated

from mpipipe.cli.flags import Operand
from mpipipe.job import run_or_abort, runtime
from mpipipe.language.data import tokenize as run_tokenize
from mpipipe.options import Option
from mpipipe.train import SafeStream

SECONDS = 5.0  # between two lines of progress


def tokenize(
    text: Annotated[list[str], Operand("files of text or JSON lines (*.jsonl), folders of such")],
    tokenizer: Annotated[str, Option("folder with a tokenizer.json")],
    out: Annotated[str, Option("new file for the tokens")],
    end_of_text: Annotated[
        str | None, Option("token after each document; default: what the tokenizer's folder says")
    ] = None,
) -> int:
    """Tokenize text (mpiexec -n 4 python -m mpipipe tokenize --tokenizer DIR text/ --out tokens).

    A text file is a document, and so is each line of a file of JSON lines, which has its text in the field "text".
    The file is the same for any number of ranks. `mpipipe train --data tokens` takes it.
    """

    def work() -> None:
        comm = runtime.world()
        outlet, latest = SafeStream(sys.stdout), monotonic()

        def progress(done: int, total: int) -> None:
            nonlocal latest
            if comm.rank == 0 and (done == total or monotonic() - latest > SECONDS):
                latest = monotonic()
                outlet.write(f"mpipipe: {done:,} of {total:,} bytes of text\n")

        done = run_tokenize(text, tokenizer, out, comm, end=end_of_text, progress=progress)
        if comm.rank == 0:
            facts = done.facts
            rate = facts.nbytes / max(done.seconds, 1e-9) / 1e6
            outlet.write(
                f"mpipipe: tokenized files={done.files} documents={facts.documents} tokens={facts.tokens} "
                f"bytes={facts.nbytes} vocabulary={facts.vocab} end_of_text={facts.end} MB/s={rate:.2f} "
                f"into {done.path}\n"
            )

    return run_or_abort(work)
