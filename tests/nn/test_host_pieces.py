"""Host kernels on many pieces: the same bits for any number of threads."""

from functools import partial

import numpy as np
import pytest
from support.pieces import SMALL, WIDTH, new_pool, set_sizes

from mpipipe import arrays, processor
from mpipipe.nn import kernels
from mpipipe.nn.kernels import AdamWNumbers, Update
from mpipipe.nn.random import random_key
from mpipipe.nn.rope import angles

ROWS = 90
RANDOM = np.random.default_rng(11)


@pytest.fixture
def pool(monkeypatch):
    return partial(new_pool, monkeypatch)


def numbers(*shape, dtype="float32"):
    return RANDOM.standard_normal(shape).astype(arrays.dtype(dtype))


def x(*shape):
    return lambda dtype: numbers(*(shape or (ROWS, WIDTH)), dtype=dtype)


def of(value):
    return lambda dtype: value


def strided(dtype):
    return numbers(3, ROWS, 4, 12, dtype=dtype)[::-1, :, 1:, 2:10]


def turned(dtype):
    return numbers(8, 3, ROWS, 3, dtype=dtype).transpose(1, 2, 3, 0)


def accurate(*shape):
    """Numbers in the dtype of sums: float32 for halves."""
    return lambda dtype: numbers(*shape, dtype=arrays.accumulator(arrays.dtype(dtype)).name)


IDS = of(np.random.default_rng(3).integers(0, 40, ROWS))
GAIN, TURNED = x(WIDTH), angles(np.arange(ROWS), 8, 1e4)
TABLE = lambda dtype: kernels.of("cpu").rope_table(*TURNED, arrays.dtype(dtype))  # noqa: E731
UPDATE = lambda dtype: Update(0.5, np.empty(6480, "float16"))  # noqa: E731
STEP = of(AdamWNumbers(0.9, 0.99, 1e-8, 0.1, 0.1, 0.01, 0.99))
FLAT = x(6480)
CASES = {
    "linear": [x(), x(50, WIDTH), x(50)],
    "linear few rows": [x(3, WIDTH), x(50, WIDTH)],
    "linear_backward_input": [x(), x(WIDTH, 41)],
    "linear_backward_weight": [x(), x(ROWS, 40), accurate(WIDTH, 40)],
    "products": [x(70, 5, 6), x(70, 6, 7), accurate(70, 5, 7), of(False), of(False), of(True)],
    "products one": [x(1, 6, 5), x(70, 7, 6), accurate(70, 5, 7), of(True), of(True)],
    "sum_rows": [x(), accurate(WIDTH)],
    "add": [x(), x()],
    "accumulate": [accurate(4000), accurate(4000)],
    "scale": [x(), of(0.3)],
    "copy rounded": [x(), lambda dtype: np.empty((ROWS, WIDTH), "float16")],
    "copy": [strided, turned],
    "gelu": [x(3, 30, WIDTH)],
    "gelu_backward": [x(), x()],
    "swiglu": [x(ROWS, 144)],
    "swiglu_backward": [x(ROWS, 144), x()],
    "norm": [x(), GAIN, of(None), of(1e-5)],
    "norm_backward": [x(), x(), accurate(ROWS), GAIN, of(False), x()],
    "norm layer": [x(), GAIN, GAIN, of(1e-5)],
    "norm_backward layer": [x(), x(), accurate(ROWS), GAIN, of(True)],
    "apply_rope": [strided, TABLE, strided],
    "apply_rope turned": [turned, TABLE, strided, of(True)],
    "embed": [x(40, WIDTH), IDS],
    "embed_backward": [x(), IDS, accurate(40, WIDTH)],
    "dropout": [x(), of(random_key("a")), of((1, 2, 3)), of(20000), of(1.5)],
    "dropout_backward": [x(), lambda dtype: numbers(ROWS, WIDTH) > 0, of(1.5)],
    "mean_squared_error": [x(), x()],
    "softmax_cross_entropy": [x(), IDS, of(3.0)],
    "adamw": [FLAT, FLAT, FLAT, lambda dtype: np.abs(FLAT(dtype)), STEP, UPDATE],
    "sgd": [FLAT, FLAT, FLAT, of(0.9), of(0.1), of(0.2), UPDATE],
    "sums_of_squares": [FLAT, of([(0, 3), (3, 1500), (1500, 6480), (6480, 6480)])],
}


def outcome(name, dtype):
    """All arrays and numbers that a kernel returns or writes."""
    RANDOM.bit_generator.state = np.random.default_rng(7).bit_generator.state
    args = [make(dtype) for make in CASES[name]]
    function = getattr(kernels.of("cpu", arrays.dtype(dtype)), name.split()[0])
    returned = function(*args)
    written = [value.copy for value in args if isinstance(value, Update)]
    found = [*(returned if isinstance(returned, tuple) else [returned]), *args, *written]
    found = [np.asarray(value) for value in found if isinstance(value, (np.ndarray, float))]
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_a_kernel_gives_the_same_bits_for_all_numbers_of_threads(monkeypatch, pool, name, dtype):
    """That the numbers are right in pieces, too, is in test_kernel_formulas.py."""
    if dtype == "bfloat16" and name in ("adamw", "sgd", "sums_of_squares"):
        return
    set_sizes(monkeypatch, SMALL)
    results = []
    for threads in (1, 2, 3, 4):
        pool(threads)
        results.append([value.tobytes() for value in outcome(name, dtype)])
    assert results == [results[0]] * 4 and results[0]


def test_the_pool_works_on_pieces_of_each_kernel(monkeypatch, pool):
    """The cases are cut: else the tests above would show nothing."""
    set_sizes(monkeypatch, SMALL)
    counts = []
    monkeypatch.setattr(processor._Pool, "run", lambda self, job, *_: counts.append([job.work(p) for p in job.pieces]))
    pool(2)
    for name in CASES:
        counts.clear()
        outcome(name, "float64")
        assert max(map(len, counts), default=0) > 1, name
