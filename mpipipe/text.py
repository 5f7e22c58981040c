"""Pieces of sentences that messages share: counts, sizes, names that may have been meant, what to install."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

BYTES = (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10))  # with their powers of two


def counted(count: int, noun: str) -> str:
    """Return a count with its noun in the singular or plural.

    Parameters
    ----------
    count : int
        How many there are.
    noun : str
        The noun in the singular.

    Returns
    -------
    str
        Such as "1 rank" or "3 batches".

    Examples
    --------
    >>> from mpipipe.text import counted
    >>> counted(1, "core"), counted(4, "core"), counted(2, "micro-batch")
    ('1 core', '4 cores', '2 micro-batches')
    """
    ending = "" if count == 1 else "es" if noun.endswith("ch") else "s"
    return f"{count} {noun}{ending}"


def shown_bytes(count: float) -> str:
    """Return a number of bytes in the largest unit of which there is one.

    Parameters
    ----------
    count : float
        Bytes.

    Returns
    -------
    str
        With three digits, and with four from 1000 to 1023 of a unit.

    Examples
    --------
    >>> from mpipipe.text import shown_bytes
    >>> shown_bytes(1536), shown_bytes(900), shown_bytes(2**43)
    ('1.5 KiB', '900 bytes', '8 TiB')
    """
    for unit, power in BYTES:
        if count >= 2**power:
            digits = ".0f" if count >= 999.5 * 2**power else ".3g"
            return f"{count / 2**power:{digits}} {unit}"
    return counted(round(count), "byte")


def exact_bytes(count: int) -> str:
    """Return a number of bytes for people who compare it with another one: in a unit, and exactly.

    Parameters
    ----------
    count : int
        Bytes.

    Returns
    -------
    str
        As `shown_bytes`, and from 1 KiB on the number itself.

    Examples
    --------
    >>> from mpipipe.text import exact_bytes
    >>> exact_bytes(1536)
    '1.5 KiB (1536 bytes)'
    """
    return f"{shown_bytes(count)} ({count} bytes)" if count >= 1024 else shown_bytes(count)


def near(name: str, known: Iterable[str], other_names: Mapping[str, str] | None = None) -> list[str]:
    """Return the names that may have been meant by one that is not known.

    Parameters
    ----------
    name : str
        What somebody wrote; case, and "-" for "_", are overlooked.
    known : iterable of str
        The names that exist.
    other_names : mapping of str to str, optional
        What others call them: from their name to the one that exists.

    Returns
    -------
    list of str
        The one that others call so; else at most three that look alike, the nearest first.

    Examples
    --------
    >>> from mpipipe.text import near
    >>> near("step", ["steps", "seed"]), near("partition", ["queue", "name"], {"partition": "queue"})
    (['steps'], ['queue'])
    """
    names = {as_word(each): each for each in known}
    word = as_word(name)
    meant = (other_names or {}).get(word)
    return [names[meant]] if meant in names else [names[each] for each in difflib.get_close_matches(word, names, n=3)]


def as_word(name: str) -> str:
    """Return a name as tables of names have it: in small letters, with "_" for "-".

    Parameters
    ----------
    name : str
        What somebody wrote, without dashes before it.

    Returns
    -------
    str
        Such as "batch_size".

    Examples
    --------
    >>> from mpipipe.text import as_word
    >>> as_word("Batch-Size")
    'batch_size'
    """
    return name.replace("-", "_").lower()


def how_to_install(extra: str) -> str:
    """Return how to install the libraries of an extra of this package.

    Parameters
    ----------
    extra : str
        Its name, as in pyproject.toml.

    Returns
    -------
    str
        A remedy.

    Examples
    --------
    >>> from mpipipe.text import how_to_install
    >>> how_to_install("plot")
    "in a checkout of mpipipe `pip install '.[plot]'`"
    """
    return f"in a checkout of mpipipe `pip install '.[{extra}]'`"


# -- A table as lines of text -----------------------------------------------------------------------------------------


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
    >>> from mpipipe.text import text_table
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
