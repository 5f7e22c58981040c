"""Host kernels on many pieces: a training has the same bits for any number of threads."""

from traceback import walk_stack

import pytest
from support.kernel_training import trained
from support.pieces import SMALL, new_pool, set_sizes

from mpipipe import processor

KERNELS = set(
    """linear linear_backward_input linear_backward_weight products sum_rows add gelu gelu_backward swiglu
    swiglu_backward norm norm_backward apply_rope embed embed_backward dropout dropout_backward mean_squared_error
    softmax_cross_entropy adamw sgd sums_of_squares scale""".split()
)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_a_training_has_the_same_bits_for_all_numbers_of_threads(monkeypatch, dtype):
    """That the numbers are right in pieces, too, is in test_kernel_formulas.py."""
    cut, run = set(), processor._Pool.run

    def noted(pool, *rest):
        cut.update(frame.f_code.co_name for frame, _ in walk_stack(None))
        run(pool, *rest)

    monkeypatch.setattr(processor._Pool, "run", noted)
    set_sizes(monkeypatch, SMALL)
    results = []
    for threads in (1, 2, 3, 4):
        new_pool(monkeypatch, threads)
        results.append([array.tobytes() for array in trained(dtype)])
    assert results == [results[0]] * 4
    assert not KERNELS - cut, "these had one piece: the test shows nothing of them"
