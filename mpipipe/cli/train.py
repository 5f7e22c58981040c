"""mpipipe train: its flags are the fields of TrainConfig."""

from __future__ import annotations

import dataclasses
from typing import Any

from mpipipe import processor, stop_signals
from mpipipe.cli.dry_run import check_alone, foretell
from mpipipe.cli.flags import Flag, Parameter
from mpipipe.comm.abort import run_or_abort
from mpipipe.comm.group import group_of
from mpipipe.comm.threads import share_of_cores
from mpipipe.models import GPT
from mpipipe.train import TrainConfig
from mpipipe.train import train as run_training
from mpipipe.train.config import KINDS, heading_of
from mpipipe.train.config_checks import range_words
from mpipipe.train.options.other_names import INSTEAD, OTHER_NAMES


def train(
    config: str | None = None, dry_run: bool = False, ranks: int | None = None, profile: str | None = None, **flags: Any
) -> int:
    """Train a GPT on text or tokens (mpiexec -n 4 python -m mpipipe train --out runs/first).

    The keys of the file given by --config are the flags without leading dashes, and with _ for -. Flags win over keys.
    """

    def work() -> None:
        processor.prepare_process(share_of_cores())
        group, chosen = group_of(), None
        with group.together("train: reading the configuration"):
            check_alone(ranks, profile)
            if group.rank == 0:
                chosen = TrainConfig.load(config, **flags)
        chosen = group.broadcast("train: the configuration", chosen)
        stop_signals.change(chosen.preempt_signals)
        run_training(chosen, GPT)

    if dry_run:
        return foretell(lambda: TrainConfig.load(config, **flags), ranks, profile)
    return run_or_abort(work)


def _parameter(entry: dataclasses.Field) -> Parameter:
    """Return the command line's parameter for one field."""
    kind, text = KINDS[entry.name], entry.metadata["help"]
    if entry.default is not None and kind not in (tuple, bool):
        text += f"; default: {entry.default}"
    limits = range_words(entry.metadata)
    if limits:
        text += f"; {limits}"
    flag = Flag(
        text, choices=entry.metadata["choices"], metavar=entry.metadata["metavar"], group=heading_of(entry.name)
    )
    return Parameter(entry.name, str if kind is tuple else kind, kind is tuple, None, flag)


CONFIG = Parameter("config", str, False, None, Flag("TOML file with any of the keys below", metavar="FILE"))
DRY_RUN = Parameter("dry_run", bool, False, False, Flag("train nothing: show the plan, and the memory of each rank"))
RANKS = Parameter("ranks", int, False, None, Flag("of a dry run in one process; default: those of one replica"))
PROFILE = Parameter(
    "profile", str, False, None, Flag("of `plan --save-profile`: a dry run says how long a step takes", metavar="FILE")
)
FIELDS = [_parameter(entry) for entry in dataclasses.fields(TrainConfig)]
train.parameters = [CONFIG, DRY_RUN, RANKS, PROFILE, *FIELDS]  # type: ignore[attr-defined]
train.other_names, train.instead = OTHER_NAMES, INSTEAD  # type: ignore[attr-defined]
