"""The options of a training, by what they are about."""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass, field, fields
from typing import Any

# -- How the fields of a configuration are declared -------------------------------------------------------------------


def option(
    default: Any,
    text: str,
    *,
    least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    choices: tuple[str, ...] | None = None,
    metavar: str | None = None,
) -> Any:
    """Return a field with its help `text` and its range. `least` is in the range; `above` and `below` are not.

    `metavar` stands for the value in the help of the command line.
    """
    limits = {"least": least, "above": above, "below": below, "choices": choices}
    return field(default=default, metadata={"help": text, "metavar": metavar, **limits})


def parameters_of(config: type) -> str:
    """Return the section Parameters of the docstring of a dataclass, from the help texts of its fields."""
    lines = ["Parameters", "----------"]
    for entry in fields(config):
        default = "" if entry.default is None else f", default {entry.default!r}"
        kind = str(entry.type).replace(" | None", ", optional")
        lines += [f"{entry.name} : {kind}{default}", f"    {entry.metadata['help']}"]
    return textwrap.indent("\n".join(lines), "    ") + "\n\n"


# -- Options of a training: what keeps a training safe on a cluster ---------------------------------------------------


@dataclass(frozen=True)
class ClusterOptions:
    """What keeps a training safe on a cluster."""

    preempt_signals: str = option(
        "USR2,TERM",
        "signals at which a checkpoint is saved and all ranks leave with exit code 75; none: no such signal",
    )
    preempt_grace: float = option(
        600.0, "seconds from such a signal until the job ends at once, saved or not; inf for no limit", least=0
    )
    time_limit: str | None = option(
        None,
        "seconds or HH:MM:SS that the job may last; it saves before and leaves with 75; 0: no limit; default: what "
        "SLURM gives the job",
    )
    check_weights: int = option(
        0, "steps between two comparisons of parameters and optimizer state over replicas; 0: none", least=0
    )
    watchdog: float | None = option(
        None, "seconds without progress until a hang is reported; 0: never; default: MPIPIPE_WATCHDOG or 600", least=0
    )
    survive: bool = option(
        False, "go on with fewer replicas when ranks die: needs `mpiexec --with-ft ulfm` of Open MPI 5"
    )


# -- Options of a training: text or tokens ----------------------------------------------------------------------------


@dataclass(frozen=True)
class DataOptions:
    """Text or tokens."""

    data: tuple[str, ...] = option(
        (),
        "file or folder of text, or file of tokens; repeatable; default: the standard library's source",
        metavar="PATH",
    )
    tokenizer: str | None = option(
        None,
        "folder of the tokenizer of the tokens, which is compared with theirs and shows them as text",
        metavar="PATH",
    )
    packing: str = option(
        "none",
        "what attention does at the ends of documents: none: it goes on across them; segments: it stays within each",
        choices=("none", "segments"),
    )
    order: str = option(
        "random",
        "windows to train on: random: anywhere, with replacement; epoch: each once in an epoch, in a new order",
        choices=("random", "epoch"),
    )
    vocab: int | None = option(None, "token ids of the model; default: those of the data, 256 for bytes", least=1)
    seq_len: int = option(128, "bytes or tokens in a sequence", least=1)


# -- Options of a training: the model, and where its weights come from ------------------------------------------------


@dataclass(frozen=True)
class ModelOptions:
    """The model, and where its weights come from."""

    dim: int = option(128, "width of the model", least=1)
    layers: int = option(4, "transformer blocks", least=1)
    heads: int = option(4, "attention heads", least=1)
    kv_heads: int | None = option(None, "key and value heads; default: as many as heads", least=1)
    hidden: int | None = option(None, "inner width of SwiGLU; default: 8/3 dim, rounded up to 64", least=1)
    tied: bool = option(False, "one matrix for embedding and head")
    dropout: float = option(0.0, "probability of dropping a value after attention and SwiGLU", least=0, below=1)
    rope_base: float = option(10000.0, "base of the rotary position embedding", above=1)
    init: str | None = option(
        None,
        "checkpoint, output folder of a training, or folder of Hugging Face, whose weights to begin with",
        metavar="PATH",
    )
    from_: str | None = option(None, "such a folder, whose architecture and weights to begin with", metavar="PATH")
    freeze: tuple[str, ...] = option(
        (),
        "pattern of names of parameters that stay as they are, such as '0.*'; repeatable; the last that fits counts, "
        "one with ! in front keeps trained",
    )
    lora: str | None = option(
        None,
        "train low-rank adapters alone: rank,alpha,target,... such as 8,16,q_proj,v_proj, or the folder of an adapter "
        "of PEFT to go on with",
    )
    dtype: str = option(
        "float32",
        "type of activations and products; bfloat16 and float16 keep parameters in float32",
        choices=("float32", "float64", "bfloat16", "float16"),
    )


# -- Options of a training: what is written and shown -----------------------------------------------------------------


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


# -- Options of a training: ranks, stages, schedule -------------------------------------------------------------------


