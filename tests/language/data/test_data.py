"""Files to windows of bytes: what is found, what is held out, and that batches follow from the step alone."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpipipe.errors import DataError
from mpipipe.language import data
from mpipipe.language.data import Corpus, Piece, Text, find_files, source, training_batch, validation_batch


@given(
    contents=st.lists(st.binary(max_size=40), min_size=1, max_size=6),
    cuts=st.tuples(st.integers(0, 300), st.integers(0, 300)),
)
@settings(max_examples=50)
def test_text_reads_as_the_concatenation_of_its_pieces(tmp_path_factory, contents, cuts):
    folder = tmp_path_factory.mktemp("pieces")
    pieces, whole = [], b""
    for index, content in enumerate(contents):
        path = folder / str(index)
        path.write_bytes(content)
        start = len(content) // 3
        pieces.append(Piece(path, start, len(content) - start))
        whole += content[start:]
    text = Text(pieces)
    start, stop = sorted(cut % (len(whole) + 1) for cut in cuts)
    assert len(text) == len(whole)
    assert text.read(start, stop - start).tobytes() == whole[start:stop]


def test_reading_outside_of_a_text_is_an_error(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"0123456789")
    text = Text([Piece(path, 0, 10)])
    for start, count in ((0, 11), (10, 1), (-1, 2)):
        with pytest.raises(IndexError):
            text.read(start, count)


def test_a_folder_gives_its_text_files_sorted_without_hidden_empty_and_binary_ones(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_bytes(b"hidden")
    (tmp_path / "sub" / "z.txt").write_bytes(b"zz")
    files = {"b.txt": b"b", "a.txt": b"aaa", ".hidden": b"x", "empty": b"", "binary": b"\x00\x01", "t.txt": b"t"}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    found = [(path.relative_to(tmp_path).as_posix(), size) for path, size in find_files(tmp_path)]
    assert found == [("a.txt", 3), ("b.txt", 1), ("sub/z.txt", 2), ("t.txt", 1)]


def test_a_binary_file_that_is_named_itself_is_refused_with_what_to_do(tmp_path):
    path = tmp_path / "data.bin"
    path.write_bytes(np.arange(300, dtype=np.uint16).tobytes())
    with pytest.raises(DataError, match="binary file without a header") as caught:
        find_files(path)
    assert str(path) in caught.value.found and "tokenize" in caught.value.remedy


@pytest.mark.parametrize("what", ["missing", "empty file", "empty folder", "only binary"])
def test_data_that_are_not_there_are_refused_with_the_remedy(tmp_path, what):
    path = tmp_path / "here"
    if what == "empty file":
        path.write_bytes(b"")
    elif what != "missing":
        path.mkdir()
        if what == "only binary":
            (path / "x").write_bytes(b"\x00")
    with pytest.raises(DataError, match="--data") as caught:
        Corpus.open([path], seq_len=4)
    assert str(path) in str(caught.value)


def test_data_shorter_than_a_sequence_are_refused(tmp_path):
    path = tmp_path / "short.txt"
    path.write_bytes(b"x" * 199)  # one in twenty is held out: 9 bytes, where 9 + 1 are needed
    with pytest.raises(DataError, match="too short") as caught:
        Corpus.open([path], seq_len=9)
    assert "199 bytes" in str(caught.value)
    path.write_bytes(b"x" * 200)
    assert len(Corpus.open([path], seq_len=9).validation) == 10


def test_training_and_validation_share_no_byte_and_miss_none(tmp_path):
    rng = np.random.default_rng(0)
    contents = [rng.integers(1, 256, size, np.uint8).tobytes() for size in (1000, 37, 5, 400)]
    paths = []
    for index, content in enumerate(contents):
        paths.append(tmp_path / str(index))
        paths[-1].write_bytes(content)
    corpus = Corpus.open(paths, seq_len=8)
    train = corpus.train.read(0, len(corpus.train)).tobytes()
    validation = corpus.validation.read(0, len(corpus.validation)).tobytes()
    assert train == contents[0][:950] + contents[1][:36] + contents[2] + contents[3][:380]
    assert validation == contents[0][950:] + contents[1][36:] + contents[3][380:]


def test_fingerprint_tells_other_files_and_sizes_apart_but_not_other_folders(tmp_path):
    folders = [tmp_path / name for name in "abcd"]
    for folder, name, size in zip(folders, ("x", "x", "y", "x"), (500, 500, 500, 501), strict=True):
        folder.mkdir()
        (folder / name).write_bytes(b"t" * size)
    prints = [Corpus.open([folder], seq_len=4).fingerprint for folder in folders]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


def test_fingerprint_tells_other_contents_of_the_same_name_and_size_apart(tmp_path):
    content = np.random.default_rng(0).integers(2, 256, 300_000, np.uint8)
    prints = set()
    for changed in (None, 0, 5000, 150_000, 299_999):  # one byte; the whole of a file of this size counts
        other = content.copy()
        if changed is not None:
            other[changed] ^= 1
        (tmp_path / "text").write_bytes(other.tobytes())
        prints.add(Corpus.open([tmp_path], seq_len=4).fingerprint)
    assert len(prints) == 5


def test_fingerprint_reads_little_of_big_files_and_of_many(tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(source, "read_bytes", lambda path, start, count: read.append((start, count)) or b"x")
    found = source.fingerprint
    found([(tmp_path / "big", 1 << 40)])
    assert len(read) == source.BLOCKS and sum(count for _, count in read) <= 16 << 20
    assert read[0] == (0, 4096) and read[-1] == ((1 << 40) - 4096, 4096)
    gaps = np.diff([start for start, _ in read])
    assert gaps.max() <= gaps.min() + 4096
    read.clear()
    found([(tmp_path / str(number), 1 << 20) for number in range(100_000)])
    assert len(read) == 2 * source.FILES


def test_fingerprint_finds_two_halves_of_one_text(tmp_path):
    """What `head -c` and `tail -c` leave in files of one name."""
    content = np.random.default_rng(1).integers(1, 256, 40 << 20, np.uint8)
    prints = []
    for name, part in (("a", content[: 20 << 20]), ("b", content[20 << 20 :])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text").write_bytes(part.tobytes())
        prints.append(Corpus.open([tmp_path / name / "text"], seq_len=4).fingerprint)
    assert prints[0] != prints[1]


@given(total=st.integers(0, 200), count=st.integers(2, 50))
def test_spread_numbers_are_distinct_in_order_and_reach_both_ends(total, count):
    numbers = source.spread(total, count)
    assert numbers == sorted(set(numbers)) and len(numbers) == min(total, count)
    assert not numbers or (numbers[0], numbers[-1]) == (0, total - 1)


def test_a_file_that_is_cut_short_while_it_is_read_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"x" * 20_000)
    corpus = Corpus.open([path], seq_len=100)
    os.truncate(path, 7000)
    corpus.train.read(0, 7000)
    with pytest.raises(DataError, match="shorter") as caught:
        corpus.train.read(6990, 20)
    assert (caught.value.found, caught.value.expected) == (f"7000 bytes in {path}", "at least 7010")
    assert "copy" in caught.value.remedy


def test_a_file_that_is_gone_when_it_is_read_again_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"x" * 500)
    text = Text([Piece(path, 0, 500)])
    path.unlink()
    with pytest.raises(DataError, match="cannot be read") as caught:
        text.read(0, 5)
    assert caught.value.found == str(path)


def test_a_new_file_under_an_old_name_is_read_by_the_next_corpus(tmp_path):
    path, new = tmp_path / "text", tmp_path / "new"
    for letter in (b"a", b"b"):
        new.write_bytes(letter * 500)
        os.replace(new, path)
        assert Corpus.open([path], seq_len=4).train.read(0, 3).tobytes() == letter * 3


def test_more_files_than_descriptors_are_kept(tmp_path):
    pieces = []
    for number in range(600):
        path = tmp_path / str(number)
        path.write_bytes(bytes([number % 256]))
        pieces.append(Piece(path, 0, 1))
    text = Text(pieces)
    for _ in range(2):
        assert text.read(0, 600).tolist() == [number % 256 for number in range(600)]
    if os.path.exists("/proc/self/fd"):
        links = [os.path.join("/proc/self/fd", number) for number in os.listdir("/proc/self/fd")]
        assert sum(os.path.realpath(link).startswith(str(tmp_path)) for link in links) <= 256


@pytest.fixture
def counting(tmp_path):
    """A text in which the byte at position i is i mod 251."""
    path = tmp_path / "counting"
    path.write_bytes(bytes(i % 251 for i in range(5000)))
    return Text([Piece(path, 0, 5000)])


def test_targets_are_the_inputs_moved_on_by_one_byte(counting):
    inputs, targets = training_batch(counting, seed=0, step=3, batch=6, rows=slice(0, 6), seq_len=50)
    assert inputs.shape == targets.shape == (6, 50)
    assert inputs.dtype == targets.dtype == np.int64
    assert inputs.flags.c_contiguous and targets.flags.c_contiguous
    np.testing.assert_array_equal(inputs[:, 1:], targets[:, :-1])
    np.testing.assert_array_equal(targets, (inputs + 1) % 251)


def test_batches_follow_from_seed_and_step_alone(counting):
    def starts(seed, step):
        return training_batch(counting, seed=seed, step=step, batch=16, rows=slice(0, 16), seq_len=9)[0][:, 0].tolist()

    first = starts(0, 7)
    starts(0, 8)
    assert starts(0, 7) == first
    assert len({tuple(starts(seed, step)) for seed in range(3) for step in range(20)}) == 60


@given(replicas=st.integers(1, 5), rows=st.integers(1, 4), step=st.integers(0, 2**40))
@settings(max_examples=20)
def test_the_shares_of_the_replicas_make_up_the_batch_of_one(tmp_path_factory, replicas, rows, step):
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_bytes(np.random.default_rng(1).integers(0, 256, 300, np.uint8).tobytes())
    text, batch = Text([Piece(path, 0, 300)]), replicas * rows
    for draw, which in ((training_batch, {"seed": 5, "step": step}), (validation_batch, {"index": 1, "batches": 3})):
        whole = draw(text, **which, batch=batch, rows=slice(0, batch), seq_len=7)
        parts = [
            draw(text, **which, batch=batch, rows=slice(r * rows, (r + 1) * rows), seq_len=7) for r in range(replicas)
        ]
        for side in (0, 1):
            np.testing.assert_array_equal(np.concatenate([part[side] for part in parts]), whole[side])


def test_training_windows_reach_both_ends_of_the_text(tmp_path):
    path = tmp_path / "short"
    path.write_bytes(bytes(range(12)))
    text, firsts = Text([Piece(path, 0, 12)]), set()
    for step in range(40):
        firsts |= set(training_batch(text, seed=0, step=step, batch=4, rows=slice(0, 4), seq_len=9)[0][:, 0].tolist())
    assert firsts == {0, 1, 2}


def test_validation_windows_spread_over_the_whole_text(counting):
    batches = [
        validation_batch(counting, index=index, batches=4, batch=5, rows=slice(0, 5), seq_len=20) for index in range(4)
    ]
    inputs = np.concatenate([inputs for inputs, _ in batches])
    np.testing.assert_array_equal(inputs[0], np.arange(20))
    assert batches[-1][1][-1, -1] == 4999 % 251
    starts = np.arange(20) * (5000 - 21) // 19
    np.testing.assert_array_equal(inputs[:, 0], starts % 251)


def test_one_validation_window_of_a_text_that_just_holds_it(tmp_path):
    path = tmp_path / "exact"
    path.write_bytes(b"abcde")
    inputs, targets = validation_batch(
        Text([Piece(path, 0, 5)]), index=0, batches=1, batch=1, rows=slice(0, 1), seq_len=4
    )
    assert (inputs.tolist(), targets.tolist()) == ([[97, 98, 99, 100]], [[98, 99, 100, 101]])


def test_the_default_is_the_source_of_the_standard_library():
    files = data.standard_library()
    names = [path.name for path, _ in files]
    assert "argparse.py" in names and "json" in {path.parent.name for path, _ in files}
    assert all(path.suffix == ".py" and size > 0 for path, size in files)
    assert not any("site-packages" in path.parts for path, _ in files)
    assert files == data.standard_library()
