"""A user's program, for `jobs/test_package.sh`: mypy finds nothing wrong in it."""

import numpy as np

from mpipipe import Pipeline, StepResult, nn, schedules
from mpipipe.job import inprocess

schedule = schedules.one_f_one_b(1, 4)
stages = [nn.Stage([nn.Linear(8, 8)], seed=1)]
x = np.ones((8, 8), np.float32)


def step(comm: inprocess.ThreadCommunicator) -> float:
    with Pipeline(stages, schedule, comm, loss=nn.mean_squared_error) as pipeline:
        result: StepResult = pipeline.step(x, x)
    return result.loss


losses: list[float] = inprocess.run(1, step)
peaks: tuple[int, ...] = tuple(schedules.simulate(schedule).peak_activations)
