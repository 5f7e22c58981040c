"""Answers to many prompts at once: which tokens go through the model next, and what is drawn after them.

    slot 0   prompt prompt prompt prompt a a a .        one forward = the tokens that wait in all slots, side by side,
    slot 1   prompt a a a a a . | prompt prompt a a     cut into micro-batches of equal numbers of tokens:
    slot 2   prompt prompt a a a a a a a
                                                        | slot 1: 1, slot 2: 1, slot 0: 14 | slot 0: 16 | slot 0: 16 |

A slot that becomes free takes the next prompt (Yu et al., "Orca", 2022). A long prompt goes through in pieces, which
follow each other through the stages of the pipeline (Agrawal et al., "Sarathi-Serve", 2024). What comes next follows
from the tokens so far, which all ranks know, so they need no further message for it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from mpipipe import arrays, nn, schedules
from mpipipe.attention import Local, Piece, Pieces, SlotCache
from mpipipe.comm import Mesh
from mpipipe.errors import ArgumentError, ConfigError, NonFiniteError
from mpipipe.even_split import even_split
from mpipipe.job import group_of, raise_on_all
from mpipipe.language.data.windows import generator
from mpipipe.language.models.gpt import GPT, Model, check_layers
from mpipipe.pipeline import Pipeline
from mpipipe.planning import LayerPlan, attentions, check_memory, parameters_of
from mpipipe.train import check_actions

MOST = 512  # tokens of a micro-batch: its activations stay small
LEAST = 4  # fewer tokens are not cut further: a product with few rows costs as much as one with a single row


class Drawn(NamedTuple):
    """One token of the answer to a prompt; `ended` says why the answer has ended, "stop" or "count", else None."""

    prompt: int
    token: int
    ended: str | None


@dataclass
class _Sequence:
    """A prompt in a slot, with its answer so far."""

    prompt: int
    slot: int
    tokens: list[int]
    asked: int  # length of the prompt
    fed: int = 0  # tokens that the caches have, or have been planned to get

    @property
    def waiting(self) -> int:
        return len(self.tokens) - self.fed


def check_prompts(prompts: Sequence[Sequence[int]], count: int, vocab: int) -> None:
    """Raise ArgumentError for no prompts, an empty one, ids that the model does not have, and a count below 1."""
    if not prompts:
        raise ArgumentError("there are no prompts", expected="at least one")
    if count < 1:
        raise ArgumentError("number of tokens to generate", found=count, expected="at least 1")
    for number, prompt in enumerate(prompts):
        name = "the prompt" if len(prompts) == 1 else f"prompt {number}"
        if not prompt:
            raise ArgumentError(f"{name} is empty", expected="at least one token, which the answer then continues")
        strange = next((token for token in prompt if not 0 <= token < vocab), None)
        if strange is not None:
            raise ArgumentError(
                f"{name} has a token that the model does not know", found=strange, expected=f"ids from 0 to {vocab - 1}"
            )


def answers(decoder: Decoder, prompts: Sequence[Sequence[int]], count: int, sampling: Sampling) -> Iterator[Drawn]:
    """Yield the tokens of the answers to all prompts as they are drawn, the same on every rank; collective.

    One rank draws for all: ranks whose logits differ in a last bit still write the same text. `check_prompts` has
    accepted the prompts, and an answer has `count` tokens at most. Raises NonFiniteError, on every rank.
    """
    group = group_of(decoder.mesh.comm)
    waiting = deque(enumerate(prompts))
    free = deque(range(decoder.slots))
    active: list[_Sequence] = []
    while waiting or active:
        while waiting and free:
            number, prompt = waiting.popleft()
            active.append(_Sequence(number, free.popleft(), list(prompt), len(prompt)))
        parts, asking = _next_parts(active, count, decoder.microbatches)
        logits = decoder.forward(parts)
        tokens, error = list[int](), None
        if decoder.mesh.rank == decoder.drawing:
            try:
                tokens = [
                    draw(row, sampling, generator(sampling.seed, "sample", len(each.tokens) - each.asked, each.prompt))
                    for each, row in zip(asking, logits)
                ]
            except NonFiniteError as caught:
                error = caught
        tokens, error = group.broadcast("generate: the next tokens", (tokens, error), decoder.drawing)
        if error is not None:
            raise_on_all(decoder.drawing, error, group)
        for each, token in zip(asking, tokens):
            each.tokens.append(token)
            full = len(each.tokens) - each.asked == count
            ended = "stop" if token in sampling.stop else "count" if full else None
            if ended is not None:
                active.remove(each)
                free.append(each.slot)
            yield Drawn(each.prompt, token, ended)


def _next_parts(active: Sequence[_Sequence], count: int, microbatches: int) -> tuple[list[Part], list[_Sequence]]:
    """Return the micro-batches of the next forward, and the sequences that get a token from it, in its order.

    Sequences that wait for one token alone come first: a long prompt must not hold them up.
    """
    line = sorted(active, key=lambda each: each.waiting > 1)  # stable: by number otherwise
    tokens = min(sum(each.waiting for each in line), microbatches * MOST)
    ranges = even_split(tokens, min(microbatches, -(-tokens // LEAST)))
    parts: list[Part] = []
    asking: list[_Sequence] = []
    upcoming = iter(line)
    each = next(upcoming)
    for wanted in ranges:
        pieces: list[Piece] = []
        taken: list[int] = []
        while len(taken) < len(wanted):
            if not each.waiting:
                each = next(upcoming)
            rows = min(each.waiting, len(wanted) - len(taken))
            ends = rows == each.waiting
            pieces.append(Piece(each.slot, each.fed, rows, each.asked + count, ends))
            taken += each.tokens[each.fed : each.fed + rows]
            each.fed += rows
            if ends:
                asking.append(each)
        parts.append((pieces, taken))
    return parts, asking


# -- A pipeline that continues sequences of tokens: the layers of a model, each with a cache of keys and values -------


LoadWeights = Callable[[Sequence[nn.Stage]], None]
Part = tuple[list[Piece], list[int]]  # the pieces of a micro-batch, and its tokens


class Decoder:
    """A pipeline of stages with caches, in whose `slots` sequences of up to `capacity` tokens grow.

    `first`: whether this rank takes the tokens; `drawing`: the rank of the mesh that has the logits, and draws for all.
    """

    def __init__(self, pipeline: Pipeline, mesh: Mesh, held: list[list[Piece]], slots: int, capacity: int) -> None:
        placement = pipeline.schedule.placement
        self.pipeline, self.mesh, self.slots, self.capacity = pipeline, mesh, slots, capacity
        self.microbatches = pipeline.schedule.microbatches
        self.first, self.drawing = mesh.pipe.rank == placement[0], mesh.rank_of(placement[-1], 0, 0)
        self._held = held

    def forward(self, parts: Sequence[Part]) -> list[np.ndarray]:
        """Run a forward of one to `microbatches` micro-batches, the same on every rank; collective.

        Returns the logits (vocab,) after each piece that asks for them, on the ranks of the last stage; none elsewhere.
        """
        self._held[:] = [pieces for pieces, _ in parts]
        inputs = [np.array([tokens], np.int64) for _, tokens in parts] if self.first else None
        outputs: Any = self.pipeline.forward(inputs)  # arrays, since the inputs are
        if outputs is None:
            return []
        return [row for output, (pieces, _) in zip(outputs, parts) for row in output[0, : sum(p.ends for p in pieces)]]


class DecodingStage:
    """A stage of a decoder: tells the caches the pieces of a micro-batch, and computes the logits that are asked for.

    `body` and `head`: what it has of the layers before the head, and of the head; either may have no layers. `held`:
    the pieces of each micro-batch. `slots`: rows that a head is given at most which other stages go on with, since the
    shapes of messages must follow from those of the inputs; 0 for one that this stage has as a whole.
    """

    def __init__(
        self, inner_stages: list[nn.Stage], pieces: Pieces, held: list[list[Piece]], begins_head: bool, slots: int
    ) -> None:
        self.inner_stages, self.pieces, self.held = inner_stages, pieces, held
        self.begins_head, self.slots = begins_head, slots

    def forward(self, x: Any) -> tuple[Any, None]:
        """Return hidden states, or what the head makes of the last one of each piece that asks for logits."""
        *body, last = self.inner_stages
        pieces = self.held[self.inner_stages[0].position.microbatch]
        self.pieces.begin(pieces)
        for stage in body:
            x, _ = stage.forward(x)
        if self.begins_head:
            ends = np.cumsum([piece.rows for piece in pieces]) - 1
            asked = [end for end, piece in zip(ends, pieces) if piece.ends]
            asked += [0] * (min(self.slots, x.shape[1]) - len(asked))
            if not asked:
                return x[:, :0], None
            x = np.ascontiguousarray(x[:, asked])
        return last.forward(x)[0], None


@contextmanager
def build_decoder(
    model: Model, plan: LayerPlan, mesh: Mesh, dtype: str, capacity: int, load_weights: LoadWeights, *, slots: int = 1
) -> Iterator[Decoder]:
    """Build a decoder of a model, with as many micro-batches in flight as its schedule has; collective.

    Attention looks back over the last `model.seq` positions, or the layer's own window where that is shorter, so no
    distance occurs that the rotary positions did not have in training. The ranks of `mesh.seq` share the caches.
    `load_weights` may be collective; it sets the parameters of this rank's stages, which are on the host.

    Raises ConfigError, on every rank, if parameters and caches cannot fit into memory, and where learned positions are
    fewer than `capacity` - 1.
    """
    group = group_of(mesh.comm)
    schedule = replace(plan.schedule.forward_only_part(plan.schedule.microbatches), skips=())  # no labels
    with group.raise_together("generate: the memory of a decoder"):
        check_decoding(model, plan, mesh.pipe.rank, dtype, (slots, capacity), mesh.seq.size)
    pieces, held = Pieces(), list[list[Piece]]()

    def attend(window: int | None = None) -> SlotCache:
        back = model.seq if window is None else min(window, model.seq)
        return SlotCache(pieces, slots, capacity, mesh.seq, window=back)

    layers = model.build(attend)
    with group.raise_together("generate: the positions"):
        longest = longest_text(layers)
        if longest is not None and capacity > longest:
            raise ConfigError(
                "the text would be longer than the model's learned positions",
                found=f"{capacity:,} tokens in all",
                expected=f"at most {longest:,}: {longest - 1:,} positions, and one token more at the end",
                remedy="generate fewer tokens, or give a shorter prompt",
            )
    with group.raise_together("generate: the stages"):
        stages, head = [], len(layers) - getattr(model, "head_slices", 1)
        for start, stop in plan.ranges_of(mesh.pipe.rank):
            begins = start <= head < stop
            cuts = [start, head, stop] if begins else [start, stop]
            inner = [nn.Stage(layers[low:high], dtype=dtype, first=low) for low, high in pairwise(cuts)]
            stages.append(DecodingStage(inner, pieces, held, begins, slots if stop < len(layers) else 0))
    with group.raise_together("generate: the parameters"):
        load_weights([inner for stage in stages for inner in stage.inner_stages])
    with Pipeline(stages, schedule, mesh.pipe, replicas=mesh.replicas) as pipeline:
        yield Decoder(pipeline, mesh, held, slots, capacity)


IN_FLIGHT = 4  # micro-batches for each rank of a pipeline: one alone leaves all ranks but one waiting


def forward_plan(model: GPT, ranks: int, rows: int = 1) -> LayerPlan:
    """Return the cut of a model for forwards alone, with micro-batches of `rows` rows. Raises ConfigError."""
    microbatches = 1 if ranks == 1 else IN_FLIGHT * ranks
    check_layers(model.layers)
    check_actions("forward_only", ranks, 1, microbatches)
    schedule = schedules.forward_only(ranks, 1, microbatches)
    return LayerPlan(schedule, schedules.partition(model.costs(), schedule.stages), rows)


def longest_text(layers: Sequence[nn.Layer]) -> int | None:
    """Return how many tokens a text may have for learned positions, None for a model without; the last is not read."""
    tables = [layer.count for top in layers for _, layer in top.walk("") if isinstance(layer, nn.LearnedPositions)]
    return min(tables) + 1 if tables else None


def check_decoding(model: Model, plan: LayerPlan, rank: int, dtype: str, caches: tuple[int, int], ranks: int) -> None:
    """Raise ConfigError if parameters and caches (sequences, positions) on `ranks` ranks surely exceed memory."""
    slots, capacity = caches
    layers = model.build(Local())
    own = [layers[place] for place in plan.layers_of(rank)]
    width = sum(2 * layer.kv_heads * layer.head_dim for layer in attentions(own))
    count, size = parameters_of(own), arrays.dtype(dtype).itemsize
    needs = {
        f"{count:,} parameters": 2 * count * size,  # a stage has as many gradients
        f"keys and values of {slots} x {capacity:,} positions": slots * -(-capacity // ranks) * width * size,
    }
    check_memory(
        f"generating text on pipeline rank {rank}",
        needs,
        "generate fewer tokens, or answers to fewer prompts at once, or use more ranks",
    )


# -- How the next token is drawn from the logits of a model: in float64, with ties that have one answer ---------------
#
# The random number for a token follows from (seed, number of the prompt, number of the token in its answer) alone.
# So it does not depend on the ranks, nor on the prompts beside it.


@dataclass(frozen=True)
class Sampling:
    """Which tokens may be drawn, and when an answer ends. Raises ArgumentError for a value out of its range.

    temperature : divides the logits; 0 takes the likeliest token, of equally likely ones that with the lowest id
    top_k, top_p : only this number of likeliest tokens (0: all); of these, those whose probabilities together reach
    this
    seed, stop : of the draws; ids that end an answer
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ArgumentError("temperature", found=self.temperature, expected="a finite number of at least 0")
        if self.top_k < 0:
            raise ArgumentError("top-k", found=self.top_k, expected="a number of tokens, or 0 for all")
        if not 0 < self.top_p <= 1:
            raise ArgumentError("top-p", found=self.top_p, expected="a probability above 0, and 1 at most")


