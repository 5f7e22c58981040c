"""mpipipe convert: a model folder of Hugging Face into one of this package, and back."""

from __future__ import annotations

from typing import Annotated

from mpipipe.cli.flags import Operand
from mpipipe.cli.output import check_one_process, refusing, show
from mpipipe.language.models import SHARD_BYTES
from mpipipe.language.models import convert as convert_folder
from mpipipe.options import Option


def convert(
    source: Annotated[str, Operand("folder with a model", metavar="FROM")],
    target: Annotated[str, Operand("new or empty folder", metavar="TO")],
    dtype: Annotated[str | None, Option("float32, bfloat16, float16 or float64; default: as in FROM")] = None,
    shard_bytes: Annotated[int, Option("most bytes of a file", least=1)] = SHARD_BYTES,
) -> None:
    """Turn a model folder of Hugging Face into weights of this package, or the other way round.

    One process does it, without MPI (python -m mpipipe convert runs/first/weights first-model). The tokenizer goes
    along. Llama, Mistral, Qwen2, Qwen3, SmolLM and GPT-2 are known.
    """
    with refusing():
        check_one_process("convert")
        done = convert_folder(source, target, dtype, shard_bytes)
    show(f"mpipipe: {done}\n")
