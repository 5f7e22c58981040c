"""mpipipe convert: a model into a folder of Hugging Face; a run folder into one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from mpipipe import train
from mpipipe.cli.flags import Operand
from mpipipe.cli.output import refusing, show
from mpipipe.errors import ConfigError
from mpipipe.language.models import SHARD_BYTES
from mpipipe.language.models import convert as convert_folder
from mpipipe.options import Option


def convert(
    source: Annotated[
        str, Operand("folder with a model, or the output folder of a task", metavar="FROM")
    ],
    target: Annotated[
        str, Operand("new or empty folder; of a task FILE.safetensors", metavar="TO")
    ],
    dtype: Annotated[
        str | None,
        Option("float32, bfloat16, float16 or float64; default: as FROM; float32 if half"),
    ] = None,
    shard_bytes: Annotated[int, Option("most bytes of a file", least=1)] = SHARD_BYTES,
) -> None:
    """Turn the weights of a training into a folder of Hugging Face; or export a task.

    If TO ends with .safetensors, FROM is the output folder of a task of your own, and TO one
    file with the weights of its end, or of its newest checkpoint, by name.

    One process does it, without MPI (python -m mpipipe convert runs/first first-model). The
    tokenizer is copied. Llama, Mistral, Qwen2, Qwen3, SmolLM and GPT-2 are known.
    """
    with refusing("convert"):
        if target.endswith(".safetensors"):
            if dtype is not None or shard_bytes != SHARD_BYTES:
                raise ConfigError(
                    "--dtype and --shard-bytes are for folders", found=target, expected="neither"
                )
            done = train.export(Path(source), Path(target))
        else:
            done = convert_folder(source, target, dtype, shard_bytes)
    show(f"mpipipe: {done}\n")
