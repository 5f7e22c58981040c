"""What all pictures have in common: text that is legible, files as they are asked for, and what may be missing."""

import errno
import subprocess
import sys
from itertools import combinations

import pytest
from support.launch import job_environment

from mpipipe import files, schedules, tracing
from mpipipe.errors import ArgumentError, BackendError, StorageError
from mpipipe.tracing.sheet import BLACK, OPS, shade

pytest.importorskip("matplotlib")

HALF = schedules.Costs(0.5, 0.5, 0.5)
DRAWN = {
    "timeline": lambda path: tracing.draw_timeline(schedules.simulate(schedules.dualpipe_v(4, 10), HALF), path),
    "memory": lambda path: tracing.draw_memory(schedules.simulate(schedules.one_f_one_b(12, 12)), path),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", DRAWN)
def test_no_text_lies_on_another_or_beyond_the_edge(kind, tmp_path, monkeypatch):
    from matplotlib.text import Text

    boxes, sizes, sheets, draw = [], [], [], Text.draw

    def look(text, renderer):
        if text.get_text().strip():
            boxes.append((text.get_text(), text.get_window_extent(renderer)))
            sizes.append(text.get_fontsize())
            sheets.append(text.get_figure().bbox.frozen())
        draw(text, renderer)

    monkeypatch.setattr(Text, "draw", look)
    DRAWN[kind](tmp_path / "a.png")
    sheet = sheets[0]
    for text, box in boxes:
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= sheet.x1 and box.y1 <= sheet.y1, text
    for (text, one), (other, two) in combinations(boxes, 2):
        wide = min(one.x1, two.x1) - max(one.x0, two.x0)
        high = min(one.y1, two.y1) - max(one.y0, two.y0)
        assert wide <= 0.5 or high <= 4, (text, other)  # lines of text may be as close as their descenders
    assert min(sizes) >= 6


def test_png_and_svg_by_the_ending_and_twice_the_same(tmp_path):
    found = schedules.simulate(schedules.gpipe(2, 2))
    for name, head in (("a.png", b"\x89PNG"), ("b.PNG", b"\x89PNG"), ("c.svg", b"<?xml"), ("d.svg", b"<?xml")):
        tracing.draw_timeline(found, tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(head)
    assert (tmp_path / "c.svg").read_bytes() == (tmp_path / "d.svg").read_bytes()
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.PNG").read_bytes()


@pytest.mark.parametrize(
    "name, error, match",
    [
        *((name, ArgumentError, r"ends in \.png or \.svg") for name in ("a.pdf", "a", "svg")),
        *((name, StorageError, "no such folder") for name in ("absent/a.png", "file/a.png")),
        ("folder.png", StorageError, "a folder"),
    ],
)
def test_places_where_no_picture_can_be_are_refused(name, error, match, tmp_path):
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(error, match=match):
        tracing.draw_timeline(schedules.simulate(schedules.gpipe(1, 1)), tmp_path / name)


def test_a_full_disk_is_one_error(tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "write_whole", full)
    with pytest.raises(StorageError, match="No space left on device"):
        tracing.draw_timeline(schedules.simulate(schedules.gpipe(1, 1)), tmp_path / "a.svg")


def test_without_matplotlib_one_error_names_the_extra_and_text_is_still_drawn(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    schedule = schedules.one_f_one_b(2, 2)
    with pytest.raises(BackendError, match=r"pip install '.\[plot\]'`; schedules.timeline"):
        tracing.draw_timeline(schedules.simulate(schedule), tmp_path / "a.png")
    assert "0F0" in schedules.timeline(schedule)


def test_matplotlib_is_imported_by_nothing_but_a_picture():
    program = "import sys, mpipipe.cli, mpipipe.tracing; assert not {'matplotlib', 'mpi4py.MPI'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], env=job_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_settings_of_the_user_change_nothing(tmp_path):
    import matplotlib

    found = schedules.simulate(schedules.gpipe(1, 2))
    tracing.draw_timeline(found, tmp_path / "a.svg")
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "black", "svg.fonttype": "path"}):
        tracing.draw_timeline(found, tmp_path / "b.svg")
        assert matplotlib.rcParams["font.size"] == 30
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_numbers_can_be_read_on_every_colour():
    def light(colour):
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for colour in {shade(look.colour, chunk, 3) for look in OPS.values() for chunk in range(3)}:
        one, two = sorted((light(colour), light(BLACK)))
        assert (two + 0.05) / (one + 0.05) >= 4.5, colour  # what WCAG 2 asks for text
