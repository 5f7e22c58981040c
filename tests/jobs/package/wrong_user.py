"""A user's program with two errors of type, for `jobs/test_package.sh`: mypy finds both of them."""

from mpipipe import StepResult, schedules

schedule = schedules.one_f_one_b("two", 4)


def loss_of(result: StepResult) -> str:
    return result.loss
