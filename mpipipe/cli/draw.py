"""mpipipe draw: pictures of schedules, without MPI."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from mpipipe import files, schedules, tracing
from mpipipe.cli.flags import parameters_of
from mpipipe.cli.output import refusing, show
from mpipipe.cli.simulate import Cost, costs_of, schedule_of, without_none
from mpipipe.options import Option
from mpipipe.schedules import Timeline


def timeline(**options: Any) -> None:
    """Draw who computes what at which time.

    An example: python -m mpipipe draw timeline --schedule gpipe --ranks 4 --microbatches 8 --out
    a.svg
    """
    _of_schedule(tracing.draw_timeline, **options)


def memory(**options: Any) -> None:
    """Draw how many activations each rank holds at which time."""
    _of_schedule(tracing.draw_memory, **options)


def _of_schedule(
    draw: Callable[[Timeline, str], object],
    schedule: Annotated[
        str,
        Option("a name that schedules.by_name knows, or FILE.csv, whose order says its own sizes"),
    ],
    out: Annotated[str, Option("new file that ends in .png or .svg", metavar="FILE")],
    ranks: Annotated[int | None, Option("P, ranks of the pipeline; default: 4")] = None,
    microbatches: Annotated[int | None, Option("M, micro-batches of a step; default: 16")] = None,
    chunks: Annotated[int | None, Option("V, stages on each rank; default: 1")] = None,
    slices: Annotated[int | None, Option("n, slices of each sequence; default: 1")] = None,
    forward: Cost = "1",
    input_grad: Cost = "1",
    weight_grad: Cost = "1",
    transfer: Annotated[str, Option("time of a message into a stage, likewise")] = "0",
) -> None:
    with refusing("draw"):
        files.check_new("the picture", out)
        tracing.check_can_draw(out)
        sizes = without_none(ranks=ranks, microbatches=microbatches, chunks=chunks, slices=slices)
        costs = costs_of(forward, input_grad, weight_grad, transfer)
        draw(schedules.simulate(schedule_of(schedule, sizes, costs), costs), out)
    show(f"mpipipe: drawn into {out}\n")


timeline.parameters = memory.parameters = parameters_of(_of_schedule)[1:]  # type: ignore[attr-defined]
