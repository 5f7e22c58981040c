"""The options of any training, by what they are about: the mesh and its schedule, and the run."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from signal import Signals
from typing import ClassVar

from mpipipe.errors import ArgumentError
from mpipipe.job import parse_duration, parse_signals
from mpipipe.options import option
from mpipipe.planning import parse_bytes
from mpipipe.schedules import is_path
from mpipipe.train.sinks import parse_names

# what a plan decides
PLANNED = ("schedule", "chunks", "microbatches", "partition", "recompute", "recompute_limit")
LAYERS = re.compile(r"0*[1-9][0-9]{0,8}")  # a number of them


def parse_partition(text: str) -> tuple[int, ...]:
    """Read the numbers of layers of stages. Raises ArgumentError for anything else."""
    counts = [part.strip() for part in text.split(",")]
    if not all(LAYERS.fullmatch(count) for count in counts):
        expected = "numbers of layers with commas between, such as 3,2,2,3"
        raise ArgumentError("no partition", found=f"{text!r:.80}", expected=expected)
    return tuple(map(int, counts))


def is_table(schedule: str) -> bool:
    """Whether a schedule is a table of actions, and neither a name nor the path of a file."""
    return not is_path(schedule) and ("," in schedule or "\n" in schedule)


def in_one_text(values: Iterable[object]) -> str:
    """Write several values with commas between them; none where there are none."""
    return ",".join(map(str, values)) or "none"


def names_of_signals(signals: Iterable[Signals]) -> str:
    """Write signals as `parse_signals` reads them."""
    return in_one_text(Signals(signal).name.removeprefix("SIG") for signal in signals)


@dataclass(frozen=True)
class ParallelOptions:
    """Ranks, stages, schedule."""

    heading: ClassVar[str] = "parallel"

    pipe: int | None = option(None, "ranks of one pipeline; default: all that seq leaves", least=1)
    seq: int = option(
        1, "ranks that share each sequence or field, as by ring attention; a replica has pipe x seq ranks", least=1
    )
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
    partition: tuple[int, ...] | None = option(
        None,
        "layers of each stage, such as 3,2,2,3; default: stages with an even share of the operations",
        parse=parse_partition,
        show=in_one_text,
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
    memory_limit: int | None = option(
        None,
        "with a plan: bytes that a rank may need for parameters, optimizer and activations, such as 900M or 1.5G",
        parse=parse_bytes,
    )
    fixed: tuple[str, ...] = option(
        (), "option that a plan leaves as it is, such as schedule; repeatable; those that are given stay anyway"
    )
    device: str = option(
        "auto", "cpu, cuda, or auto: a GPU for each rank where all of them see one", choices=("auto", "cpu", "cuda")
    )


@dataclass(frozen=True)
class TrainingOptions:
    """Steps, batches, optimizer."""

    heading: ClassVar[str] = "training"

    dtype: str = option(
        "float32",
        "type of activations and products; bfloat16 and float16 keep parameters in float32",
        choices=("float32", "float64", "bfloat16", "float16"),
        decides=True,
    )
    steps: int = option(300, "optimizer steps", least=1)
    batch: int = option(32, "sequences of a step, over all replicas", least=1, decides=True)
    optimizer: str = option("adamw", "optimizer", choices=("adamw", "sgd"), decides=True)
    lr: float = option(
        3e-3, "learning rate after warm-up; falls as a cosine to a tenth", above=0, below=math.inf, decides=True
    )
    warmup: int = option(30, "steps of linear warm-up", least=0, decides=True)
    momentum: float = option(0.9, "momentum of sgd", least=0, below=1, decides=True)
    weight_decay: float = option(0.1, "decoupled weight decay of matrices", least=0, below=math.inf, decides=True)
    clip: float = option(1.0, "largest norm of all gradients; inf for no limit", above=0, decides=True)
    loss_scale: float | None = option(
        None,
        "factor on gradients inside a step, below 2^64; 0: as large as fits; default: 0 for float16, 1 otherwise",
        least=0,
        below=2.0**64,
        decides=True,
    )
    seed: int = option(0, "seed of parameters, batches, dropout and sample", least=0, below=2**63, decides=True)
    eval_every: int = option(100, "steps between two validations; there is one more at the end", least=1)
    eval_batches: int = option(4, "batches of a validation", least=1)

    @property
    def scales_dynamically(self) -> bool:
        """Whether the loss scale is changed while the training runs, as the gradients allow."""
        return self.loss_scale == 0 or (self.loss_scale is None and self.dtype == "float16")


@dataclass(frozen=True)
class OutputOptions:
    """What is written and shown."""

    heading: ClassVar[str] = "output"

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
    log_every: int = option(10, "steps between two lines of progress", least=1)
    metrics_to: tuple[str, ...] = option(
        "none",
        "where metrics go besides metrics.jsonl: csv, tensorboard, wandb, with commas between several; none",
        parse=parse_names,
        show=in_one_text,
    )
    trace: str | None = option(
        None,
        "new folder for a trace of the 2nd to the 17th step: where their time went; needs the extra [trace]",
        metavar="PATH",
    )


@dataclass(frozen=True)
class ClusterOptions:
    """What keeps a training safe on a cluster."""

    heading: ClassVar[str] = "cluster"

    preempt_signals: tuple[Signals, ...] = option(
        "USR2,TERM",
        "signals at which a checkpoint is saved and all ranks leave with exit code 75; none: no such signal",
        parse=parse_signals,
        show=names_of_signals,
    )
    preempt_grace: float = option(
        600.0, "seconds from such a signal until the job ends at once, saved or not; inf for no limit", least=0
    )
    time_limit: float | None = option(
        None,
        "seconds or HH:MM:SS that the job may last; it saves before and leaves with 75; 0: no limit; default: what "
        "SLURM gives the job",
        parse=parse_duration,
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


@dataclass(frozen=True)
class RunOptions(ClusterOptions, OutputOptions, TrainingOptions):
    """The run: its steps, what it writes and shows, and what keeps it safe."""

    @property
    def may_save(self) -> bool:
        """Whether a checkpoint may be saved: at steps that are configured, or where the training has to leave."""
        limited = self.time_limit is None or self.time_limit > 0  # None: SLURM may set a limit
        return self.save_every > 0 or bool(self.preempt_signals) or limited


# -- What other programs call these options: for the question what a user may have meant ------------------------------

_OTHERS = {
    "batch": "batch_size global_batch_size",
    "chunks": "virtual_pipeline virtual_stages",
    "clip": "grad_clip max_grad_norm max_norm",
    "dtype": "bf16 fp16 precision",
    "lr": "learning_rate",
    "microbatches": "accumulation_steps gradient_accumulation gradient_accumulation_steps micro_batches "
    "num_microbatches",
    "out": "output output_dir",
    "pipe": "pipeline_parallel pipeline_parallel_size pp pp_size",
    "recompute": "checkpointing gradient_checkpointing",
    "save_every": "checkpoint_every",
    "seq": "context_parallel context_parallel_size cp cp_size ring sequence_parallel sp",
    "steps": "max_steps train_steps",
    "warmup": "warmup_steps",
}
OTHER_NAMES = {other: name for name, others in _OTHERS.items() for other in others.split()}
# what has no option here, and what to do instead
_WITHOUT = {
    "data_parallel data_parallel_size dp dp_size replicas": "the replicas are all ranks divided by pipe x seq: give "
    "pipe and seq",
    "micro_batch_size microbatch_size per_device_batch_size per_device_train_batch_size": "a micro-batch has batch / "
    "(replicas x microbatches) sequences: give batch and microbatches",
    "tensor_model_parallel_size tensor_parallel tensor_parallel_size tp tp_size": "layers are not divided over ranks: "
    "give pipe for large models, and seq for long sequences",
}
INSTEAD = {name: remedy for names, remedy in _WITHOUT.items() for name in names.split()}
