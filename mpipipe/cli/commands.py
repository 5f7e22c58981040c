"""The list of all commands, and where each one is. Only the chosen one is imported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Command:
    """One command.

    Parameters
    ----------
    name : as it is typed
    place : module and function, `module:function`
    summary : what it does, in a few words
    """

    name: str
    place: str
    summary: str

    def load(self) -> Callable[..., Any]:
        """Import and return the function."""
        module, _, function = self.place.partition(":")
        return getattr(import_module(module), function)


@dataclass(frozen=True)
class Commands:
    """Several commands under one name."""

    name: str
    summary: str
    commands: tuple[Command | Commands, ...]

    def find(self, name: str) -> Command | Commands | None:
        """Return the command with this name."""
        return next((command for command in self.commands if command.name == name), None)


def _of(module: str, **summaries: str) -> tuple[Command, ...]:
    """Commands that are functions of the same name in one module."""
    return tuple(
        Command(function.replace("_", "-"), f"{module}:{function}", text) for function, text in summaries.items()
    )


DRAW = Commands(
    "draw",
    "Pictures of schedules and traces, as PNG or SVG",
    _of(
        "mpipipe.cli.draw",
        timeline="Who computes what at which time",
        memory="How many activations each rank holds at which time",
        compare="Bubble and memory of schedules beside each other",
        split="Where the time of each rank went in a training",
        trace="A step of a training below what its schedule predicts",
    ),
)
BENCH = Commands(
    "bench",
    "Measure; every number beside what it can be compared with",
    _of(
        "mpipipe.cli.bench.commands",
        pipeline="Cost of the machinery on tiny stages",
        steps="Launched steps against one after the other",
        transport="Mailbox against bare Isend and Irecv",
        schedules="Building, checking and simulating large schedules",
        gaps="How far searched schedules are from the best",
        train="A GPT's step against its simulation",
        plan="Predicted steps of plans against real ones",
        dry_run="Memory that a dry run foresees against a training",
        checkpoint="Saving and loading against dd",
        tokenize="Tokenizing against the library alone",
        attention="Attention kernels beside PyTorch, a ring beside one rank",
        gpu="Kernels, ring, executor and a GPT's step on a GPU",
    ),
)
ALL = Commands(
    "",
    "Pipeline parallelism and ring attention over MPI.",
    (
        Command("train", "mpipipe.cli.train:train", "Train a GPT on text or tokens"),
        Command("plan", "mpipipe.cli.plan:plan", "Measure, and find the fastest way to train a model"),
        Command("tokenize", "mpipipe.cli.tokenize:tokenize", "Turn text into a file of tokens"),
        Command("generate", "mpipipe.cli.generate:generate", "Let a model continue prompts"),
        Command("evaluate", "mpipipe.cli.evaluate:evaluate", "Compute the loss of a model"),
        Command("convert", "mpipipe.cli.convert:convert", "Turn a model folder of Hugging Face into ours, or back"),
        Command("simulate", "mpipipe.cli.simulate:simulate", "Run a schedule on paper"),
        DRAW,
        BENCH,
        Command("info", "mpipipe.cli.info:info", "Show what a run finds on this machine"),
        Command("jobscript", "mpipipe.cli.jobscript:jobscript", "Print a job script for SLURM, PBS, LSF or Flux"),
        Command("run", "mpipipe.cli.run:run", "Run a script on every rank; an error ends the whole job"),
        Command("launch", "mpipipe.cli.launch:launch", "Start a job, and believe its exit code 0 with a proof alone"),
        Command("completion", "mpipipe.cli.completion:completion", "Print what completes commands in a shell"),
    ),
)
