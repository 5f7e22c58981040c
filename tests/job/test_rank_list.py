"""Lists of ranks in messages: short, and nothing of them lost but what is counted."""

import pytest

from mpipipe.job import rank_list


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([4], "rank 4"),
        ([4, 4], "rank 4"),
        ([1, 0], "ranks 0-1"),
        ([7, 0, 1, 2, 3], "ranks 0-3, 7"),
        (range(512), "ranks 0-511"),
        (range(0, 40, 2), "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 12 more"),
    ],
)
def test_ranks_that_follow_each_other_are_one_run(ranks, text):
    assert rank_list.named(ranks) == text


def test_ranks_that_say_the_same_are_one_text_and_several_that_are_all_of_them_are_named_as_such():
    assert rank_list.named(range(12), 12) == "all 12 ranks"
    assert rank_list.named(range(11), 12) == "ranks 0-10"
    assert rank_list.named([0], 1) == "rank 0"
    said = [(0, "done"), (1, "done"), (2, "lost"), (3, "done")]
    assert rank_list.grouped(said) == ["ranks 0-1, 3: done", "rank 2: lost"]
