"""Tags: unique for every message of a pair of ranks, the same at both ends, within every limit."""

from hypothesis import given
from hypothesis import strategies as st

from mpipipe.comm.tags import Tags


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 9), st.integers(15, 200), st.booleans(), st.data())
def test_no_two_messages_of_a_pair_share_a_tag(ranks, chunks, microbatches, tag_ub, v_shaped, data):
    placement = []
    for chunk in range(chunks):
        leg = list(range(ranks))
        placement += leg[::-1] if v_shaped and chunk % 2 else leg
    stages = len(placement)
    ends = st.lists(st.integers(0, stages - 1), min_size=2, max_size=2, unique=True).map(sorted)
    skips = data.draw(st.lists(ends.map(tuple), max_size=6)) if stages > 1 else []
    tags = Tags(placement, microbatches, tag_ub, skips)
    seen = set()
    for edge in range(1, stages + len(skips)):
        source, target = skips[edge - stages] if edge >= stages else (edge - 1, edge)
        pair = frozenset((placement[source], placement[target]))
        if len(pair) == 1:
            continue
        for microbatch in range(microbatches):
            for direction in (0, 1):
                for part in (0, 1):
                    channel, tag = name = tags.of(edge, microbatch, direction, part)
                    assert 0 <= tag <= tag_ub and 0 <= channel < tags.channels
                    assert (pair, name) not in seen
                    seen.add((pair, name))


def test_large_schedule_fits_the_guaranteed_tags_on_one_communicator():
    tags = Tags(list(range(64)) * 4, 128, 32767)
    assert tags.channels == 1
    assert max(tags.of(edge, 127, 1, 1)[1] for edge in range(1, 256)) <= 32767


def test_more_messages_than_tags_take_more_communicators():
    tags = Tags([0, 1] * 8, 4096, 32767)
    assert tags.channels == -(-15 * 4096 * 4 // 32768) == 8
    assert len({tags.of(edge, 4095, 1, 1) for edge in range(1, 16)}) == 15
