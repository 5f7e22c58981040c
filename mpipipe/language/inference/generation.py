"""Answers to many prompts at once: which tokens go through the model, and what is drawn.

    sequence 0   prompt prompt prompt prompt | a | a | .
    sequence 1   prompt                      | a | a | a
    sequence 2   prompt prompt               | a | .

One forward takes what waits of all sequences, some side by side in each micro-batch.
A batch of prompts ends when all of its answers have ended. What comes next follows from the tokens
so far, which all ranks know, so they need no further message for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NoReturn, TypeAlias

import numpy as np

from mpipipe import arrays, nn, schedules
from mpipipe.attention import KVCache
from mpipipe.comm import Mesh
from mpipipe.errors import ArgumentError, ConfigError, NonFiniteError
from mpipipe.even_split import even_split
from mpipipe.job import group_of
from mpipipe.language.data.windows import generator
from mpipipe.language.models.gpt import GPT, check_layers
from mpipipe.pipeline import Pipeline
from mpipipe.planning import LayerPlan

# Fewer sequences are not divided: a product with few rows costs as much as one with a single row.
LEAST = 4


@dataclass
class Answer:
    """The answer to a prompt so far; `ended` is "stop" or "count" once it is whole."""

    number: int
    place: int  # number in the batch
    prompt: Sequence[int]
    tokens: list[int] = field(default_factory=list)
    fed: int = 0  # tokens that the caches have, or are about to get
    ended: str = ""


class Piece(NamedTuple):
    """Consecutive tokens of one sequence, next to other pieces in a micro-batch (1, tokens)."""

    sequence: int  # its place in the batch
    start: int  # position of the first token; a sequence that begins has 0
    tokens: list[int]


def check_prompts(prompts: Sequence[Sequence[int]], count: int, vocab: int) -> None:
    """Raise ArgumentError for no or empty prompts, unknown ids, and a count below 1."""
    if not prompts:
        raise ArgumentError("there are no prompts", expected="at least one")
    if count < 1:
        raise ArgumentError("number of tokens to generate", found=count, expected="at least 1")
    for number, prompt in enumerate(prompts):
        name = f"prompt {number}"
        if len(prompts) == 1:
            name = "the prompt"
        if not prompt:
            raise ArgumentError(
                f"{name} is empty", expected="at least one token, which the answer then continues"
            )
        strange = next((token for token in prompt if not 0 <= token < vocab), None)
        if strange is not None:
            raise ArgumentError(
                f"{name} has a token that the model does not know",
                found=strange,
                expected=f"ids from 0 to {vocab - 1}",
            )


def answers(
    decoder: Decoder, prompts: Sequence[Sequence[int]], count: int, sampling: Sampling
) -> Iterator[Answer]:
    """Yield the answers to all prompts in their order, each as soon as it is whole; collective.

    One rank draws for all: ranks whose logits differ in a last bit still write the same text.
    `check_prompts` has accepted the prompts, and an answer has `count` tokens at most. Raises
    NonFiniteError, on every rank.
    """
    for first in range(0, len(prompts), decoder.batch):
        batch = []
        for place, prompt in enumerate(prompts[first : first + decoder.batch]):
            batch.append(Answer(first + place, place, prompt))
        unfinished = [*batch]
        while unfinished:
            logits = decoder.forward(_next_parts(unfinished, decoder.microbatches))
            tokens = _draw_all(decoder, unfinished, logits, sampling)
            for answer, token in zip([*unfinished], tokens):
                answer.tokens.append(token)
                if token in sampling.stop:
                    answer.ended = "stop"
                elif len(answer.tokens) == count:
                    answer.ended = "count"
                if answer.ended:
                    unfinished.remove(answer)
            while batch and batch[0].ended:
                yield batch.pop(0)


def _next_parts(unfinished: Sequence[Answer], microbatches: int) -> list[list[Piece]]:
    """Return the micro-batches of the next forward: the tokens that caches do not have."""
    parts: list[list[Piece]] = []
    for places in even_split(len(unfinished), min(microbatches, -(-len(unfinished) // LEAST))):
        parts.append([])
        for answer in unfinished[places.start : places.stop]:
            tokens = [*answer.prompt, *answer.tokens]
            parts[-1].append(Piece(answer.place, answer.fed, tokens[answer.fed :]))
            answer.fed = len(tokens)
    return parts


def _draw_all(
    decoder: Decoder, unfinished: Sequence[Answer], logits: Sequence[np.ndarray], sampling: Sampling
) -> list[int]:
    """Return the next token of each answer, on every rank; collective."""
    tokens: list[int] = []
    group = group_of(decoder.mesh.comm)
    with group.raise_together("generate: the next tokens"):
        if decoder.mesh.rank == decoder.drawing:
            for answer, row in zip(unfinished, logits):
                place = len(answer.tokens)
                uniform = generator(sampling.seed, "sample", place, answer.number)
                tokens.append(draw(row, sampling, uniform))
    return group.broadcast("generate: the next tokens", tokens, decoder.drawing)


# -- A pipeline that continues sequences of tokens: layers with caches of keys and values


# The pieces of each micro-batch of a forward: the decoder sets them, caches read them.
Underway: TypeAlias = list[Sequence[Piece]]


@dataclass(frozen=True)
class Decoder:
    """A pipeline of stages with caches, for as many sequences at once as `batch`."""

    pipeline: Pipeline
    mesh: Mesh
    underway: Underway
    batch: int

    @property
    def microbatches(self) -> int:
        """Most micro-batches of a forward."""
        return self.pipeline.schedule.microbatches

    @property
    def drawing(self) -> int:
        """The rank of the mesh that has the logits, and draws for all."""
        return self.mesh.rank_of(self.pipeline.schedule.placement[-1], 0, 0)

    def forward(self, parts: Sequence[Sequence[Piece]]) -> list[np.ndarray]:
        """Run a forward of one to `microbatches` micro-batches, the same on every rank; collective.

        Returns the logits (vocab,) after each piece, on the ranks of the last stage; none
        elsewhere.
        """
        self.underway[:] = parts
        inputs = None
        if self.mesh.pipe.rank == self.pipeline.schedule.placement[0]:
            inputs = []
            for pieces in parts:
                tokens: list[int] = []
                for piece in pieces:
                    tokens += piece.tokens
                inputs.append(np.array([tokens], np.int64))
        outputs: Any = self.pipeline.forward(inputs)  # arrays, since the inputs are
        logits: list[np.ndarray] = []
        for output, pieces in zip(outputs or (), parts):
            logits += [*output[0, : len(pieces)]]
        return logits


class SequenceCaches(nn.Attend):
    """A KVCache for each sequence of a batch, in one layer."""

    def __init__(self, underway: Underway, capacity: int, window: int) -> None:
        self.underway = underway
        self.capacity = capacity
        self.window = window
        self.poll: Callable[[], object] = lambda: None
        self.caches: dict[int, KVCache] = {}
        self.pieces: Sequence[Piece] = ()  # pieces of the micro-batch under way

    def begin(self, position: nn.Position) -> None:
        self.pieces = self.underway[position.microbatch]

    def positions(self, rows: int) -> np.ndarray:
        positions: list[int] = []
        for piece in self.pieces:
            positions += range(piece.start, piece.start + len(piece.tokens))
        return np.array(positions)

    def forward(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, None]:
        outs = []
        stop = 0
        for piece in self.pieces:
            if piece.start == 0:
                self.caches[piece.sequence] = KVCache(self.capacity, self.window)
            cache = self.caches[piece.sequence]
            cache.poll = self.poll
            start = stop
            stop += len(piece.tokens)
            outs.append(cache.forward(*(array[:, start:stop] for array in (q, k, v)))[0])
        return np.concatenate(outs, axis=1), None

    def backward(self, dout: arrays.Array, saved: object, room: object = None) -> NoReturn:
        raise ArgumentError("a decoder has no backward")


class LastRows(nn.Sequential):
    """Layers that take the last row of each piece of a micro-batch: the norm, and the head.

    `rows`: rows that a head is given at most which other stages go on with, since the shapes of
    messages must follow from those of the inputs; 0 for one that this stage has as a whole.
    """

    def __init__(self, layers: Sequence[nn.Layer], underway: Underway, rows: int) -> None:
        super().__init__(layers)
        self.underway = underway
        self.rows = rows

    def forward(self, x: arrays.Array) -> tuple[arrays.Array, nn.Saved]:
        pieces = self.underway[self.stage.position.microbatch]
        ends = [*np.cumsum([len(piece.tokens) for piece in pieces]) - 1]
        ends += [0] * (min(self.rows, x.shape[1]) - len(ends))
        return super().forward(np.ascontiguousarray(x[:, ends]))


@contextmanager
def build_decoder(
    model: GPT,
    plan: LayerPlan,
    mesh: Mesh,
    dtype: str,
    capacity: int,
    load_weights: Callable[[Sequence[nn.Stage]], None],
    *,
    batch: int = 1,
) -> Iterator[Decoder]:
    """Build a decoder of a model, with `batch` sequences of `capacity` tokens; collective.

    Attention looks back over the last `model.seq_len` positions, or the layer's own window where it
    is shorter, so no distance occurs that the rotary positions did not have in training.
    `load_weights` may be collective; it sets the parameters of this rank's stages, which are on the
    host.

    Raises ConfigError, on every rank, where learned positions are fewer than `capacity` - 1.
    """
    group = group_of(mesh.comm)
    # There are no labels.
    schedule = replace(plan.schedule.forward_only_part(plan.schedule.microbatches), skips=())
    underway: Underway = []

    def attend(window: int | None = None) -> SequenceCaches:
        return SequenceCaches(underway, capacity, min(window or model.seq_len, model.seq_len))

    with group.raise_together("generate: the decoder"):
        longest = longest_text(model)
        if longest is not None and capacity > longest:
            raise ConfigError(
                "the text would be longer than the model's learned positions",
                found=f"{capacity:,} tokens in all",
                expected=f"at most {longest:,}: {longest - 1:,} positions, and one token more at "
                "the end",
                remedy="generate fewer tokens, or give a shorter prompt",
            )
        layers = model.build(attend)
        head = len(layers) - model.head_slices
        rows = 0
        if head < plan.layer_ranges[-1][0]:
            rows = batch
        layers[head] = LastRows([*layers[head].children.values()], underway, rows)
        stages = plan.stages(mesh.pipe.rank, layers, dtype, 0)
    with group.raise_together("generate: the parameters"):
        load_weights(stages)
    with Pipeline(stages, schedule, mesh.pipe, replicas=mesh.replicas) as pipeline:
        yield Decoder(pipeline, mesh, underway, batch)


# Micro-batches for each rank of a pipeline: one alone leaves all ranks but one waiting.
IN_FLIGHT = 4


def forward_plan(model: GPT, ranks: int, rows: int = 1) -> LayerPlan:
    """Return the cut of a model for forwards of `rows` rows; raise ConfigError."""
    microbatches = 1
    if ranks > 1:
        microbatches = IN_FLIGHT * ranks
    check_layers(model.layers)
    schedule = schedules.forward_only(ranks, 1, microbatches)
    return LayerPlan(schedule, schedules.partition(model.costs(), schedule.stages), rows)


def longest_text(model: GPT) -> int | None:
    """Return the most tokens of a text with learned positions; None for other models.

    The last token is not read.
    """
    return model.max_positions and model.max_positions + 1


# -- How the next token is drawn from logits: in float64, with one answer to ties
#
# The random number for a token follows from (seed, number of the prompt, number of the token in its
# answer) alone. So it does not depend on the ranks, nor on the prompts beside it.


@dataclass(frozen=True)
class Sampling:
    """Which tokens may be drawn, and when an answer ends.

    temperature : divides the logits; 0 takes the likeliest token, of equally likely ones that with
        the lowest id
    seed, stop : seed of the draws; ids that end an answer
    """

    temperature: float = 0.8
    seed: int = 0
    stop: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ArgumentError(
                "temperature", found=self.temperature, expected="a finite number of at least 0"
            )


def draw(logits: np.ndarray, sampling: Sampling, uniform: np.random.Generator) -> int:
    """Draw an id from softmax(logits / temperature), (vocab,)."""
    finite = np.isfinite(logits)
    if not finite.all():
        raise NonFiniteError(
            "the logits of the model are not finite",
            found=f"{np.count_nonzero(~finite)} of {finite.size} are not",
            expected="finite numbers",
            remedy="take weights of a training whose loss is finite, or a wider dtype",
        )
    if sampling.temperature == 0:
        return int(np.argmax(logits))
    scaled = (logits.astype(np.float64) - logits.max()) / sampling.temperature
    cumulative = np.cumsum(np.exp(scaled))
    return int(np.searchsorted(cumulative, uniform.random() * cumulative[-1], side="right"))


# -- How text of unknown content is shown ----------------------------------------------------------


def shown(text: str) -> str:
    """Put a replacement character for all that would not show, or would move a cursor."""
    characters = []
    for character in text:
        if not character.isprintable() and character not in "\n\t":
            character = "\N{REPLACEMENT CHARACTER}"
        characters.append(character)
    return "".join(characters)
