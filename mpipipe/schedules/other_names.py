"""What papers and other libraries call the schedules: for the question which one a user may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

OTHER_NAMES = {
    "1f1b": "one_f_one_b",
    "afab": "gpipe",
    "bfs": "looped_bfs",
    "breadth_first": "looped_bfs",
    "dapple": "one_f_one_b",
    "dualpipe": "dualpipe_v",
    "interleaved": "interleaved_1f1b",
    "interleaved_zb": "interleaved_zero_bubble",
    "pipedream_flush": "one_f_one_b",
    "virtual_pipeline": "interleaved_1f1b",
    "zb": "zero_bubble_h1",
    "zb1p": "zero_bubble_h1",
    "zb2p": "zero_bubble_2p",
    "zb_1p": "zero_bubble_h1",
    "zb_2p": "zero_bubble_2p",
    "zb_h1": "zero_bubble_h1",
    "zb_v": "zero_bubble_v",
    "zbh1": "zero_bubble_h1",
    "zbv": "zero_bubble_v",
    "zero_bubble": "zero_bubble_h1",
}


def near(name: object, known: Iterable[str]) -> list[str]:
    """Return the schedules that are called like `name`, or that others call so."""
    word = str(name).lower().replace("-", "_").removeprefix("schedule")
    if word in OTHER_NAMES:
        return [OTHER_NAMES[word]]
    return difflib.get_close_matches(word, list(known), n=2)
