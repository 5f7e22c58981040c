"""Lists of ranks in messages: short, and nothing of them lost but what is counted."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


@given(st.sets(st.integers(0, 60), min_size=1))
def test_every_rank_is_written_or_counted(ranks):
    text = rank_list.numbers(ranks)
    listed, _, more = text.partition(" and ")
    written = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", listed):
        written |= set(range(int(first), int(last or first) + 1))
    assert written <= ranks and len(ranks - written) == (int(more.split()[0]) if more else 0)
    assert all(rank > max(written) for rank in ranks - written)
    assert len(listed.split(", ")) <= rank_list.LISTED
