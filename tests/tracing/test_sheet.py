"""What all pictures have in common: text that is legible, files as they are asked for, and what may be missing."""

import errno
import subprocess
import sys

import pytest
from support.launch import job_environment

from mpipipe import files, schedules, tracing
from mpipipe.errors import ArgumentError, BackendError, StorageError

pytest.importorskip("matplotlib")


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
        *((name, StorageError, "cannot be written: No") for name in ("absent/a.png", "file/a.png")),
        ("folder.png", StorageError, "cannot be written: Is a directory"),
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
