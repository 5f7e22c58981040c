"""How far rounding may move the gradients, and the training, of a GPT that is computed in another order."""

import numpy as np

from support.tolerance import close


def path(model, tokens: int = 0) -> int:
    """Operations behind one gradient: the sums on the way through all layers and back, and over the tokens of a batch.

    A block multiplies over dim in qkv, out and gate_up and over hidden in down, normalises twice over dim, and attends
    to seq positions; the head multiplies over dim and sums over the vocabulary.
    """
    block = 5 * model.dim + model.hidden + model.seq_len
    return 2 * (model.layers * block + 2 * model.dim + model.vocab) + tokens


def roundings(model) -> int:
    """How often half precision rounds on that way: after each product, norm, activation, rotation and sum."""
    return 2 * (12 * model.layers + 4)


def curve(model, steps: int, rate: float):
    """By how much training multiplies the relative error of a loss, in step 1, 2, ...: what `size` is to be times.

    Adam divides a gradient by its own magnitude, so an error relative to the largest of N gradients, g, moves parameter
    i by rate |g| / |g_i| of it, and the loss by rate |g|: rate N |g| in all, and the largest of N numbers of norm 1 is
    about 4 / sqrt(N). Every step adds that much (clipping holds the norm at 1 or below).
    """
    return 1 + 4 * rate * np.sqrt(model.parameters) * np.arange(steps)


def close_curves(found, expected, model, dtype="float64", rate=1e-2):
    """Assert that numbers of each step of two trainings, with batches of 8 sequences, differ by rounding alone."""
    found, expected = np.array(found), np.array(expected)
    growth = curve(model, len(found), rate).reshape(-1, *[1] * (found.ndim - 1))
    close(found, expected, path(model, 8 * model.seq_len), growth * np.abs(expected), dtype=dtype)
