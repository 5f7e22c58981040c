"""mpipipe tokenize: text to a file of tokens, which `mpipipe train --data` takes."""

from __future__ import annotations

from time import monotonic
from typing import Annotated

from mpipipe.cli.flags import Operand
from mpipipe.cli.output import refusing, show
from mpipipe.language.data import tokenize as run_tokenize
from mpipipe.options import Option

# Seconds between two lines of progress.
SECONDS = 5.0


def tokenize(
    text: Annotated[list[str], Operand("files of text or JSON lines (*.jsonl), folders of such")],
    tokenizer: Annotated[str, Option("folder with a tokenizer.json")],
    out: Annotated[str, Option("new file for the tokens")],
    end_of_text: Annotated[
        str | None, Option("token after each document; default: as in the tokenizer's folder")
    ] = None,
) -> None:
    """Tokenize text (python -m mpipipe tokenize --tokenizer DIR text/ --out tokens).

    A text file is a document, and so is each line of a file of JSON lines, which has its text in
    the field "text". One process does it, with threads on all cores. `mpipipe train --data tokens`
    takes the file, and several of them.
    """
    latest = monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal latest
        if done == total or monotonic() - latest > SECONDS:
            latest = monotonic()
            show(f"mpipipe: {done:,} of {total:,} bytes of text\n")

    with refusing("tokenize"):
        done = run_tokenize(text, tokenizer, out, end=end_of_text, progress=progress)
    facts = done.facts
    rate = facts.nbytes / max(done.seconds, 1e-9) / 1e6
    show(
        f"mpipipe: tokenized files={done.files} documents={facts.documents} tokens={facts.tokens} "
        f"bytes={facts.nbytes} vocabulary={facts.vocab} end_of_text={facts.end} MB/s={rate:.2f} "
        f"into {done.path}\n"
    )
