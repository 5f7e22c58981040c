"""The block distribution against numpy.array_split."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mpipipe.even_split import even_split


@given(length=st.integers(0, 200), parts=st.integers(1, 40))
def test_the_parts_are_those_of_numpy(length, parts):
    split = even_split(length, parts)
    assert [list(part) for part in split] == [part.tolist() for part in np.array_split(np.arange(length), parts)]
    assert all(before.stop == after.start for before, after in pairwise(split))  # also where parts are empty
