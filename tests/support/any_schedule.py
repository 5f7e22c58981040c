"""All schedules of the registry, for tests that hold for every one of them."""

from __future__ import annotations

from hypothesis import strategies as st

from mpipipe.schedules import by_name, registry

NAMES = [*registry.ONE_STAGE, *registry.TWO_STAGES, *registry.SEVERAL_STAGES]


def chunks_of(name, chunks):
    """How many stages a rank has in a schedule: as many as asked for, where the schedule leaves that open."""
    if name in registry.ONE_STAGE:
        return 1
    return 2 if name in registry.TWO_STAGES else chunks


def build(name, ranks, chunks, microbatches):
    return by_name(name, ranks=ranks, chunks=chunks_of(name, chunks), microbatches=microbatches)


any_schedule = st.builds(build, st.sampled_from(NAMES), st.integers(1, 5), st.integers(1, 3), st.integers(1, 9))
