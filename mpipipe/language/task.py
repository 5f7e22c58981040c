"""The training of a language model on bytes or tokens, as a task of `mpipipe.train`."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from mpipipe import arrays, nn
from mpipipe.attention import slice_lengths
from mpipipe.comm import Mesh
from mpipipe.errors import ConfigError
from mpipipe.job import Communicator, RankGroup, group_of, runtime, write
from mpipipe.language.config import FROM_FOLDER, TrainConfig
from mpipipe.language.data import DataListing, Source, Tokens
from mpipipe.language.data.windows import read_windows, segments, training_starts, validation_starts
from mpipipe.language.inference.generation import Sampling, answers, build_decoder, longest_text
from mpipipe.language.models import fine_tuning, huggingface, weights
from mpipipe.language.models.gpt import GPT, Architecture, check_layers
from mpipipe.language.models.huggingface.adapter import save_adapter
from mpipipe.language.models.model_folder import ModelFolder
from mpipipe.language.packing import PackedAttend, Packing
from mpipipe.language.token_units import find_data, open_data
from mpipipe.nn import without_adapters, worth_tiles
from mpipipe.options import Values
from mpipipe.pipeline import Pipeline
from mpipipe.planning import LayerPlan
from mpipipe.train import Pair, Record, Shard, Task, absolute, check_same_config, folded, run

# The sample at the end of a training continues so much validation text.
PROMPT_BYTES = 32
TEMPERATURE = 0.8
BLOCK = 32  # rows: products of some of these take a few percent less time
BYTES = 256  # token ids of a model of bytes, which an architecture makes without being told


def train(
    config: TrainConfig,
    architecture: Architecture,
    comm: Communicator | None = None,
    data: Source | None = None,
) -> Record:
    """Train a model on bytes or tokens, on all ranks of a communicator; collective.

    Progress goes to the standard output of rank 0, and to metrics.jsonl in `config.out`. That
    folder must be new or empty, unless the training is resumed; a relative path begins in the
    working folder of rank 0. A checkpoint that cannot be written ends the training. The state at
    the end is returned; its speed and bubble are those of all steps since the training was started.

    Parameters
    ----------
    config : TrainConfig
        The same on every rank.
    architecture : callable
        Makes the model from the sizes in `config`, such as `models.GPT`.
    comm : communicator, optional
        The ranks, COMM_WORLD by default. It is duplicated.
    data : Source, optional
        What to read in place of `config.data`, the same on every rank.

    Raises
    ------
    ConfigError, DataError, MismatchError, ArgumentError, OwnerError, BackendError, StorageError
        On every rank. Only of an owner (docs/checkpoints.md) and of storage after something was
        written.
    NonFiniteError, ReplicaError
        Where the loss is NaN or infinite, or a gradient is and no smaller loss scale can help.
        Where replicas differ.
    SystemExit
        On every rank, with the code 75: a signal has come, or the time is over, and a checkpoint is
        saved.

    Examples
    --------
    >>> import tempfile
    >>> from mpipipe.job import inprocess
    >>> from mpipipe.language.models import GPT
    >>> from mpipipe.train import TrainConfig, train
    >>> sizes = dict(dim=8, layers=1, heads=1, seq_len=8, batch=4, steps=2, sample_bytes=0)
    >>> config = TrainConfig(**sizes, device="cpu", out=tempfile.mkdtemp())
    >>> records = inprocess.run(2, lambda comm: train(config, GPT, comm))  # doctest: +ELLIPSIS
    mpipipe: 2 ranks = pipe 2 x data 1 x seq 1; one_f_one_b, 2 stages, 4 micro-batches
    ...
    mpipipe: ok steps=2 ...
    >>> records[0].step
    2
    """
    comm = runtime.resolve(comm)
    check_same_config(group_of(comm), config)
    task = TextTask.of(config, architecture, comm, data)
    return run(task, task.config, comm)


class TextTask(Task):
    """The training of a model on windows of text; `base` is the model it begins from, if any."""

    read_ahead = True
    per_second = "tokens_per_second"

    def __init__(
        self,
        config: TrainConfig,
        architecture: Architecture,
        *,
        vocab: int = BYTES,
        tuning: fine_tuning.FineTuning | None = None,
        base: ModelFolder | None = None,
        data: Source | None = None,
    ) -> None:
        self.config = config
        self.architecture = architecture
        self.vocab = vocab
        self.base = base
        self.tuning = tuning or fine_tuning.FineTuning()
        self.data = data
        self.listing: DataListing | Source | None = None
        self.source: Source | None = None  # None on ranks that read no data
        self.freeze = self.tuning.freeze
        self.everywhere = config.packing == "segments"
        self.layout = config.layout
        self.packing = Packing(1)  # another one if `everywhere`
        self.units = config.seq_len
        self.copies = config.sample_bytes > 0
        self.folders = (weights.FOLDER, fine_tuning.INSIDE)

    @classmethod
    def of(
        cls,
        config: TrainConfig,
        architecture: Architecture,
        comm: Communicator,
        data: Source | None = None,
    ) -> TextTask:
        """Open the folders of the model to begin from and of adapters; collective."""
        base = None
        if config.from_ is not None:
            config, base = fine_tuning.find_pretrained(config, comm)
        tuning = fine_tuning.find_tuning(config, comm)
        return cls(config, architecture, tuning=tuning, base=base, data=data)

    # -- the model, on paper -----------------------------------------------------------------------

    def find_data(self, group: RankGroup) -> None:
        self.listing = find_data(self.config, self.data, group)
        self.vocab = self.listing.vocab
        self.unit = self.listing.unit

    @cached_property
    def model(self) -> GPT:
        """The sizes of the model; ConfigError where they cannot be, or the data have more ids."""
        config = self.config
        check_layers(config.layers)
        sizes = {name: getattr(config, name) for name in ("seq_len", "dropout", *FROM_FOLDER)}
        sizes["vocab"] = config.vocab or self.vocab
        if sizes["vocab"] == BYTES:
            del sizes["vocab"]
        if self.base is None:
            model = self.architecture(**sizes)
        else:
            model = replace(self.base.model, seq_len=config.seq_len, dropout=config.dropout)
        if config.head_slices is not None:
            model = replace(model, head_slices=config.head_slices)
        if model.vocab < self.vocab:
            raise ConfigError(
                "the data have more token ids than the model",
                found=f"{self.vocab} token ids in the data, {model.vocab} in the model",
                expected=f"a model of at least {self.vocab}",
                remedy="tokenize the text with the tokenizer of the model, or leave out vocab",
            )
        return model

    @property
    def head_slices(self) -> int:
        """Number of slices of the head."""
        return self.model.head_slices

    def layers(self, shard: Shard) -> list[nn.Layer]:
        length = self.config.seq_len
        attend = shard.attend(length, causal=True)
        if self.everywhere:
            attend = PackedAttend(attend, self.packing)
        positions = None
        if shard.comm.size > 1 and not shard.cut:
            positions = shard.positions(length)
        return self.tuning.layers(self.model.build(attend, positions, labels=True))

    def costs(self) -> Sequence[float]:
        return self.tuning.costs(self.model, self.trained())

    def slice_lengths(self, length: int, slices: int) -> Sequence[int]:
        """Return lengths of slices that take equal times, with equal shards if they can be."""
        seq = self.config.seq
        unit = 1
        if 1 < seq <= length // (2 * slices):
            unit = 2 * seq
        if length >= 8 * slices * math.lcm(unit, BLOCK):
            unit = math.lcm(unit, BLOCK)
        window = None
        windows = self.model.windows
        if windows is not None and None not in windows:
            window = max(filter(None, windows))
        return slice_lengths(length, slices, self.model.dim, window=window, unit=unit)

    def sample_bytes(self, rows: int, dtype: str) -> tuple[int, int]:
        config = self.config
        length = -(-config.seq_len // config.seq)
        hidden = rows * length * self.model.dim * arrays.dtype(dtype).itemsize
        return 16 * config.seq_len, hidden  # ids are int64

    def check(self, plan: LayerPlan, mesh: Mesh) -> None:
        self.tuning.check(self.model, self.origin)
        if self.base is not None:
            self.base.with_slices(self.head_slices)  # raises where it has others
        if self.everywhere and self.model.positions == "learned":
            raise ConfigError(
                "documents cannot be packed for a model with learned positions, which begin with "
                "the sequence",
                found="packing = segments",
                expected="a model with rotary positions, to which only distances count",
                remedy="leave packing out",
            )

    # -- data --------------------------------------------------------------------------------------

    def open_data(self, plan: LayerPlan, mesh: Mesh) -> None:
        placement = plan.schedule.placement
        listing = self.listing
        self.packing.microbatches = plan.schedule.microbatches
        assert listing is not None
        reads = mesh.pipe.rank in (placement[0], placement[-1]) or self.everywhere
        folder = None
        if self.base is not None:
            folder = self.base.path
        self.source, self.tokens = open_data(self.config, mesh.comm, listing, reads, folder)
        if not self.everywhere or mesh.rank != 0 or self.source is None:
            return
        if self.source.train.starts(0, 1) is None:
            write(
                "mpipipe: packing = segments changes nothing: the data do not say where documents "
                "begin\n"
            )

    def example(self, rows: int, microbatches: int, shard: Shard) -> Pair:
        """Draw token ids at random. Documents, where they count, are as long as sequences."""
        shape = (2, rows, self.config.seq_len)
        inputs, targets = np.random.default_rng(0).integers(0, self.vocab, size=shape)
        if self.everywhere:
            self.packing.microbatches = microbatches
            if shard.comm.size == 1:
                length = self._length(shard)
            else:
                length = shape[2]
            self.packing.begin(np.zeros((rows, length), np.int64))
        return self._labelled(shard.part(inputs), shard.part(targets))

    def _labelled(self, inputs: object, targets: object) -> Pair:
        """Return inputs and targets; slices of the head take the targets as labels."""
        if self.head_slices > 1:
            inputs = arrays.Branches(inputs, labels=targets)
        return inputs, targets

    def batch(self, step: int, rows: range, shard: Shard) -> Pair:
        assert self.source is not None
        text = self.source.train
        return self._windows(text, training_starts(self.config, len(text), step, rows), shard)

    def validation(self, index: int, rows: range, shard: Shard) -> Pair:
        assert self.source is not None
        text = self.source.validation
        return self._windows(text, validation_starts(self.config, len(text), index, rows), shard)

    def _windows(self, text: Tokens, starts: list[int], shard: Shard) -> Any:
        inputs, targets = read_windows(text, starts, self.config.seq_len)
        pair = self._labelled(shard.part(inputs), shard.part(targets))
        if not self.everywhere:
            return pair
        return *pair, segments(text, starts, self.config.seq_len)

    def begin(self, more: Any) -> None:
        self.packing.begin(more)

    @property
    def fingerprint(self) -> str:
        if self.listing is None:
            return ""
        return self.listing.fingerprint

    @property
    def origin(self) -> huggingface.Origin:
        """Where the model comes from, or else the folder of the tokenizer."""
        if self.base is not None:
            return self.base.origin
        if self.config.tokenizer is None:
            return huggingface.Origin()
        path = Path(self.config.tokenizer)
        return huggingface.Origin(path if path.is_dir() else path.parent)

    # -- the model, on this rank -------------------------------------------------------------------

    loss = staticmethod(nn.softmax_cross_entropy)

    def loss_for(self, stage: nn.Stage, rows: int, shard: Shard) -> Callable[..., Any]:
        """Return the loss after a stage: in tiles, with its head, where the logits are large."""
        if self.head_slices > 1:
            return nn.mean_of_losses
        tiles = worth_tiles(stage, rows * max(shard.slice_lengths or [self._length(shard)]))
        if tiles:
            return nn.HeadCrossEntropy(stage)
        return nn.softmax_cross_entropy

    @property
    def alike(self) -> bool:
        # Slices of a head hand on several arrays.
        return self.head_slices == 1

    def _length(self, shard: Shard) -> int:
        """Return how many positions of a sequence this rank has."""
        return shard.divide(self.config.seq_len).length(shard.rank)

    def load(self, stages: Sequence[nn.Stage], mesh: Mesh) -> None:
        if self.base is not None:
            folder = self.base.with_slices(self.head_slices)  # `check` has refused others
            folder.load(without_adapters(stages, merged=False), mesh)
        self.tuning.load(stages, self.model, self.origin, mesh)

    # -- what is said and written ------------------------------------------------------------------

    def sizes(self) -> Values:
        return asdict(self.model)

    def resolve(self, keys: Values) -> Values:
        config = self.config
        for key in FROM_FOLDER:
            keys[key] = getattr(self.model, key)
        for name in ("tokenizer", "from_"):
            if keys[name] is not None:
                keys[name] = absolute(keys[name])
        if config.lora is not None and os.path.isdir(config.lora):
            keys["lora"] = os.path.abspath(config.lora)
        return keys | {"data": tuple(map(os.path.abspath, config.data))}

    @property
    def handed_over(self) -> str | None:
        if self.data is None:
            return None
        return self.fingerprint

    def description(self, place: str) -> str:
        config = self.config
        source = self.source
        text = ""
        if source is not None:
            text = f", {len(source.train):,} {self.unit} of text"
        return (
            f"{self.parameters_in_words()}, {config.dtype} on "
            f"{place}, batch {config.batch} x {config.seq_len} {self.unit}{text}"
        )

    def beginning(self) -> str:
        if self.base is None:
            return ""
        return f"the model in {self.base.path}"

    def derived(self, loss: float | None, validation: float | None) -> Values:
        return self.tokens.bits(loss, validation)

    def save(
        self, out: Path, plan: LayerPlan, stages: Sequence[nn.Stage], mesh: Mesh, step: int
    ) -> None:
        """Write the model to weights/, with adapters merged, and adapters to adapter/ as well."""
        lora = self.tuning.lora
        if lora is not None:
            save_adapter(
                out / fine_tuning.INSIDE,
                lora,
                self.model,
                weights.own_arrays(stages),
                mesh,
                self.origin,
            )
        whole = without_adapters(stages, merged=True)
        weights.save(out / weights.FOLDER, self.model, whole, mesh, step, self.origin)

    def sample(self, plan: LayerPlan, pipeline: Pipeline, mesh: Mesh, shard: Shard) -> str:
        """Let the model continue validation text."""
        config = self.config
        count = config.sample_bytes
        if count == 0:
            return ""
        first = plan.schedule.placement[0]
        room = longest_text(self.model) or sys.maxsize
        prompt = None
        if mesh.pipe.rank == first and self.source is not None:
            text = self.source.validation
            prompt = text.read(0, min(PROMPT_BYTES, len(text), room // 2)).tolist()
        prompt = group_of(mesh.pipe).broadcast("train: the prompt of the sample", prompt, first)
        count = min(count, room - len(prompt))
        dtype = pipeline.stages[0].parameters.flat.dtype.name
        copy = partial(weights.copy, without_adapters(pipeline.stages, merged=True))
        forward = plan.schedule.forward_only_part(1)
        # A whole sequence takes the order of the first slice.
        orders = []
        for order in forward.orders:
            orders.append(tuple(action for action in order if action.microbatch == 0))
        alone = replace(plan, schedule=replace(forward, orders=orders, slices=1))
        with build_decoder(self.model, alone, mesh, dtype, len(prompt) + count, copy) as decoding:
            (answer,) = answers(decoding, [prompt], count, Sampling(TEMPERATURE, config.seed))
        title = f"--- sample (prompt: {len(prompt)} {self.unit} of validation text):"
        return "\n".join([title, folded(self.tokens.text(prompt + answer.tokens)), "---"])
