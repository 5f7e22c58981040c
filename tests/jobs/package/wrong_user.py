"""A user's program with three errors of type, for `jobs/test_package.sh`: mypy finds all of them."""

import mpipipe
from mpipipe import StepResult, schedules

schedule = schedules.one_f_one_b("two", 4)


def loss_of(result: StepResult) -> str:
    return result.loss


pipeline = mpipipe.Pipelin
