"""Ranks that are threads whose messages come late, at random, in the order that MPI prescribes."""

import random
from contextlib import contextmanager

from mpipipe.job.threads import World


@contextmanager
def late_messages(seed, share=0.9):
    """Let so large a share of the looks at a request find nothing."""
    progress, draw = World.progress, random.Random(seed).random
    World.progress = lambda world, box: None if draw() < share else progress(world, box)
    try:
        yield
    finally:
        World.progress = progress