@dataclass(frozen=True)
class ParallelOptions:
    """Ranks, stages, schedule."""

    pipe: int | None = option(None, "ranks of one pipeline; default: all that seq leaves", least=1)
    seq: int = option(1, "ranks that share each sequence, by ring attention; a replica has pipe x seq ranks", least=1)
    layout: str = option("zigzag", "which positions each of them holds", choices=("zigzag", "contiguous", "striped"))
    schedule: str = option(
        "one_f_one_b",
        "schedule; others: gpipe, interleaved_1f1b, looped_bfs, zero_bubble_h1, zero_bubble_2p, "
        "interleaved_zero_bubble; with chunks 2: zero_bubble_v, dualpipe_v, v_half, v_min; or FILE.csv with an order, "
        "such as simulate --out writes",
    )
    chunks: int = option(1, "stages on each rank", least=1)
    microbatches: int | None = option(
        None, "micro-batches of a step in each replica; default: 4 per rank, or those of FILE.csv", least=1
    )
    partition: str | None = option(
        None, "layers of each stage, such as 3,2,2,3; default: stages with an even share of the operations"
    )
    recompute: bool = option(False, "keep only stage inputs, and run each forward again before its backward")
    recompute_limit: int | None = option(
        None, "activations of stages that a rank may hold; as many forwards as that needs are run again", least=1
    )
    plan: str = option(
        "no",
        "auto: measure for a moment, and take the fastest schedule, chunks, micro-batches, partition and recomputation",
        choices=("no", "auto"),
    )
    memory_limit: str | None = option(
        None, "with a plan: bytes that a rank may need for parameters, optimizer and activations, such as 900M or 1.5G"
    )
    fixed: tuple[str, ...] = option(
        (), "option that a plan leaves as it is, such as schedule; repeatable; those that are given stay anyway"
    )
    device: str = option(
        "auto", "cpu, cuda, or auto: a GPU for each rank where all of them see one", choices=("auto", "cpu", "cuda")
    )


# -- Options of a training: steps, batches, optimizer -----------------------------------------------------------------


@dataclass(frozen=True)
class TrainingOptions:
    """Steps, batches, optimizer."""

    steps: int = option(300, "optimizer steps", least=1)
    batch: int = option(32, "sequences of a step, over all replicas", least=1)
    optimizer: str = option("adamw", "optimizer", choices=("adamw", "sgd"))
    lr: float = option(3e-3, "learning rate after warm-up; falls as a cosine to a tenth", above=0, below=math.inf)
    warmup: int = option(30, "steps of linear warm-up", least=0)
    momentum: float = option(0.9, "momentum of sgd", least=0, below=1)
    weight_decay: float = option(0.1, "decoupled weight decay of matrices", least=0, below=math.inf)
    clip: float = option(1.0, "largest norm of all gradients; inf for no limit", above=0)
    loss_scale: float | None = option(
        None,
        "factor on gradients inside a step, below 2^64; 0: as large as fits; default: 0 for float16, 1 otherwise",
        least=0,
        below=2.0**64,
    )
    seed: int = option(0, "seed of parameters, batches, dropout and sample", least=0, below=2**63)
    eval_every: int = option(100, "steps between two validations; there is one more at the end", least=1)
    eval_batches: int = option(4, "batches of a validation", least=1)


# -- What other programs call the options of a training: for the question what a user may have meant ------------------


OTHER_NAMES = {
    "accumulation_steps": "microbatches",
    "attention_heads": "heads",
    "batch_size": "batch",
    "bf16": "dtype",
    "block_size": "seq_len",
    "checkpoint_every": "save_every",
    "checkpointing": "recompute",
    "context_length": "seq_len",
    "context_parallel": "seq",
    "context_parallel_size": "seq",
    "cp": "seq",
    "cp_size": "seq",
    "d_model": "dim",
    "data_path": "data",
    "fp16": "dtype",
    "global_batch_size": "batch",
    "grad_clip": "clip",
    "gradient_accumulation": "microbatches",
    "gradient_accumulation_steps": "microbatches",
    "gradient_checkpointing": "recompute",
    "hidden_size": "dim",
    "intermediate_size": "hidden",
    "learning_rate": "lr",
    "max_grad_norm": "clip",
    "max_norm": "clip",
    "max_seq_len": "seq_len",
    "max_steps": "steps",
    "micro_batches": "microbatches",
    "n_embd": "dim",
    "n_head": "heads",
    "n_heads": "heads",
    "n_layer": "layers",
    "n_layers": "layers",
    "num_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "num_layers": "layers",
    "num_microbatches": "microbatches",
    "output": "out",
    "output_dir": "out",
    "pipeline_parallel": "pipe",
    "pipeline_parallel_size": "pipe",
    "pp": "pipe",
    "pp_size": "pipe",
    "precision": "dtype",
    "ring": "seq",
    "rope_theta": "rope_base",
    "sequence_length": "seq_len",
    "sequence_parallel": "seq",
    "sp": "seq",
    "train_steps": "steps",
    "virtual_pipeline": "chunks",
    "virtual_stages": "chunks",
    "vocab_size": "vocab",
    "warmup_steps": "warmup",
}

_REPLICAS = "the replicas are all ranks divided by pipe x seq: give pipe and seq"
_ROWS = "a micro-batch has batch / (replicas x microbatches) sequences: give batch and microbatches"
_TENSOR = "layers are not divided over ranks: give pipe for large models, and seq for long sequences"
# what has no option here, and what to do instead
INSTEAD = {
    "data_parallel": _REPLICAS,
    "data_parallel_size": _REPLICAS,
    "dp": _REPLICAS,
    "dp_size": _REPLICAS,
    "micro_batch_size": _ROWS,
    "microbatch_size": _ROWS,
    "per_device_batch_size": _ROWS,
    "per_device_train_batch_size": _ROWS,
    "replicas": _REPLICAS,
    "tensor_model_parallel_size": _TENSOR,
    "tensor_parallel": _TENSOR,
    "tensor_parallel_size": _TENSOR,
    "tp": _TENSOR,
    "tp_size": _TENSOR,
}
