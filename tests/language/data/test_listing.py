"""What `--data` names: which files are found, what is held out, and what is refused."""

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.token_files import random_documents, write_tokens

from mpipipe.errors import DataError
from mpipipe.language import data
from mpipipe.language.data import file_bytes


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=6), st.tuples(st.integers(0, 300), st.integers(0, 300)))
@settings(max_examples=50)
def test_text_reads_as_the_concatenation_of_its_files_which_are_documents(tmp_path_factory, contents, cuts):
    folder = tmp_path_factory.mktemp("files")
    contents = [b"x" + content.replace(b"\0", b"x") for content in contents]  # no format begins so
    paths, whole = [folder / str(index) for index in range(len(contents))], b"".join(contents)
    for path, content in zip(paths, contents):
        path.write_bytes(content)
    text = data.find(paths).whole()
    start, stop = sorted(cut % (len(whole) + 1) for cut in cuts)
    assert len(text) == text.nbytes == len(whole)
    assert bytes(text.read(start, stop - start).tolist()) == whole[start:stop]
    starts = np.cumsum([0, *map(len, contents[:-1])])
    assert text.starts(start, stop).tolist() == [place for place in starts if start <= place < stop]
    for first, count in ((0, len(whole) + 1), (len(whole), 1), (-1, 2)):
        with pytest.raises(IndexError):
            text.read(first, count)


def test_a_folder_gives_its_text_files_sorted_without_hidden_empty_and_binary_ones(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_bytes(b"hidden")
    (tmp_path / "sub" / "z.txt").write_bytes(b"zz")
    files = {"b.txt": b"b", "a.txt": b"aaa", ".hidden": b"x", "empty": b"", "binary": b"\x00\x01", "t.txt": b"t"}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    listed = [(path.relative_to(tmp_path).as_posix(), size) for path, size in data.find([tmp_path]).files]
    assert listed == [("a.txt", 3), ("b.txt", 1), ("sub/z.txt", 2), ("t.txt", 1)]


@pytest.mark.parametrize("what", ["missing", "empty file", "empty folder", "only binary", "binary file"])
def test_data_that_are_not_there_or_binary_are_refused_with_the_remedy(tmp_path, what):
    path = tmp_path / "here"
    if what.endswith("file"):
        path.write_bytes(b"\x00\x01" * (what == "binary file"))
    elif what != "missing":
        path.mkdir()
        if what == "only binary":
            (path / "x").write_bytes(b"\x00")
    words = "binary file without a header" if what == "binary file" else "--data"
    with pytest.raises(DataError, match=words) as caught:
        data.find([path])
    assert str(path) in str(caught.value)
    assert what != "binary file" or "tokenize" in caught.value.remedy


def test_data_shorter_than_a_sequence_are_refused(tmp_path):
    text, tokens = tmp_path / "short.txt", write_tokens(tmp_path / "tokens", np.arange(40), [0], [100])
    text.write_bytes(b"x" * 199)  # one in twenty is held out: 9 bytes, where 9 + 1 are needed
    for path, seq_len, words in ((text, 9, "199 bytes"), (tokens, 2, "40 tokens")):
        with pytest.raises(DataError, match="too short") as caught:
            data.find([path]).open(seq_len)
        assert words in caught.value.found and str(path) in caught.value.found
    text.write_bytes(b"x" * 200)
    assert len(data.find([text]).open(9).validation) == 10
    assert len(data.find([tokens]).open(1).validation) == 2


def test_training_and_validation_of_text_share_no_byte_and_miss_none(tmp_path):
    rng = np.random.default_rng(0)
    contents = [rng.integers(1, 256, size, np.uint8).tobytes() for size in (1000, 37, 5, 400)]
    for index, content in enumerate(contents):
        (tmp_path / str(index)).write_bytes(content)
    source = data.find([tmp_path]).open(8)
    train, validation = (bytes(part.read(0, len(part)).tolist()) for part in (source.train, source.validation))
    assert train == contents[0][:950] + contents[1][:36] + contents[2] + contents[3][:380]
    assert validation == contents[0][950:] + contents[1][36:] + contents[3][380:]
    assert (source.train.nbytes, source.validation.nbytes) == (len(train), len(validation))


def test_the_default_is_the_source_of_the_standard_library():
    listing = data.find([])
    paths = [path for path, _ in listing.files]
    names = [path.name for path in paths]
    assert "argparse.py" in names and "json" in {path.parent.name for path in paths}
    assert all(path.suffix == ".py" and size > 0 for path, size in listing.files)
    assert not any("site-packages" in path.parts for path in paths)
    assert listing == data.find([])


def test_tokens_of_two_tokenizers_or_of_another_vocabulary_or_beside_text_are_refused(tmp_path):
    documents = random_documents(np.random.default_rng(0), 300)
    one = write_tokens(tmp_path / "one", *documents)
    other = write_tokens(tmp_path / "other", *documents, tokenizer="f" * 32)
    text = tmp_path / "text.txt"
    text.write_text("words " * 100)
    for paths, vocab, match, named in (
        ([one, other], None, "different tokenizers", other),
        ([one, text], None, "cannot be mixed", text),
        ([one], 49, "another vocabulary", one),
    ):
        with pytest.raises(DataError, match=match) as caught:
            data.find(paths, vocab)
        assert str(named) in caught.value.found


@given(st.integers(0, 2**32), st.integers(1, 400), st.integers(1, 60))
@settings(max_examples=40)
def test_training_and_validation_of_tokens_share_none_and_miss_none(tmp_path_factory, seed, count, longest):
    rng = np.random.default_rng(seed)
    _, starts, nbytes = random_documents(rng, count, longest=longest)
    size = int(starts[-1]) + 41
    path = write_tokens(tmp_path_factory.mktemp("split") / "tokens", np.arange(size), starts, nbytes, 65536)
    source = data.find([path]).open(1)
    train, validation = (text.read(0, len(text)) for text in (source.train, source.validation))
    assert sorted([*train, *validation]) == list(range(size))
    assert 0.025 <= len(validation) / size <= 0.1
    for text, ids in ((source.train, train), (source.validation, validation)):
        begins = np.flatnonzero(np.isin(ids, starts) | (np.diff(ids, prepend=-2) != 1))
        np.testing.assert_array_equal(text.starts(0, len(text)), begins)  # where a part begins, a document does
    if count == 400:
        assert np.isin(validation[np.diff(validation, prepend=-2) != 1], starts).all()
        assert (np.diff(validation) > 1).any()  # from several parts of the file
    assert abs(source.train.nbytes + source.validation.nbytes - nbytes.sum()) <= 2


# -- bytes of files by position, and the hashes by which ranks compare what they see -----------------------------------


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
