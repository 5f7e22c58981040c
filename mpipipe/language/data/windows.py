"""The windows that a step trains on.

They follow from (seed, step) alone, so all ranks that need them compute the same ones without a
message, and a training goes on at any step.

    order "random"     windows begin anywhere, all equally likely, with replacement
    order "epoch"      the data are cut into windows one after the other; each comes once in an
                       epoch, in an order that is drawn anew for each epoch
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

import numpy as np

from mpipipe.language.config import TrainConfig
from mpipipe.language.data.source import Tokens
from mpipipe.nn import random_key


def training_starts(config: TrainConfig, length: int, step: int, rows: range) -> list[int]:
    """Return where the windows of these rows of a step's batch begin, in `length` tokens."""
    seq_len = config.seq_len
    if config.order == "random":
        numbers = generator(config.seed, "training", step)
        batch = numbers.integers(0, length - seq_len, config.batch)
        return batch[rows.start : rows.stop].tolist()
    count = (length - 1) // seq_len  # windows of an epoch; what is left at the end is left out
    starts = []
    for row in rows:
        epoch, place = divmod(step * config.batch + row, count)
        key = random_key("epoch", epoch, config.seed).tobytes()
        starts.append(shuffled(place, count, key) * seq_len)
    return starts


def validation_starts(config: TrainConfig, length: int, index: int, rows: range) -> list[int]:
    """Return where the windows of these rows of a validation batch begin: spread evenly."""
    last = length - config.seq_len - 1
    most = max(1, config.eval_batches * config.batch - 1)
    return [(index * config.batch + row) * last // most for row in rows]


def read_windows(
    text: Tokens, starts: Iterable[int], seq_len: int
) -> tuple[np.ndarray, np.ndarray]:
    """Read the windows that begin at `starts`: inputs and targets, int64 (rows, seq_len)."""
    windows = np.stack([text.read(int(start), seq_len + 1) for start in starts]).astype(np.int64)
    return np.ascontiguousarray(windows[:, :-1]), np.ascontiguousarray(windows[:, 1:])


def segments(text: Tokens, starts: Iterable[int], seq_len: int) -> np.ndarray:
    """Return the document of each position of the windows: int32 (rows, seq_len).

    Documents count from 0 in each row.
    """
    rows = []
    for start in starts:
        marks = np.zeros(seq_len, np.int32)
        documents = text.starts(start + 1, start + seq_len)
        if documents is not None:
            marks[np.asarray(documents) - start] = 1
        rows.append(np.cumsum(marks, dtype=np.int32))
    return np.stack(rows)


def generator(seed: int, purpose: str, step: int, turn: int = 0) -> np.random.Generator:
    """Return the random numbers for one purpose in one step, whatever was drawn before."""
    return np.random.Generator(
        np.random.Philox(key=random_key(purpose, seed), counter=[0, 0, turn, step])
    )


# -- A permutation of 0 ... count - 1, whose places are computed one by one, without memory
#
# A Feistel network permutes numbers of 2 b bits: the halves (left, right) become (right, left xor
# f(right)), `ROUNDS` times, whatever f is (Luby and Rackoff, "How to construct pseudorandom
# permutations from pseudorandom functions", 1988). A number that comes out too large goes in again
# until it is small enough, which keeps it a permutation (Black and Rogaway, "Ciphers with arbitrary
# finite domains", 2002). There are at most 4 count numbers of 2 b bits, so that takes 4 passes on
# average at most.


ROUNDS = 6


def shuffled(place: int, count: int, key: bytes) -> int:
    """Return the number at `place` of a permutation of 0 ... count - 1 that `key` fixes.

    The key has at most 64 bytes.
    """
    half = max(1, -(-max(1, count - 1).bit_length() // 2))
    mask = (1 << half) - 1
    number = place
    while True:
        left = number >> half
        right = number & mask
        for turn in range(ROUNDS):
            content = blake2b(
                right.to_bytes(8, "little") + bytes([turn]), key=key, digest_size=8
            ).digest()
            left, right = right, left ^ (int.from_bytes(content, "little") & mask)
        number = left << half | right
        if number < count:
            return number
