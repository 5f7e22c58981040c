"""Options of a training: what is written and shown."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mpipipe.train.options.option import option


@dataclass(frozen=True)
class OutputOptions:
    """What is written and shown."""

    out: str | None = option(
        None,
        "new or empty folder for metrics, weights and checkpoints; default: runs/ and the time of the start",
        metavar="PATH",
    )
    resume: str = option(
        "no",
        "auto: go on from the newest checkpoint in out, or begin there; or go on from this checkpoint; no: begin",
        metavar="PATH",
    )
    save_every: int = option(0, "steps between two checkpoints, and one more at the end; 0: none", least=0)
    keep: int = option(2, "newest checkpoints that stay", least=1)
    on_storage_error: str = option(
        "end",
        "a checkpoint that cannot be written ends the training, or it goes on without",
        choices=("end", "continue"),
    )
    save_as: str = option(
        "mpipipe",
        "format of the model at the end: mpipipe in weights/, huggingface in huggingface/",
        choices=("mpipipe", "huggingface"),
    )
    save_dtype: str | None = option(
        None,
        "dtype of a model that is saved as huggingface: float32, bfloat16, float16 or float64; default: that of the "
        "parameters",
        choices=("float32", "bfloat16", "float16", "float64"),
    )
    log_every: int = option(10, "steps between two lines of progress", least=1)
    sample_bytes: int = option(200, "bytes or tokens of text to generate at the end", least=0)
    temperature: float = option(
        0.8, "of the generated text; 0 takes the likeliest byte or token", least=0, below=math.inf
    )
    metrics_to: str = option(
        "none", "where metrics go besides metrics.jsonl: csv, tensorboard, wandb, with commas between several; none"
    )
    trace: str | None = option(
        None,
        "new folder for a trace of the 2nd to the 17th step: where their time went; needs the extra [trace]",
        metavar="PATH",
    )