def draw(logits: np.ndarray, sampling: Sampling, uniform: np.random.Generator) -> int:
    """Draw an id from softmax(logits / temperature), (vocab,), by top-k and then top-p; lower ids first where equal."""
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
    weights = np.exp(scaled)
    if sampling.top_k or sampling.top_p < 1:
        allowed = _allowed(scaled, weights, sampling.top_k or len(scaled), sampling.top_p)
        weights = np.where(allowed, weights, 0)
    cumulative = np.cumsum(weights)
    return int(np.searchsorted(cumulative, uniform.random() * cumulative[-1], side="right"))


def _allowed(scaled: np.ndarray, weights: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """Return which ids may be drawn."""
    order = np.argsort(-scaled, kind="stable")[:top_k]
    if top_p < 1:
        cumulative = np.cumsum(weights[order])
        order = order[: int(np.searchsorted(cumulative, top_p * cumulative[-1])) + 1]
    allowed = np.zeros(len(scaled), bool)
    allowed[order] = True
    return allowed


# -- Text from a model, and how text of unknown content is shown ------------------------------------------------------


def continued(
    decoder: Decoder, prompt: Sequence[int], count: int, vocab: int, *, temperature: float, seed: int
) -> list[int]:
    """Return `count` ids that continue those of `prompt`, the same on every rank; collective over the mesh."""
    with group_of(decoder.mesh.comm).raise_together("generate: the prompt"):
        sampling = Sampling(temperature=temperature, seed=seed)
        check_prompts([prompt], count, vocab)
    return [drawn.token for drawn in answers(decoder, [prompt], count, sampling)]


def shown(text: str) -> str:
    """Put a replacement character for all that would not show, or would move a cursor."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)
