"""mpipipe draw: pictures of schedules and of traces, without MPI."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from mpipipe import files, pictures, schedules
from mpipipe.analysis import number_in, read_trace
from mpipipe.cli.flags import numbers, parameters_of
from mpipipe.cli.output import refusing, show
from mpipipe.cli.simulate import costs_of, given_of, refuse
from mpipipe.errors import ConfigError
from mpipipe.options import Option
from mpipipe.schedules import Costs, Timeline, from_file, is_path

MILLISECONDS = 1e3  # of a second

Out = Annotated[str, Option("new file that ends in .png or .svg", metavar="FILE")]
Folder = Annotated[Path, Option("folder that train --trace has written", names=("--trace",))]
Step = Annotated[int | None, Option("number of a recorded step, from 0")]


def timeline(**options: Any) -> None:
    """Draw who computes what at which time.

    An example: python -m mpipipe draw timeline --schedule gpipe --ranks 4 --microbatches 8 --out a.svg
    """
    _of_schedule(pictures.draw_timeline, **options)


def memory(**options: Any) -> None:
    """Draw how many activations each rank holds at which time."""
    _of_schedule(pictures.draw_memory, **options)


def _of_schedule(
    draw: Callable[[Timeline, str], object],
    schedule: Annotated[
        str, Option("a name that schedules.by_name knows, or FILE.csv, whose order says its own sizes")
    ],
    out: Out,
    ranks: Annotated[int | None, Option("P, ranks of the pipeline")] = None,
    microbatches: Annotated[int | None, Option("M, micro-batches of a step")] = None,
    chunks: Annotated[int | None, Option("V, stages on each rank; default: 1")] = None,
    slices: Annotated[int | None, Option("n, slices of each sequence; default: 1")] = None,
    forward: Annotated[str, Option("time of F in a stage, or a,b,... with one for each stage")] = "1",
    input_grad: Annotated[str, Option("time of I, likewise; B takes I and W")] = "1",
    weight_grad: Annotated[str, Option("time of W, likewise")] = "1",
    transfer: Annotated[str, Option("time of a message into a stage, likewise")] = "0",
) -> None:
    def simulated() -> Timeline:
        costs = costs_of(forward, input_grad, weight_grad, transfer)
        sizes = given_of(ranks=ranks, microbatches=microbatches, chunks=chunks, slices=slices)
        if is_path(schedule):
            refuse("a file, whose order says it", sizes)
            return schedules.simulate(from_file(schedule), costs)
        if ranks is None or microbatches is None:
            raise ConfigError(
                "a schedule has no sizes of its own",
                found=f"--schedule {schedule}",
                expected="--ranks and --microbatches, or --schedule FILE.csv",
            )
        return schedules.simulate(schedules.by_name(schedule, **{"chunks": 1, **sizes}, costs=costs), costs)

    _drawn(out, lambda: draw(simulated(), out))


timeline.parameters = memory.parameters = parameters_of(_of_schedule)[1:]  # type: ignore[attr-defined]


def compare(
    ranks: Annotated[int, Option("P, ranks of the pipeline")],
    microbatches: Annotated[str, Option("numbers of micro-batches, as in 4,8,16")],
    out: Out,
    schedule: Annotated[list[str] | None, Option("a schedule to draw; several may be given; default: all")] = None,
    chunks: Annotated[int, Option("V of the schedules that take any")] = 2,
    forward: Annotated[float, Option("time of F in all stages of a rank together")] = 1,
    input_grad: Annotated[float, Option("time of I, likewise; B takes I and W")] = 1,
    weight_grad: Annotated[float, Option("time of W, likewise")] = 1,
    transfer: Annotated[float, Option("time of a message between two ranks")] = 0,
) -> None:
    """Draw bubble and peak memory over the number of micro-batches, of all schedules with the same work on a rank."""

    def work() -> None:
        counts = numbers("microbatches", microbatches, int)
        costs = Costs(forward, input_grad, weight_grad, transfer)
        pictures.draw_comparison(pictures.simulate_all(ranks, counts, schedule, chunks, costs), out)

    _drawn(out, work)


def split(folder: Folder, out: Out, step: Step = None) -> None:
    """Draw where the time of each rank went in a training.

    An example: python -m mpipipe draw split --trace runs/trace --out split.svg
    """
    _drawn(out, lambda: draw_parts(folder, out, step))


def trace(
    folder: Folder, out: Out, step: Step = None, replica: Annotated[int, Option("number of the pipeline, from 0")] = 0
) -> None:
    """Draw a step of a training below what its schedule predicts.

    An example: python -m mpipipe draw trace --trace runs/trace --out step.svg

    The prediction is simulated with the costs that were measured. Without --step it is the step of median time.
    """
    _drawn(out, lambda: draw_step(folder, out, step, replica))


def draw_parts(folder: Path, out: str | Path, step: int | None = None) -> None:
    """Draw the parts of the time in the folder of a trace: those of one step, or of the mean step."""
    recorded = read_trace(folder)
    if step is not None:
        number_in("step", step, recorded.steps)
    parts = recorded.parts if step is None else {rank: steps[step] for rank, steps in recorded.parts_of_steps.items()}
    pictures.draw_split([parts[rank] for rank in sorted(parts)], out)


def draw_step(folder: Path, out: str | Path, step: int | None = None, replica: int = 0) -> None:
    """Draw what one pipeline did in one step, below the prediction; in milliseconds."""
    recorded = read_trace(folder)
    measured = [
        [
            pictures.Measured(op, stage, microbatch, start * MILLISECONDS, end * MILLISECONDS)
            for (stage, op, microbatch), start, end in actions
        ]
        for actions in recorded.pipeline(recorded.middle_step() if step is None else step, replica)
    ]
    costs, stages = recorded.costs, recorded.schedule.stages
    names = ("forward", "input_grad", "weight_grad", "transfer")
    times = {name: [MILLISECONDS * time for time in costs.per_stage(name, stages)] for name in names}
    predicted = schedules.simulate(recorded.schedule, Costs(**times, slices=costs.slices))
    pictures.draw_timeline(predicted, out, measured, unit="ms")


def _drawn(out: str, work: Callable[[], object]) -> None:
    """Do the work in one process, and say where the picture is."""
    with refusing("draw"):
        files.check_new("the picture", out)
        pictures.check_can_draw(out)
        work()
    show(f"mpipipe: drawn into {out}\n")
