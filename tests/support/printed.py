"""Compare what a program printed with what a page says that it prints."""

import re

NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?(?![\w])")
ANYTHING = "..."
MARK = "\0"  # stands for a number; no text has it


def check_printed(printed: str, promised: str):
    """Raise AssertionError unless both have the same lines.

    "..." stands for any text within a line, and alone on a line for any lines. A number with a decimal point may differ
    by one and a half of its last digit, since processors round differently; every other number and text is exact.
    """
    found, expected = (_lines(text) for text in (printed, promised))
    for number, line in enumerate(expected):
        if line == ANYTHING:
            rest = expected[number + 1 :]
            assert len(found) - number >= len(rest), _differ(printed, promised, line)
            return check_printed("\n".join(found[len(found) - len(rest) :]), "\n".join(rest))
        assert number < len(found) and _same(found[number], line), _differ(printed, promised, line)
    assert len(found) == len(expected), _differ(printed, promised, "the number of lines")


def _lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.strip().splitlines()]


def _same(found: str, expected: str) -> bool:
    if found == expected:  # a timeline has rows of dots
        return True
    parts = [re.escape(NUMBER.sub(MARK, part)) for part in expected.split(ANYTHING)]
    numbers = NUMBER.findall(expected.replace(ANYTHING, " "))
    pattern = "(.*)".join(part.replace(MARK, f"({NUMBER.pattern})") for part in parts)
    match = re.fullmatch(pattern, found)
    if match is None:
        return False
    held = [text for text, group in zip(match.groups(), _kinds(parts)) if group == MARK]
    return all(_close(text, number) for text, number in zip(held, numbers, strict=True))


def _kinds(parts) -> str:
    """For each group of the pattern MARK (a number) or "*" (anything)."""
    return "*".join(MARK * part.count(MARK) for part in parts)


def _close(found: str, expected: str) -> bool:
    if "." not in expected or "e" in expected:
        return found == expected
    digits = len(expected.partition(".")[2])
    return abs(float(found) - float(expected)) <= 1.5 * 10**-digits


def _differ(printed, promised, where) -> str:
    return f"at {where!r}: printed\n{printed}\npromised\n{promised}"
