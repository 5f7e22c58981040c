"""mpipipe evaluate: the loss of a model on tokens or text."""

from __future__ import annotations

import sys
from typing import Annotated

from mpipipe import arrays
from mpipipe.cli.flags import Operand
from mpipipe.cli.output import on_ranks
from mpipipe.comm import Mesh, select_device
from mpipipe.job import group_of, runtime
from mpipipe.language.inference import build_evaluator, count_windows, open_tokens, perplexity
from mpipipe.language.models import open_on_all
from mpipipe.options import Option
from mpipipe.train import SafeStream


@on_ranks
def evaluate(
    model: Annotated[str, Operand("folder with a model", metavar="MODEL")],
    data: Annotated[
        list[str] | None, Option("file or folder of text, or file of tokens; repeatable")
    ] = None,
    seq_len: Annotated[
        int | None, Option("tokens of a window; default: the model's", least=1)
    ] = None,
    pipe: Annotated[
        int | None, Option("ranks of one pipeline; default: all that seq leaves", least=1)
    ] = None,
    seq: Annotated[int, Option("ranks that share each window, by ring attention", least=1)] = 1,
    batch: Annotated[
        int | None, Option("windows of a micro-batch; default: 4096 tokens", least=1)
    ] = None,
    dtype: Annotated[str | None, Option("type to compute in; default: the model's")] = None,
    device: Annotated[
        str, Option("cpu, cuda, or auto: a GPU for each rank if all see one")
    ] = "auto",
) -> None:
    """Compute loss, perplexity and bits per byte of a model.

    An example: mpiexec -n 4 python -m mpipipe evaluate runs/first --data book.txt. Windows follow
    each other, and each token but the first is predicted once. The ranks are pipe x data x seq.
    """
    comm = runtime.world()
    group = group_of(comm)
    folder = open_on_all(comm, model)
    with Mesh(comm, pipe=pipe or max(1, comm.size // seq), seq=seq) as mesh:
        tokens, unit = open_tokens(folder, data or [], mesh)
        place = select_device(device, comm)
        with group.raise_together("evaluate: the windows"):
            length = seq_len or folder.model.seq_len
            windows = count_windows(tokens, length)
        with arrays.own_stream(place):
            with build_evaluator(
                folder, mesh, length, rows=batch, dtype=dtype or folder.dtype, device=place
            ) as evaluator:
                result = evaluator.run(tokens, length, windows)
        if mesh.rank == 0:
            bits = ""
            if result.bits_per_byte is not None:
                bits = f", {result.bits_per_byte:.6f} bits per byte"
            SafeStream(sys.stdout).write(
                f"mpipipe: {result.tokens:,} {unit} predicted{bits}\n"
                f"mpipipe: evaluated tokens={result.tokens} loss={result.loss:.8f} "
                f"perplexity={perplexity(result.loss):.6f}\n"
            )
