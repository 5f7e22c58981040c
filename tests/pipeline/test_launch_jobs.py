"""Whole jobs with launched steps: ranks that die or leave, and ends of scripts with losses that nobody asked for."""

from __future__ import annotations

import pytest

SCRIPT = """
import os, sys
import numpy as np
from mpipipe import Pipeline, nn, optim, schedules
from mpipipe.job import runtime

comm = runtime.world()
stages = [nn.Stage([nn.Linear(64, 64)], first=comm.rank)]
batch = np.ones((4000, 64), np.float32)
mine = batch if comm.rank == 0 else None, batch if comm.rank == comm.size - 1 else None
pipeline = Pipeline(stages, schedules.one_f_one_b(comm.size, 4), comm, nn.mean_squared_error)
optimizer = optim.SGD(stages, lr=0.1)
for step in range(5):
    if step == 3 and comm.rank == 1:
        ACT
    pending = pipeline.launch(*mine)
    optim.begin_step(optimizer, MAX_NORM, comm=comm).wait()
print("end", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "act, max_norm, says",
    [("os._exit(3)", "1.0", ""), ("sys.exit(0)", "None", "left the job"), ("sys.exit(0)", "1.0", "left the job")],
)
def test_a_rank_that_dies_or_leaves_ends_the_job(launch, act, max_norm, says):
    job = launch(3, SCRIPT.replace("ACT", act).replace("MAX_NORM", max_norm), env={"MPIPIPE_SYNC_SENDS": "1"})
    assert job.returncode not in (0, None) and job.stdout.count("end") == 0
    assert says in job.stderr


def test_losses_that_nobody_has_asked_for_keep_no_job_from_ending(launch):
    """Nor does a pipeline that nobody has closed."""
    job = launch(3, SCRIPT.replace("ACT", "pass").replace("MAX_NORM", "None"))
    assert job.returncode == 0 and job.stdout.count("end") == 3, job.stderr
