"""Bytes of files by position, and the hashes by which ranks compare what they see."""

import os

import numpy as np
import pytest

from mpipipe.errors import DataError
from mpipipe.language import data
from mpipipe.language.data import file_bytes


def test_a_file_that_is_cut_short_or_gone_while_it_is_read_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"x" * 20_000)
    train = data.find([path]).open(100).train
    os.truncate(path, 7000)
    train.read(0, 7000)
    with pytest.raises(DataError, match="shorter") as caught:
        train.read(6990, 20)
    assert (caught.value.found, caught.value.expected) == (f"7000 bytes in {path}", "at least 7010")
    assert "copy" in caught.value.remedy
    path.unlink()
    file_bytes.forget_files()
    with pytest.raises(DataError, match="cannot be read") as caught:
        train.read(0, 5)
    assert caught.value.found == str(path)


def test_a_new_file_under_an_old_name_is_read_by_the_next_listing(tmp_path):
    path, new = tmp_path / "text", tmp_path / "new"
    for letter in (b"a", b"b"):
        new.write_bytes(letter * 500)
        os.replace(new, path)
        assert data.find([path]).open(4).train.read(0, 3).tobytes() == letter * 3


def test_more_files_than_descriptors_are_kept(tmp_path):
    for number in range(600):
        (tmp_path / f"{number:03}").write_bytes(bytes([number % 255 + 1]))
    text = data.find([tmp_path]).whole()
    for _ in range(2):
        assert text.read(0, 600).tolist() == [number % 255 + 1 for number in range(600)]
    if os.path.exists("/proc/self/fd"):
        links = [os.path.join("/proc/self/fd", number) for number in os.listdir("/proc/self/fd")]
        assert sum(os.path.realpath(link).startswith(str(tmp_path)) for link in links) <= 256


def test_fingerprint_tells_other_names_sizes_and_contents_apart_but_not_other_folders(tmp_path):
    content = np.random.default_rng(0).integers(2, 256, 300_000, np.uint8)
    prints = []
    for name, size, changed in (
        ("x", 300_000, None), ("x", 300_000, None), ("y", 300_000, None), ("x", 299_999, None),
        *(("x", 300_000, place) for place in (0, 5000, 150_000, 299_999)),  # the whole of a file of this size counts
    ):  # fmt: skip
        other = content[:size].copy()
        if changed is not None:
            other[changed] ^= 1
        folder = tmp_path / str(len(prints))
        folder.mkdir()
        (folder / name).write_bytes(other.tobytes())
        prints.append(data.find([folder]).fingerprint)
    assert prints[0] == prints[1] and len(set(prints)) == len(prints) - 1


@pytest.mark.long
def test_fingerprint_reads_little_of_big_files_and_of_many(tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(file_bytes, "read_bytes", lambda path, start, count: read.append((start, count)) or b"x")
    file_bytes.fingerprint([(tmp_path / "big", 1 << 40)])
    assert len(read) == file_bytes.BLOCKS and sum(count for _, count in read) <= 16 << 20
    assert read[0] == (0, 4096) and read[-1] == ((1 << 40) - 4096, 4096)
    gaps = np.diff([start for start, _ in read])
    assert gaps.max() <= gaps.min() + 4096
    read.clear()
    file_bytes.fingerprint([(tmp_path / str(number), 1 << 20) for number in range(100_000)])
    assert len(read) == 2 * file_bytes.FILES
