"""mpipipe train: its flags are the fields of TrainConfig."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Annotated, Any

import typer

from mpipipe import processor
from mpipipe.cli.dry_run import check_alone, foretell
from mpipipe.comm.abort import run_or_abort
from mpipipe.comm.group import group_of
from mpipipe.comm.threads import share_of_cores
from mpipipe.models import GPT
from mpipipe.train import TrainConfig
from mpipipe.train import train as run_training
from mpipipe.train.config import KINDS

DRY_RUN = typer.Option(
    "--dry-run", help="train nothing: show the plan, and the memory of each rank", show_default=False
)
RANKS = typer.Option("--ranks", help="of a dry run in one process; default: 1", show_default=False)


def train(config: str | None = None, dry_run: bool | None = None, ranks: int | None = None, **flags: Any) -> None:
    """Train a GPT on text or tokens (mpiexec -n 4 python -m mpipipe train --out runs/first).

    The keys of the file given by --config are the flags without leading dashes, and with _ for -. Flags win over keys.
    """

    def load() -> TrainConfig:
        return TrainConfig.load(config, **{name: value for name, value in flags.items() if value != []})

    def work() -> None:
        processor.prepare_process(share_of_cores())
        with group_of().together("train: reading the configuration"):
            check_alone(ranks)
            chosen = load()
        run_training(chosen, GPT)

    if dry_run:
        foretell(load, ranks)
    else:
        raise typer.Exit(run_or_abort(work))


def _flag(entry: dataclasses.Field) -> inspect.Parameter:
    """Return the command line parameter of one field. None, or an empty list, is a flag that was not given."""
    name, kind = entry.name.rstrip("_").replace("_", "-"), KINDS[entry.name]
    text = entry.metadata["help"]
    if entry.default is not None and kind not in (tuple, bool):
        text += f"; default: {entry.default}"
    option = typer.Option(f"--{name}/--no-{name}" if kind is bool else f"--{name}", help=text, show_default=False)
    return _parameter(entry.name, list[str] if kind is tuple else kind, option)


def _signature() -> inspect.Signature:
    option = typer.Option("--config", help="TOML file with any of the keys below", show_default=False)
    own = [_parameter("config", str, option), _parameter("dry_run", bool, DRY_RUN), _parameter("ranks", int, RANKS)]
    return inspect.Signature([*own, *map(_flag, dataclasses.fields(TrainConfig))])


def _parameter(name: str, kind: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


# typer reads a command's flags from here; there is no second list of them.
SIGNATURE = _signature()
train.__signature__ = SIGNATURE  # type: ignore[attr-defined]
train.__annotations__ = {name: entry.annotation for name, entry in SIGNATURE.parameters.items()}
