"""How far rounding may move a result: the one bound from which tolerances in the tests follow.

No two processors, and no two BLAS libraries, add in the same order, and some round a product and a sum at once. What
holds on all of them is a bound: a sum of n terms, each rounded, errs by at most n u times the sum of the sizes of the
terms, whatever their order (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 3.1; u is half the
distance eps from 1 to the next number). Where n is large, so many errors do not all point the same way: 6 sqrt(n) u is
passed with a chance of 3e-8 (Higham and Mary, A New Approach to Probabilistic Rounding Error Analysis, SIAM J. Sci.
Comput. 41, 2019, theorem 2.4 with lambda = 6).

    |found - expected| <= min(n, 6 sqrt(n)) * eps * size            eps = 2 u: one u for each of the two

A test states n, the operations behind one number, and `size`, what is added up with all signs positive. Neither comes
from a run. A result may be right and still be small against its terms: then `size` is that of the terms.
"""

import ml_dtypes
import numpy as np

CONFIDENCE = 6.0  # standard deviations


def eps(dtype) -> float:
    """The distance from 1 to the next number."""
    return float(ml_dtypes.finfo(np.dtype(dtype)).eps)


def spread(terms):
    """How many eps the errors of so many operations may add up to."""
    return np.minimum(terms, CONFIDENCE * np.sqrt(terms))


def bound(dtype, terms, size=1.0):
    """The bound above, and what underflow takes: a term below the smallest normal number may come out as zero."""
    return spread(terms) * (eps(dtype) * np.asarray(size, np.float64) + _smallest(dtype))


def rounding(dtype, values):
    """What storing `values` in `dtype` takes: half a unit in the last place, were they of any size."""
    return eps(dtype) / 2 * np.abs(values) + _smallest(dtype)


def largest(*values) -> float:
    """The largest magnitude: the size of terms where each result is a sum of many of them."""
    return max(float(np.max(np.abs(_wide(x)), where=np.isfinite(_wide(x)), initial=0)) for x in values)


def close(found, expected, terms, size=None, dtype=None, what=""):
    """Assert that `found` is `expected` up to `terms` operations on terms of this `size`.

    Parameters
    ----------
    size : scalar or array; by default the magnitude of each expected number: right for products, quotients, and sums
        of terms of one sign
    dtype : in which it was computed, by default the coarser of both; storing it in a coarser one rounds it once more
    what : said first when it fails
    """
    right = _wide(expected)
    size = np.abs(right) if size is None else _wide(size)
    computed = _coarser(found, expected) if dtype is None else np.dtype(dtype)
    allowed = bound(computed, terms, size)
    stored = _dtype(found)
    if stored is not None and eps(stored) > eps(computed):
        allowed = allowed + rounding(stored, np.abs(right) + allowed)
    within(found, expected, allowed, f"{what} ({computed.name}, {np.max(terms)} operations)".lstrip())


def close_norm(found, expected, terms, dtype, what=""):
    """Assert that the norm of the errors of many numbers is at most sqrt(terms) * eps times the norm of the numbers.

    A norm adds up squares, so the worst of many errors, for which the bound above has its factor of 6, hardly counts.
    """
    right = np.linalg.norm(_wide(expected))
    apart = np.linalg.norm(_wide(found) - _wide(expected))
    within(right + apart, right, np.sqrt(terms) * eps(dtype) * right + _smallest(dtype), f"norm of {what}".rstrip())


def within(found, expected, allowed, what=""):
    """Assert |found - expected| <= allowed, or tell where it is worst; equal infinities agree, and nan with nan."""
    one, other = _wide(found), _wide(expected)
    assert one.shape == other.shape, f"{what}: shape {one.shape}, expected {other.shape}"
    allowed = np.broadcast_to(allowed, one.shape)
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        apart = np.where(same, 0, np.abs(one - other))
        excess = np.where(same, 0, np.nan_to_num(apart / allowed, nan=np.inf, posinf=np.inf))
    if (excess > 1).any():
        worst = np.unravel_index(np.argmax(excess), excess.shape)
        place = f" at {tuple(map(int, worst))}" if worst else ""
        raise AssertionError(
            f"{what}: {int((excess > 1).sum())} of {excess.size} beyond the bound, worst by a factor of"
            f" {excess[worst]:.3g}{place}: found {one[worst]:.17g}, expected {other[worst]:.17g},"
            f" apart {apart[worst]:.3g}, bound {allowed[worst]:.3g}"
        )


def _wide(values):
    return np.asarray(values).astype(np.float64)


def _dtype(values):
    """The floating dtype of an array or a numpy scalar; None for Python's numbers and for integers."""
    dtype = getattr(values, "dtype", None)
    return None if dtype is None or dtype.kind in "biu" else dtype


def _coarser(*values):
    kinds = [kind for kind in map(_dtype, values) if kind is not None]
    return max(kinds, key=eps, default=np.dtype(np.float64))


def _smallest(dtype) -> float:
    """float16 keeps its subnormal numbers everywhere; the other dtypes may lose them."""
    info = ml_dtypes.finfo(np.dtype(dtype))
    return float(info.smallest_subnormal if np.dtype(dtype) == np.float16 else info.smallest_normal)
