"""The bound of rounding errors: it holds for sums in any order, notices what is beyond it, and tells where."""

import ml_dtypes
import numpy as np
import pytest
from support.tolerance import close, eps, largest, spread, within


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", ml_dtypes.bfloat16])
@pytest.mark.parametrize("count", [2, 30, 5000])
def test_sums_in_any_order_are_within_the_bound_and_a_missing_term_is_not(dtype, count):
    x = np.random.default_rng(count).normal(size=count).astype(dtype)
    total = np.zeros((), dtype)
    for value in x:
        total = (total + value).astype(dtype)
    size = np.abs(x.astype(np.float64)).sum()
    exact = x.astype(np.float64).sum()
    close(total, exact, count, size)
    if spread(count) * eps(dtype) * size < largest(x) / 2:
        with pytest.raises(AssertionError, match="beyond the bound"):
            close(total - x[np.abs(x).argmax()], exact, count, size)


def test_infinities_and_nan_agree_with_themselves_only():
    values = np.array([np.inf, -np.inf, np.nan, 1.0])
    within(values, values, np.array([0.0, np.nan, np.inf, 0.0]))
    for at, wrong in ((0, 1.0), (1, np.inf), (2, 1.0), (3, np.nan)):
        other = values.copy()
        other[at] = wrong
        with pytest.raises(AssertionError, match=rf"1 of 4 .* at \({at},\)"):
            close(other, values, 3)
    with pytest.raises(AssertionError, match="shape"):
        within(np.ones(3), np.ones(4), 1.0)
