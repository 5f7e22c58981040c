"""How the next token is drawn from the logits of a model: in float64, with ties that have one answer.

The random number for a token follows from (seed, number of the prompt, number of the token in its answer) alone. So it
does not depend on the ranks, nor on the prompts beside it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mpipipe.errors import ArgumentError, NonFiniteError
from mpipipe.nn import random


@dataclass(frozen=True)
class Sampling:
    """Which tokens may be drawn, and when an answer ends.

    Parameters
    ----------
    temperature : divides the logits; 0 takes the likeliest token, of equally likely ones that with the lowest id
    top_k : only the so many likeliest tokens; 0: all
    top_p : of these, only the likeliest ones whose probabilities together reach this
    seed : of the draws
    stop : ids that end an answer

    Raises ArgumentError for a value out of its range.
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


class Uniform(Protocol):
    """What draws: numpy's Generator."""

    def random(self) -> float:
        """Return a number from 0 to 1, without 1."""


def generator(seed: int, prompt: int, position: int) -> np.random.Generator:
    """Return the random numbers for one token of the answer to one prompt."""
    return np.random.Generator(np.random.Philox(key=random.key("sample", seed), counter=[0, 0, prompt, position]))


def draw(logits: np.ndarray, sampling: Sampling, uniform: Uniform) -> int:
    """Draw an id from softmax(logits / temperature), (vocab,), restricted by top-k and then by top-p.

    Where logits are equal, lower ids count as likelier. Raises NonFiniteError if a logit is NaN or infinite.
    """
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
