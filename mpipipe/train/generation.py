"""Answers to many prompts at once: which tokens go through the model next, and what is drawn behind them.

    slot 0   prompt prompt prompt prompt a a a .        one forward = the tokens that wait in all slots, side by side,
    slot 1   prompt a a a a a . | prompt prompt a a     cut into micro-batches of equal numbers of tokens:
    slot 2   prompt prompt a a a a a a a
                                                        | slot 1: 1, slot 2: 1, slot 0: 14 | slot 0: 16 | slot 0: 16 |

A slot that becomes free takes the next prompt (Yu et al., "Orca", 2022). A long prompt goes through in pieces, which
follow each other through the stages of the pipeline (Agrawal et al., "Sarathi-Serve", 2024). What comes next follows
from the tokens so far, which all ranks know, so they need no further message for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mpipipe.attention.slot_cache import Piece
from mpipipe.comm.consensus import raise_on_all
from mpipipe.comm.group import group_of
from mpipipe.errors import ArgumentError, NonFiniteError
from mpipipe.even_split import even_split
from mpipipe.train.decoder import Decoder, Part
from mpipipe.train.sampling import Sampling, draw, generator

MOST = 512  # tokens of a micro-batch: its activations stay small
LEAST = 4  # fewer tokens are not cut further: a product with few rows costs as much as one with a single row


class Drawn(NamedTuple):
    """One token of an answer.

    prompt : number of the prompt
    token : its id
    ended : None while the answer goes on; else why it has ended: "stop" or "count"
    """

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

    One rank draws for all: ranks whose logits differ in a last bit still write the same text. An answer depends on its
    prompt, its number and `sampling`; on the prompts beside it only as the rounding of a matrix product does on its
    number of rows.

    Parameters
    ----------
    decoder : what `build_decoder` makes, with nothing in its slots
    prompts : ids of each, which `check_prompts` accepts; the same on every rank
    count : tokens of an answer at most
    sampling : how to draw

    Raises, on every rank, NonFiniteError if the model gives logits that are NaN or infinite.
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
                    draw(row, sampling, generator(sampling.seed, each.prompt, len(each.tokens) - each.asked))
                    for each, row in zip(asking, logits)
                ]
            except NonFiniteError as caught:
                error = caught
        tokens, error = group.broadcast("generate: the next tokens", (tokens, error), decoder.drawing)
        if error is not None:
            raise_on_all(decoder.drawing, error, group)
        for each, token in zip(asking, tokens):
            each.tokens.append(token)
            ended = None
            if token in sampling.stop:
                ended = "stop"
            elif len(each.tokens) - each.asked == count:
                ended = "count"
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
