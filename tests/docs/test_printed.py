"""The comparison of printed text itself: what it lets pass, and what it does not."""

import pytest
from support.printed import check_printed

SAME = [
    ("loss 0.947", "loss 0.946"),
    ("rank 0 idle 72 %", "rank 0 idle ... %"),
    ("start\n1\n2\nend", "start\n...\nend"),
    ("2^23 of 0F0 at 1.50", "2^23 of 0F0 at 1.5"),
]
OTHER = [
    ("loss 0.947", "loss 0.944"),
    ("peaks [4, 3]", "peaks [4, 2]"),
    ("one", "one\ntwo"),
    ("one", "one\n...\ntwo"),
    ("2^22 steps", "2^23 steps"),
]


def test_same_text_passes_and_other_text_fails():
    for printed, promised in SAME:
        check_printed(printed, promised)
    for printed, promised in OTHER:
        with pytest.raises(AssertionError):
            check_printed(printed, promised)
