"""mpipipe evaluate: the loss of a model on tokens or text."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from mpipipe import arrays, files
from mpipipe.cli.flags import Operand
from mpipipe.cli.output import on_ranks
from mpipipe.comm import Mesh, select_device
from mpipipe.job import group_of, runtime
from mpipipe.language.inference import Evaluation, Windows, build_evaluator, open_tokens, perplexity
from mpipipe.language.models import open_on_all
from mpipipe.options import Option
from mpipipe.train import SafeStream


@on_ranks
def evaluate(
    model: Annotated[str, Operand("folder with a model", metavar="MODEL")],
    data: Annotated[list[str] | None, Option("file or folder of text, or file of tokens; repeatable")] = None,
    seq_len: Annotated[int | None, Option("tokens of a window; default: the model's", least=1)] = None,
    by_document: Annotated[bool, Option("windows end with documents, and each is reported")] = False,
    pipe: Annotated[int | None, Option("ranks of one pipeline; default: all that seq leaves", least=1)] = None,
    seq: Annotated[int, Option("ranks that share each window, by ring attention", least=1)] = 1,
    layout: Annotated[str, Option("which positions each of them holds: zigzag, contiguous, striped")] = "zigzag",
    batch: Annotated[int | None, Option("windows of a micro-batch; default: 4096 tokens", least=1)] = None,
    dtype: Annotated[str | None, Option("to compute in; default: that of the model")] = None,
    device: Annotated[str, Option("cpu, cuda, or auto: a GPU for each rank where all see one")] = "auto",
    out: Annotated[str | None, Option("new file for the results, as lines of JSON")] = None,
) -> None:
    """Compute loss, perplexity and bits per byte (mpiexec -n 4 python -m mpipipe evaluate runs/first --data book.txt).

    Windows follow each other, and each token but the first is predicted once. The ranks are pipe x data x seq.
    """
    comm = runtime.world()
    group = group_of(comm)

    def check_output() -> None:
        if out is not None:
            files.check_new("the file of results", out)

    group.from_one("evaluate: the output", check_output)
    folder = open_on_all(comm, model)
    with Mesh(comm, pipe=pipe or max(1, comm.size // seq), seq=seq) as mesh:
        tokens, unit = open_tokens(folder, data or [], mesh)
        place = select_device(device, comm)
        with group.raise_together("evaluate: the windows"):
            length = folder.model.seq if seq_len is None else seq_len
            windows = Windows.of(tokens, length, by_document)
        options: Any = {"layout": layout, "rows": batch, "dtype": dtype or folder.dtype, "device": place}
        with arrays.own_stream(place), build_evaluator(folder, mesh, length, **options) as evaluator:
            for _ in evaluator.run(tokens, windows):
                pass
            found = evaluator.result(by_document, None if tokens.nbytes is None else tokens.nbytes / len(tokens))
        group.from_one("evaluate: the results", lambda: report(found, unit, out))


def report(found: Evaluation, unit: str, out: str | None) -> None:
    """Show an evaluation, and write it as lines of JSON. Raises ConfigError if they cannot be written."""
    lines = [
        {"document": number, "tokens": each.tokens, "loss": loss, "perplexity": perplexity(loss)}
        for number, each in found.documents.items()
        for loss in [each.nats / each.tokens]
    ]
    whole = {"tokens": found.tokens, "loss": found.loss, "perplexity": perplexity(found.loss)}
    if found.bits_per_byte is not None:
        whole["bits_per_byte"] = found.bits_per_byte
    _write(out, [*lines, whole])
    outlet = SafeStream(sys.stdout)
    for line in lines if out is None else ():
        outlet.write(f"mpipipe: document {' '.join(f'{_name(key)}{_shown(value)}' for key, value in line.items())}\n")
    bits = "" if found.bits_per_byte is None else f", {found.bits_per_byte:.6f} bits per byte"
    outlet.write(f"mpipipe: {found.tokens:,} {unit} predicted{bits}\n")
    outlet.write(
        f"mpipipe: evaluated tokens={found.tokens} loss={found.loss:.8f} perplexity={_shown(perplexity(found.loss))}\n"
    )


def _write(out: str | None, lines: Sequence[Any]) -> None:
    if out is not None:
        with files.writing("the results", out):
            files.write_whole(Path(out), "".join(json.dumps(line) + "\n" for line in lines).encode())


def _name(key: str) -> str:
    return "" if key == "document" else f"{key}="


def _shown(value: float) -> str:
    return str(value) if type(value) is int else f"{value:.6f}"
