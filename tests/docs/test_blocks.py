"""Every block of code of the README and of the pages runs in a fresh checkout, in the order of the page."""

import re

import pytest
from support.launch import ROOT
from support.pages import RUN, SHOWN, Block, Reader, blocks_of, read_page

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "api").glob("*.md")),
]
WIDTH = 88  # characters that the box of a page holds
WITH_CODE = [page for page in PAGES if any(block.language not in SHOWN for block in blocks_of(page))]


QUICK = "losses"  # of the README others show each command


def with_marks(page):
    """The page as a parameter; the pages are long but for one."""
    return pytest.param(page, id=page.stem, marks=() if page.stem == QUICK else pytest.mark.long)


def test_readme_and_the_guide_have_code():
    names = {page.stem for page in WITH_CODE}
    assert {"README", "start", "schedules", "ring-attention", "stages", "failures", "CONTRIBUTING"} <= names


@pytest.mark.parametrize("page", [with_marks(page) for page in WITH_CODE])
def test_blocks_run_in_order(allow_seconds, tmp_path, page):
    allow_seconds(300)
    assert read_page(page, tmp_path / "checkout") > 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_fence_names_a_language_that_is_run_or_shown(page):
    fences = re.findall(r"^ *```(\S*)", page.read_text(), re.MULTILINE)
    opening, closing = fences[::2], fences[1::2]
    directives = {"{toctree}", "{include}", "{eval-rst}", "{glossary}"}
    assert set(opening) <= {*RUN, *SHOWN, *directives}
    assert set(closing) <= {""}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_line_of_code_is_wider_than_its_box(page):
    lines = [line for block in blocks_of(page) for line in block.text.splitlines()]
    assert [line for line in lines if len(line) > WIDTH] == []


def test_code_of_tasks_on_a_page_is_that_of_their_files():
    files = [path.read_text() for path in (ROOT / "docs" / "tasks").glob("*.py")]
    shown = [block.text for page in PAGES for block in blocks_of(page) if block.language == "py"]
    assert len(shown) >= 4
    assert [text for text in shown if not any(text in file for file in files)] == []


def test_a_reader_notices_what_fails_or_prints_something_else(tmp_path):
    reader = Reader(tmp_path / "checkout")
    try:
        reader.read(Block("python", "number = 3\nprint(number)\n", 1))
        reader.read(Block("output", "3\n", 2))
        reader.read(Block("python", "print(number + 1)\n", 3))
        with pytest.raises(AssertionError):
            reader.read(Block("output", "3\n", 4))
        reader.read(Block("bash", "export WORD=kept; mkdir -p below; cd below\n", 5))
        reader.read(Block("bash", 'echo "$WORD" "$(basename "$PWD")"\n', 6))
        reader.read(Block("output", "kept below\n", 7))
        with pytest.raises(AssertionError):
            reader.read(Block("bash", "false\ntrue\n", 8))
        with pytest.raises(AssertionError, match="NameError"):
            reader.read(Block("python", "print(unknown)\n", 9))
    finally:
        reader.close()
