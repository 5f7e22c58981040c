"""The comparison of printed text itself: what it lets pass, and what it does not."""

import pytest
from support.printed import check_printed


def test_same_text_passes_and_other_text_fails():
    check_printed("loss 0.947\nidle 72 %\n1\n2\n2^23 of 1.50", "loss 0.946\nidle ... %\n...\n2^23 of 1.5")
    for printed, promised in (("0.947", "0.944"), ("[4, 3]", "[4, 2]"), ("one", "one\n...\ntwo"), ("a\nb", "a")):
        with pytest.raises(AssertionError):
            check_printed(printed, promised)
