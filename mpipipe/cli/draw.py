"""mpipipe draw: pictures of schedules, without MPI."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from mpipipe import pictures, schedules
from mpipipe.cli.flags import Flag
from mpipipe.cli.one_process import check_one_process
from mpipipe.comm.abort import Stop
from mpipipe.comm.report import describe
from mpipipe.errors import ConfigError, MpipipeError
from mpipipe.schedules import Costs, Timeline

REFUSED = 2  # exit code, as of a configuration that cannot be used

Name = Annotated[str, Flag("a name that schedules.by_name knows")]
Ranks = Annotated[int, Flag("P, ranks of the pipeline")]
Microbatches = Annotated[int, Flag("M, micro-batches of a step")]
Chunks = Annotated[int, Flag("V, stages on each rank")]
Out = Annotated[str, Flag("new file that ends in .png or .svg")]
# of a chunk, each a number, or one for each stage with commas between them
Forward = Annotated[str, Flag("time of F in a stage, or a,b,... with one for each stage")]
InputGrad = Annotated[str, Flag("time of I, likewise; B takes I and W")]
WeightGrad = Annotated[str, Flag("time of W, likewise")]
Transfer = Annotated[str, Flag("time of a message into a stage, likewise")]


def timeline(
    schedule: Name,
    ranks: Ranks,
    microbatches: Microbatches,
    out: Out,
    chunks: Chunks = 1,
    forward: Forward = "1",
    input_grad: InputGrad = "1",
    weight_grad: WeightGrad = "1",
    transfer: Transfer = "0",
) -> None:
    """Draw who computes what at which time (draw timeline --schedule gpipe --ranks 4 --microbatches 8 --out a.svg)."""

    def work() -> None:
        times = {"forward": forward, "input-grad": input_grad, "weight-grad": weight_grad, "transfer": transfer}
        pictures.draw_timeline(_simulated(schedule, ranks, chunks, microbatches, times), out)

    _drawn(out, work)


def memory(
    schedule: Name,
    ranks: Ranks,
    microbatches: Microbatches,
    out: Out,
    chunks: Chunks = 1,
    forward: Forward = "1",
    input_grad: InputGrad = "1",
    weight_grad: WeightGrad = "1",
    transfer: Transfer = "0",
) -> None:
    """Draw how many activations each rank holds at which time."""

    def work() -> None:
        times = {"forward": forward, "input-grad": input_grad, "weight-grad": weight_grad, "transfer": transfer}
        pictures.draw_memory(_simulated(schedule, ranks, chunks, microbatches, times), out)

    _drawn(out, work)


def compare(
    ranks: Ranks,
    microbatches: Annotated[str, Flag("numbers of micro-batches, as in 4,8,16")],
    out: Out,
    schedule: Annotated[list[str] | None, Flag("a schedule to draw; several may be given; default: all")] = None,
    chunks: Annotated[int, Flag("V of the schedules that take any")] = 2,
    forward: Annotated[float, Flag("time of F in all stages of a rank together")] = 1,
    input_grad: Annotated[float, Flag("time of I, likewise; B takes I and W")] = 1,
    weight_grad: Annotated[float, Flag("time of W, likewise")] = 1,
    transfer: Annotated[float, Flag("time of a message between two ranks")] = 0,
) -> None:
    """Draw bubble and peak memory over the number of micro-batches, of all schedules with the same work on a rank."""

    def work() -> None:
        counts = [int(count) for count in _numbers("microbatches", microbatches, int)]
        costs = Costs(forward, input_grad, weight_grad, transfer)
        pictures.draw_comparison(pictures.simulate_all(ranks, counts, schedule, chunks, costs), out)

    _drawn(out, work)


def _drawn(out: str, work: Callable[[], None]) -> None:
    """Do the work in one process, and say where the picture is."""
    try:
        check_one_process("draw")
        if Path(out).exists():
            raise ConfigError(
                "there is a file or folder of this name already",
                found=out,
                expected="a new file",
                remedy="choose another one with --out, or move the old one away",
            )
        pictures.check_can_draw(out)
        work()
    except MpipipeError as error:
        raise Stop(describe(error, "mpipipe: nothing is drawn"), REFUSED) from error
    print(f"mpipipe: drawn into {out}")


def _simulated(name: str, ranks: int, chunks: int, microbatches: int, times: dict[str, str]) -> Timeline:
    numbers = [_numbers(option, text, float) for option, text in times.items()]
    costs = Costs(*(each if len(each) > 1 else each[0] for each in numbers))
    built = schedules.by_name(name, ranks=ranks, chunks=chunks, microbatches=microbatches, costs=costs)
    return schedules.simulate(built, costs)


def _numbers(option: str, text: str, kind: Callable[[str], int | float]) -> list[int | float]:
    """Read numbers with commas between them."""
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(
            f"--{option} is no list of numbers", found=repr(text), expected="a number, or several as in 4,8,16"
        ) from error
