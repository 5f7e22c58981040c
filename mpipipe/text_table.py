"""A table as lines of text."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence


def text_table(heads: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> Iterator[str]:
    r"""Yield the lines of a table: heads, a rule, and the rows, in columns as wide as their widest cell.

    Parameters
    ----------
    heads : sequence of str
        Title of each column.
    rows : sequence of sequences of str
        Cells, one for each column.
    left : collection of int
        Columns that are aligned at the left; the others are at the right.

    Examples
    --------
    >>> from mpipipe.text_table import text_table
    >>> print(*text_table(["name", "count"], [["a", "10"], ["bcdef", "2"]]), sep="\n")
    name   count
    -----  -----
    a         10
    bcdef      2
    """
    widths = [max(map(len, column)) for column in zip(heads, *rows)]
    for row in (heads, ["-" * width for width in widths], *rows):
        cells = (
            cell.ljust(width) if place in left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths))
        )
        yield "  ".join(cells).rstrip()
