"""Processes that use PyTorch and JAX: threads, and the end of a job."""

import pytest

torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")

pytestmark = pytest.mark.judges

SCRIPT = """
import numpy as np
import jax
import torch
from mpipipe import Pipeline, adapters, nn, schedules
from mpipipe.job import runtime

comm = runtime.world()
stage = adapters.torch_stage(torch.nn.Linear(3, 3)) if comm.rank == 0 else adapters.jax_stage(
    lambda gain, x: x * gain, np.ones(3, np.float32)
)
schedule = schedules.one_f_one_b(2, 2)
x = np.ones((4, 3), np.float32)
with Pipeline([stage], schedule, comm, loss=nn.mean_squared_error) as pipeline:
    pipeline.step(x if comm.rank == 0 else None, x if comm.rank else None)
    {more}
if comm.rank == 0:
    print("threads", torch.get_num_threads(), flush=True)
"""


def test_a_job_ends_in_order_with_one_thread_on_each_rank(launch, tmp_path):
    script = tmp_path / "job.py"
    script.write_text(SCRIPT.format(more="pass"))
    none = {name: "" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
    job = launch(2, ["-m", "mpipipe", "run", str(script)], timeout=100, env=none)
    assert job.returncode == 0, job.stderr
    assert job.stdout == "threads 1\n" and "Traceback" not in job.stderr
