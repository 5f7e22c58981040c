"""`bench tokenize`: text to a file of tokens, against the library tokenizers alone with as many threads.

The library gets the same texts, in memory already, in one call on each rank; what it returns is thrown away. `mpipipe
tokenize` also reads them, writes the file, and lets ranks agree. Both open the tokenizer anew in each turn, since it
keeps the words that it has met. The processors' time has that of ranks that wait for others, which poll.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from time import process_time

from mpipipe.bench.timing import compare, report
from mpipipe.job import runtime
from mpipipe.job.group import group_of
from mpipipe.language.data.text_chunks import TextReader, chunks_of
from mpipipe.language.data.tokenize import THREADS, batches_of, list_texts, share_threads, tokenize
from mpipipe.language.data.tokenizer import open_tokenizer
from mpipipe.text import counted

WARMUP = 1


def run(repeats: int, texts: list[str], tokenizer: str, end: str | None) -> None:
    """Print MB of text a second of both, by the clock and by the processor, and their ratio."""
    comm = runtime.world()
    group = group_of(comm)
    share_threads(group)
    entries = list_texts(texts, group)
    with group.raise_together("bench: the texts"):
        reader = TextReader(open_tokenizer(tokenizer, end))
        mine = batches_of(chunks_of(entries))[comm.rank :: comm.size]
        own = [passage.text for batch in mine for chunk in batch for passage in reader.passages(chunk)]
    folder = group.broadcast("bench: a folder", tempfile.mkdtemp(prefix="mpipipe-") if comm.rank == 0 else None)
    spent = {"library": 0.0, "tokenize": 0.0}
    turn = 0

    def alone() -> None:
        start = process_time()
        open_tokenizer(tokenizer, end).library.encode_batch(own, add_special_tokens=False)  # with empty caches
        spent["library"] += process_time() - start

    def ours() -> None:
        nonlocal turn
        turn += 1
        start = process_time()
        tokenize(texts, tokenizer, str(Path(folder, str(turn))), comm, end=end)
        spent["tokenize"] += process_time() - start

    try:
        seconds = compare(comm, [alone, ours], repeats, WARMUP)
    finally:
        if comm.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    everyone = group.gather("bench: the processors' time", spent)
    library, whole = (sum(each[name] for each in everyone) / (WARMUP + repeats) for name in ("library", "tokenize"))
    size = sum(entry[1] for entry in entries) / 1e6
    name = f"tokenize, {counted(comm.size, 'rank')} x {os.environ.get(THREADS, 'all')} threads, {size:.1f} MB"
    rates = f"{size / seconds[1]:.2f} MB/s, library alone {size / seconds[0]:.2f} MB/s"
    report(comm, name, rates, seconds[0] / seconds[1], "at least 0.9")
    report(comm, f"{name}, by the processors' time", f"{whole:.2f} s, library alone {library:.2f} s", library / whole)
