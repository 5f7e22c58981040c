"""What papers and other libraries call the schedules: for the question which one a user may have meant."""

from __future__ import annotations

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
