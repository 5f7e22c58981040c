"""The file of a schedule's order: rank 0 reads it once, and from then on the configuration has the table itself.

So the table is in every checkpoint. A training that goes on finds it there where the file is gone.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from mpipipe.errors import ConfigError
from mpipipe.job.group import group_of
from mpipipe.job.types import Communicator
from mpipipe.schedules.csv_text import from_file
from mpipipe.train import resume
from mpipipe.train.config import TrainConfig
from mpipipe.train.order import fingerprint, is_path, is_table

logger = logging.getLogger("mpipipe")


def with_order(config: TrainConfig, comm: Communicator, out: Path) -> TrainConfig:
    """Return the configuration with the table where it names a file with one; collective.

    A relative path begins in the working folder of rank 0. Raises ConfigError or ScheduleError on every rank where the
    file cannot be read, or is no order that runs.
    """
    if not is_path(config.schedule):
        return config
    group, table = group_of(comm), None
    with group.raise_together("train: the order of the schedule"):
        if comm.rank == 0:
            table = _read(config, out)
    return replace(config, schedule=group.broadcast("train: the order of the schedule", table))


def _read(config: TrainConfig, out: Path) -> str:
    saved = _saved(config, out)
    try:
        table = from_file(config.schedule).to_csv()
    except ConfigError as error:
        if isinstance(error.__cause__, FileNotFoundError) and saved is not None:
            logger.warning("%s is gone: order %s of the checkpoint is taken", config.schedule, fingerprint(saved))
            return saved
        raise
    if saved is not None and saved != table:
        logger.warning(
            "%s is now order %s; the checkpoint was made with %s",
            config.schedule,
            fingerprint(table),
            fingerprint(saved),
        )
    return table


def _saved(config: TrainConfig, out: Path) -> str | None:
    """Return the table in the checkpoint behind which the training goes on, None if there is none."""
    found = resume.checkpoint_of(config, out)
    configuration = None if found is None else found.state.get("configuration")
    schedule = configuration.get("schedule") if isinstance(configuration, dict) else None
    return schedule if isinstance(schedule, str) and is_table(schedule) else None
