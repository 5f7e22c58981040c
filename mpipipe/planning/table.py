"""Plans as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mpipipe.planning.search import Plan
from mpipipe.text import counted, shown_bytes, text_table

SHOWN = 10
WIDEST = 32  # characters of a partition


def table(plans: Sequence[Plan]) -> Iterator[str]:
    """Yield the lines of a table of the best plans."""
    rows = [_row(plan, plans[0]) for plan in plans[:SHOWN]]
    heads = ("schedule", "chunks", "micro-batches", "layers of stages", "run again", "step", "bubble", "memory",
             "slower", "gap")  # fmt: skip
    yield from text_table(heads, rows, left=(0, 3, 4))


def in_words(plan: Plan) -> str:
    """Return a plan in one line."""
    choice, found = plan.choice, plan.prediction
    again = "" if choice.recomputation == "-" else f", forwards run again: {choice.recomputation}"
    return (
        f"{choice.schedule}, {counted(choice.chunks, 'chunk')}, {counted(choice.microbatches, 'micro-batch')}, "
        f"layers {','.join(map(str, choice.partition))}{again}: {shown_seconds(found.seconds)} a step, bubble "
        f"{found.bubble:.1%}, {shown_bytes(found.peak)} on a rank"
    )


def shown_seconds(seconds: float) -> str:
    """Show seconds with four digits."""
    return f"{seconds:.4g} s" if seconds >= 1 else f"{1e3 * seconds:.4g} ms"


def _row(plan: Plan, best: Plan) -> tuple[str, ...]:
    choice, found = plan.choice, plan.prediction
    partition = ",".join(map(str, choice.partition))
    return (
        choice.schedule,
        str(choice.chunks),
        str(choice.microbatches),
        partition if len(partition) <= WIDEST else f"{partition[: WIDEST - 3]}...",
        choice.recomputation,
        shown_seconds(found.seconds),
        f"{found.bubble:.1%}",
        shown_bytes(found.peak),
        f"{found.seconds / best.prediction.seconds - 1:.1%}",
        f"{found.gap:.1%}",
    )
