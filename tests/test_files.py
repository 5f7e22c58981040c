"""Only regular files are opened, nothing waits for another process, and writing leaves a whole file or none."""

import errno
import os
import stat

import pytest

from mpipipe import files
from mpipipe.errors import ArgumentError, ConfigError, DataError
from mpipipe.language.data import find_files
from mpipipe.language.models.model_folder import open_model


def test_a_device_is_not_opened():
    for use in (files.check_regular, files.open_regular, lambda path: files.read_text(path, 10)):
        with pytest.raises(OSError, match="character device"):
            use("/dev/zero")


def test_a_fifo_that_takes_the_place_of_a_file_is_not_waited_for(tmp_path, monkeypatch):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    monkeypatch.setattr(files, "check_regular", lambda path: None)  # at that time it was a file
    before = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0
    with pytest.raises(OSError, match="FIFO"):
        files.open_regular(path)
    assert not before or len(os.listdir("/proc/self/fd")) == before


def test_zeros_end_the_reading_of_a_text_where_they_begin(tmp_path):
    path = tmp_path / "text"
    path.write_text("text")
    os.truncate(path, 1 << 36)
    with pytest.raises(OSError, match="byte 4 is 0") as caught:
        files.read_text(path, 1 << 40)
    assert caught.value.filename == str(path)
    path.write_text("text")
    assert files.read_text(path, 4) == "text"


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "\ud800"], ids=["long", "zero byte", "half a character"])
def test_a_name_that_no_file_can_have_is_not_there(tmp_path, name):
    path = tmp_path / name
    assert not files.exists(path) and not files.is_folder(path)
    with pytest.raises(OSError) as caught:  # the words are the system's
        files.read_text(path, 10)
    assert caught.value.filename == str(path)


def test_a_fifo_in_a_folder_of_data_is_left_out(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "text.txt").write_text("text")
    assert [path.name for path, _ in find_files(tmp_path)] == ["text.txt"]


def test_weights_that_are_no_files_are_refused(tmp_path):
    os.mkfifo(tmp_path / "manifest.json")
    with pytest.raises(ArgumentError, match=r"no checkpoint: .*FIFO"):
        open_model(tmp_path)


def test_bytes_by_position_end_where_the_file_does(tmp_path, monkeypatch):
    path = tmp_path / "digits"
    path.write_bytes(b"0123456789")
    descriptor = files.open_regular(path)
    try:
        assert [files.read_at(descriptor, *span) for span in ((0, 3), (7, 3), (7, 9), (10, 1))] == [
            b"012", b"789", b"789", b"",
        ]  # fmt: skip
        original = os.preadv
        monkeypatch.setattr(os, "preadv", lambda fd, buffers, start: original(fd, [buffers[0][:2]], start))
        assert files.read_at(descriptor, 1, 7) == b"1234567"  # some file systems give less than was asked for
    finally:
        os.close(descriptor)


def test_a_file_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "file"
    for content in (b"one", b"another"):
        files.write_whole(path, content)
        assert path.read_bytes() == content
    assert os.listdir(tmp_path) == ["file"]
    (tmp_path / "usual").write_bytes(b"")
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((tmp_path / "usual").stat().st_mode)


def test_a_full_disk_leaves_no_part_of_a_file_and_the_old_one_whole(tmp_path, room):
    path = tmp_path / "file"
    files.write_whole(path, b"old")
    room(100_000)
    with pytest.raises(OSError) as caught:
        files.write_whole(path, bytes(1 << 20))
    room(None)
    assert caught.value.errno in (errno.EFBIG, errno.ENOSPC)
    assert os.listdir(tmp_path) == ["file"] and path.read_bytes() == b"old"


def test_reading_and_writing_name_the_file_and_what_the_system_says(tmp_path):
    path = tmp_path / "absent"
    with pytest.raises(DataError) as caught, files.reading("the text", path, DataError, remedy="name another"):
        files.read_text(path, 10)
    assert str(caught.value).splitlines() == [
        "the text cannot be read: No such file or directory",
        f"  found: {path}",
        f"  expected: {files.REGULAR}",
        "  remedy: name another",
    ]
    with pytest.raises(ConfigError, match=r"the plan cannot be written: No such file or directory\n  found: .*/plan$"):
        with files.writing("the plan", path / "plan"):
            files.write_whole(path / "plan", b"")
    with pytest.raises(ConfigError, match=f"No such file or directory: {path}/two\n  found: {path}/one"):
        with files.writing("the folder", path / "one"):
            open(path / "two", "xb")
    with pytest.raises(DataError, match=r"^too short$"), files.reading("the numbers", path, also=(ValueError,)):
        raise DataError("too short")  # an error of the package says already what is wrong
