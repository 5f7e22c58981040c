"""The configuration of a training: one dataclass, filled from defaults, a TOML file and command line flags."""

from __future__ import annotations

import dataclasses
import difflib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from mpipipe.errors import ConfigError
from mpipipe.train.config_checks import NOUNS, PARSED, PLANNED, check_parsed, check_range, check_together, typed
from mpipipe.train.config_file import read_keys
from mpipipe.train.config_option import option, parameters_of


@dataclass(frozen=True)
class TrainConfig:
    """The configuration of one training.

    Field names are the keys of a TOML file and, with dashes, the flags of `mpipipe train`. Every field has a default.
    The help texts of the fields below are the documentation of the parameters, too.

    Raises
    ------
    ConfigError
        For a value of the wrong type or out of its range.

    Examples
    --------
    >>> from mpipipe.train import TrainConfig
    >>> config = TrainConfig(steps=100, pipe=2, schedule="interleaved_1f1b", chunks=2)
    >>> config.lr
    0.003
    """

    data: tuple[str, ...] = option(
        (), "file or folder of text, or file of tokens; repeatable; default: the standard library's source"
    )
    tokenizer: str | None = option(
        None, "folder of the tokenizer of the tokens, which is compared with theirs and shows them as text"
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
    out: str | None = option(
        None, "new or empty folder for metrics, weights and checkpoints; default: runs/ and the time of the start"
    )
    save_every: int = option(0, "steps between two checkpoints, and one more at the end; 0: none", least=0)
    keep: int = option(2, "newest checkpoints that stay", least=1)
    on_storage_error: str = option(
        "end",
        "a checkpoint that cannot be written ends the training, or it goes on without",
        choices=("end", "continue"),
    )
    resume: str = option(
        "no", "auto: go on from the newest checkpoint in out, or begin there; or go on from this checkpoint; no: begin"
    )
    init: str | None = option(
        None, "checkpoint, output folder of a training, or folder of Hugging Face, whose weights to begin with"
    )
    from_: str | None = option(None, "such a folder, whose architecture and weights to begin with")
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

    dim: int = option(128, "width of the model", least=1)
    layers: int = option(4, "transformer blocks", least=1)
    heads: int = option(4, "attention heads", least=1)
    kv_heads: int | None = option(None, "key and value heads; default: as many as heads", least=1)
    hidden: int | None = option(None, "inner width of SwiGLU; default: 8/3 dim, rounded up to 64", least=1)
    seq_len: int = option(128, "bytes or tokens in a sequence", least=1)
    tied: bool = option(False, "one matrix for embedding and head")
    dropout: float = option(0.0, "probability of dropping a value after attention and SwiGLU", least=0, below=1)
    rope_base: float = option(10000.0, "base of the rotary position embedding", above=1)

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

    steps: int = option(300, "optimizer steps", least=1)
    batch: int = option(32, "sequences of a step, over all replicas", least=1)
    optimizer: str = option("adamw", "optimizer", choices=("adamw", "sgd"))
    lr: float = option(3e-3, "learning rate after warm-up; falls as a cosine to a tenth", above=0, below=math.inf)
    warmup: int = option(30, "steps of linear warm-up", least=0)
    momentum: float = option(0.9, "momentum of sgd", least=0, below=1)
    weight_decay: float = option(0.1, "decoupled weight decay of matrices", least=0, below=math.inf)
    clip: float = option(1.0, "largest norm of all gradients; inf for no limit", above=0)
    dtype: str = option(
        "float32",
        "type of activations and products, others: float64, bfloat16, float16; the last two keep parameters in float32",
        choices=("float32", "float64", "bfloat16", "float16"),
    )
    loss_scale: float | None = option(
        None,
        "factor on gradients inside a step, below 2^64; 0: as large as fits; default: 0 for float16, 1 otherwise",
        least=0,
        below=2.0**64,
    )
    device: str = option(
        "auto", "cpu, cuda, or auto: a GPU for each rank where all of them see one", choices=("auto", "cpu", "cuda")
    )
    seed: int = option(0, "seed of parameters, batches, dropout and sample", least=0, below=2**63)

    check_weights: int = option(
        0, "steps between two comparisons of parameters and optimizer state over replicas; 0: none", least=0
    )
    watchdog: float | None = option(
        None, "seconds without progress until a hang is reported; 0: never; default: MPIPIPE_WATCHDOG or 600", least=0
    )
    survive: bool = option(
        False, "go on with fewer replicas when ranks die: needs `mpiexec --with-ft ulfm` of Open MPI 5"
    )
    trace: str | None = option(
        None, "new folder for a trace of the 2nd to the 17th step: where their time went; needs the extra [trace]"
    )
    metrics_to: str = option(
        "none", "where metrics go besides metrics.jsonl: csv, tensorboard, wandb, with commas between several; none"
    )
    log_every: int = option(10, "steps between two lines of progress", least=1)
    eval_every: int = option(100, "steps between two validations; there is one more at the end", least=1)
    eval_batches: int = option(4, "batches of a validation", least=1)
    sample_bytes: int = option(200, "bytes or tokens of text to generate at the end", least=0)
    temperature: float = option(
        0.8, "of the generated text; 0 takes the likeliest byte or token", least=0, below=math.inf
    )

    def __post_init__(self) -> None:
        for entry in dataclasses.fields(self):
            kind = KINDS[entry.name]
            value = typed(entry, getattr(self, entry.name), kind)
            check_range(entry, value, kind)
            object.__setattr__(self, entry.name, value)
        for name, parse in PARSED.items():
            check_parsed(name, getattr(self, name), parse)
        check_together(self)

    @property
    def scales_dynamically(self) -> bool:
        """Whether the loss scale is changed while the training runs, as the gradients allow."""
        return self.loss_scale == 0 or (self.loss_scale is None and self.dtype == "float16")

    @classmethod
    def load(cls, path: str | None = None, **flags: Any) -> TrainConfig:
        """Read a configuration: the keys of a file replace defaults, and flags replace keys.

        Parameters
        ----------
        path : str, optional
            A TOML file whose keys are names of fields, at its top level.
        **flags
            Values of fields by name. None stands for a flag that was not given.

        Returns
        -------
        TrainConfig
            The defaults with these replacements.

        Raises
        ------
        ConfigError
            For a file that cannot be read, an unknown key, and whatever the constructor refuses.

        Examples
        --------
        >>> from mpipipe.train import TrainConfig
        >>> TrainConfig.load(steps=100, lr=None).steps
        100
        """
        keys = {
            FIELDS.get(name, name): value for name, value in ({} if path is None else read_keys(Path(path))).items()
        }
        flags = {FIELDS.get(name, name): value for name, value in flags.items() if value is not None}
        for source, given in ((path, keys), ("the flags", flags)):
            for key in given:
                _check_known(key, source)
        given = {**keys, **flags}
        if given.get("plan") == "auto":
            given["fixed"] = (*given.get("fixed", ()), *(name for name in PLANNED if name in given))
        sizes = [name for name in FROM_FOLDER if name in given]
        if given.get("from_") is not None and sizes:
            raise ConfigError(
                f"{sizes[0]} and from are both given",
                found=f"{sizes[0]} = {given[sizes[0]]}, from {given['from_']}",
                expected="one of them: the architecture comes from the folder",
                remedy=f"leave out {' and '.join(sizes)}",
            )
        return cls(**given)


if TrainConfig.__doc__:  # python -OO has none
    TrainConfig.__doc__ = TrainConfig.__doc__.replace("    Raises\n", parameters_of(TrainConfig) + "    Raises\n", 1)

# what a folder says, with `from`
FROM_FOLDER = ("vocab", "dim", "layers", "heads", "kv_heads", "hidden", "tied", "rope_base")
FIELDS = {"from": "from_"}  # names of keys that no field can have in Python


def _kind(hint: Any) -> type:
    if get_origin(hint) is tuple:
        return tuple
    return next((part for part in get_args(hint) if part in NOUNS), hint)


# Field name -> int, float, bool, str, or tuple (of strings); a field whose default is None also takes None.
KINDS = {name: _kind(hint) for name, hint in get_type_hints(TrainConfig).items()}


def _check_known(key: str, source: str | None) -> None:
    if key in KINDS:
        return
    near = difflib.get_close_matches(key, KINDS, n=3)
    raise ConfigError(
        f"unknown key in {source}",
        found=key,
        expected=" or ".join(near) if near else ", ".join(KINDS),
        remedy="keys stand at the top level of the file, without tables; `mpipipe train --help` explains each",
    )
