"""Files of tokens: what is read of them, how they are split, and what is refused."""

from __future__ import annotations

import struct
from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.token_files import HASH, header, random_documents, write_megatron, write_tokens

from mpipipe.errors import DataError
from mpipipe.language import data
from mpipipe.language.data import token_files
from mpipipe.language.data.token_files import Header, open_tokens


@pytest.fixture
def documents():
    return random_documents(np.random.default_rng(0), 300)


def check(found, ids, starts):
    """That `found` holds these ids and documents, read in pieces of any size."""
    assert len(found) == len(ids)
    rng = np.random.default_rng(1)
    for _ in range(30):
        start, stop = sorted(rng.integers(0, len(ids) + 1, 2).tolist())
        np.testing.assert_array_equal(found.read(start, stop - start), ids[start:stop])
        inside = found.starts(start, stop)
        if starts is None:
            assert inside is None
        else:
            assert inside.dtype == np.int64
            np.testing.assert_array_equal(inside, starts[(starts >= start) & (starts < stop)])
    with pytest.raises(IndexError):
        found.read(len(ids) - 1, 2)


@pytest.mark.parametrize("vocab", [50, 65536, 65537])
def test_a_file_of_tokens_gives_its_ids_documents_and_bytes(tmp_path, documents, vocab):
    ids, starts, nbytes = documents
    ids = ids.copy()
    ids[7] = vocab - 1
    path = write_tokens(tmp_path / "tokens", ids, starts, nbytes, vocab, end=3)
    found = data.find([path])
    assert (found.vocab, found.unit, found.tokenizer) == (vocab, "tokens", HASH)
    whole = found.whole([path])
    check(whole, ids, starts)
    assert whole.nbytes == nbytes.sum()
    assert found.found([path]) == [(path, path.stat().st_size)]


def test_the_header_that_is_written_is_the_one_that_is_described(tmp_path):
    mine = Header(70_000, None, 11, 2, 99, HASH)
    index = struct.pack("<4Q", 0, 5, 0, 40)
    written = mine.packed(blake2b(index, digest_size=16).digest())
    assert written == header(itemsize=4, vocab=70_000, tokens=11, documents=2, nbytes=99, index=index)
    assert (mine.index, mine.file_bytes) == (128 + 48, 128 + 48 + 32)


@pytest.mark.parametrize("dtype", ["<u2", ">i8", "<i4", "|u1"])
def test_an_npy_file_is_read_as_it_is(tmp_path, documents, dtype):
    ids = documents[0]
    np.save(tmp_path / "ids.npy", ids.astype(dtype))
    found = data.find([tmp_path / "ids.npy"])
    assert (found.vocab, found.tokenizer) == (int(ids.max()) + 1, None)
    check(found.whole([]), ids, None)
    assert found.whole([]).nbytes is None
    assert data.find([tmp_path / "ids.npy"], 60).vocab == 60


@pytest.mark.parametrize("name", ["pair", "pair.bin", "pair.idx"])
@pytest.mark.parametrize(("code", "dtype"), [(8, "<u2"), (4, "<i4")])
def test_megatrons_files_are_read_as_they_are(tmp_path, name, code, dtype):
    rng = np.random.default_rng(2)
    sequences = [rng.integers(0, 50, size) for size in (5, 9, 1, 30, 8)]
    write_megatron(tmp_path / "pair", sequences, [0, 2, 3, 5], code, dtype)
    found = data.find([tmp_path / name])
    ids = np.concatenate(sequences)
    assert found.vocab == ids.max() + 1
    check(found.whole([]), ids, np.array([0, 14, 15]))
    assert found.whole([]).nbytes is None


def test_several_files_are_joined_and_each_begins_a_document(tmp_path, documents):
    ids, starts, nbytes = documents
    cut = len(ids) // 2
    first = write_tokens(tmp_path / "a", ids[:cut], starts[starts < cut], nbytes[starts < cut])
    second = write_tokens(tmp_path / "b", ids[cut:], [0], [5])
    whole = data.find([first, second]).whole([])
    check(whole, ids, np.append(starts[starts < cut], cut))
    assert whole.nbytes == nbytes[starts < cut].sum() + 5


@given(st.integers(0, 2**32), st.integers(1, 400), st.integers(1, 60))
@settings(max_examples=40)
def test_training_and_validation_share_no_token_and_miss_none(tmp_path_factory, seed, count, longest):
    rng = np.random.default_rng(seed)
    _, starts, nbytes = random_documents(rng, count, longest=longest)
    size = int(starts[-1]) + 41
    path = write_tokens(tmp_path_factory.mktemp("split") / "tokens", np.arange(size), starts, nbytes, 65536)
    source = data.find([path]).open([path], 1)
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


def test_documents_are_whole_in_either_part(tmp_path):
    """With their bytes: where cuts stand between documents nothing is estimated."""
    ids, starts, nbytes = random_documents(np.random.default_rng(3), 1000)
    path = write_tokens(tmp_path / "tokens", np.arange(len(ids)), starts, nbytes, 65536)
    source = data.find([path]).open([path], 16)
    for text in (source.train, source.validation):
        mine = np.isin(starts, text.read(0, len(text)))
        assert text.nbytes == nbytes[mine].sum()
        ends = np.append(starts[1:], len(ids))[mine]
        assert sum(ends - starts[mine]) == len(text)


def change(path, offset, content):
    whole = bytearray(path.read_bytes())
    whole[offset : offset + len(content)] = content
    path.write_bytes(whole)


DAMAGE = {
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-3]),
    "cut in the header": lambda path: path.write_bytes(path.read_bytes()[:60]),
    "too long": lambda path: path.write_bytes(path.read_bytes() + b"more"),
    "a flipped bit in the header": lambda path: change(path, 17, b"\x77"),
    "absurd counts": lambda path: change(path, 0, header(tokens=2**63, documents=2**64 - 1)),
    "no vocabulary": lambda path: change(path, 0, header(vocab=0)),
    "a vocabulary that ids cannot hold": lambda path: change(path, 0, header(vocab=2**40)),
    "ids of another width": lambda path: change(path, 0, header(itemsize=4)),
    "an end of text that is no id": lambda path: change(path, 0, header(end=50)),
    "another version": lambda path: change(path, 0, header(version=3)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_of_tokens_is_refused_by_name(tmp_path, documents, damage):
    path = write_tokens(tmp_path / "tokens", *documents)
    DAMAGE[damage](path)
    with pytest.raises(DataError, match="file of tokens") as caught:
        data.find([path])
    assert str(path) in caught.value.found and caught.value.remedy


# positions of eight documents of ten tokens each, and bytes of text before them
STARTS, BEFORE = [10 * document for document in range(8)], [7 * document for document in range(8)]
WRONG_INDEX = {
    "a position far outside": ([*STARTS[:7], 2**60], BEFORE),
    "a position past the last token": ([*STARTS[:7], 81], BEFORE),
    "positions that fall": ([0, 70, *STARTS[1:7]], BEFORE),
    "no document at the first token": ([1, *STARTS[1:]], BEFORE),
    "all positions 0": ([0] * 8, BEFORE),
    "text before the first document": (STARTS, [1, *BEFORE[1:]]),
    "bytes that fall": (STARTS, [0, 50, *BEFORE[1:7]]),
    "bytes past the end of the text": (STARTS, [*BEFORE[:7], 57]),
}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("wrong", WRONG_INDEX)
def test_a_wrong_index_of_documents_is_refused_by_name(tmp_path, monkeypatch, version, wrong):
    """In version 1, whose checksum does not cover it, too: by its order."""
    monkeypatch.setattr(token_files, "BLOCK", 3)  # so that neighbours lie in different blocks
    path = write_tokens(tmp_path / "tokens", np.zeros(80), STARTS, [7] * 8, version=version)
    check(data.find([path]).whole([]), np.zeros(80), np.array(STARTS))
    index = struct.pack("<16Q", *WRONG_INDEX[wrong][0], *WRONG_INDEX[wrong][1])
    change(path, 128 + 160, index)
    with pytest.raises(DataError, match="file of tokens is damaged") as caught:
        data.find([path])
    assert str(path) in caught.value.found and caught.value.remedy


def test_every_bit_of_the_index_of_documents_counts(tmp_path):
    path = write_tokens(tmp_path / "tokens", np.zeros(80), STARTS, [7] * 8)
    whole = path.read_bytes()
    for byte in range(128 + 160, len(whole)):
        change(path, byte, bytes([whole[byte] ^ 1 << byte % 8]))
        with pytest.raises(DataError, match="file of tokens is damaged"):
            data.find([path])
        path.write_bytes(whole)
    data.find([path])


def test_an_index_of_documents_that_changes_after_it_was_checked_is_found_when_it_is_read(tmp_path):
    path = write_tokens(tmp_path / "tokens", np.zeros(80), STARTS, [7] * 8)
    _, tokens = open_tokens(path)
    change(path, 128 + 160 + 8 * 3, struct.pack("<Q", 2**50))
    with pytest.raises(DataError, match="index of documents is damaged"):
        tokens.starts(0, 80)


def test_an_id_out_of_range_is_an_error_with_file_position_and_id(tmp_path, documents):
    ids, starts, nbytes = documents
    ids = ids.copy()
    ids[123] = 50
    path = write_tokens(tmp_path / "tokens", ids, starts, nbytes)
    whole = data.find([path]).whole([])
    whole.read(0, 123)
    with pytest.raises(DataError, match="out of range") as caught:
        whole.read(100, 40)
    assert caught.value.found == f"id 50 at position 123 of {path}" and "below 50" in caught.value.expected
    np.save(tmp_path / "ids.npy", np.array([4, 3, -2, 9]))
    with pytest.raises(DataError, match="out of range") as caught:
        data.find([tmp_path / "ids.npy"]).whole([]).read(0, 4)
    assert caught.value.found == f"id -2 at position 2 of {tmp_path / 'ids.npy'}"


def write_object(path):
    np.save(path, np.array([{"a": 1}], object), allow_pickle=True)


def write_npy(path, head):
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head + bytes(4000))


WRONG_NPY = {
    "two axes": lambda path: np.save(path, np.zeros((2, 3), int)),
    "floats": lambda path: np.save(path, np.zeros(5)),
    "pickled objects": write_object,
    "no header": lambda path: path.write_bytes(b"\x93NUMPY\x01\x00\xff\xff{"),
    "a negative length": lambda path: write_npy(path, b"{'descr': '<i4', 'fortran_order': False, 'shape': (-1000,)}\n"),
    "brackets without end": lambda path: write_npy(path, b"(" * 9000),
    "a header of gigabytes": lambda path: path.write_bytes(b"\x93NUMPY\x02\x00\xff\xff\xff\xff{"),
    "cut short": lambda path: (np.save(path, np.arange(100)), path.write_bytes(path.read_bytes()[:-1])),
}


@pytest.mark.parametrize("wrong", WRONG_NPY)
def test_an_npy_file_without_tokens_is_refused_by_name(tmp_path, wrong):
    path = tmp_path / "ids.npy"
    WRONG_NPY[wrong](path)
    with pytest.raises(DataError, match=r"\.npy") as caught:
        data.find([path])
    assert str(path) in caught.value.found


SEQUENCES = [np.arange(5), np.arange(3), np.arange(4)]
WRONG_MEGATRON = {
    "cut short": ("idx", lambda path: path.write_bytes(path.read_bytes()[:-1]), "index of tokens"),
    "another magic": ("idx", lambda path: change(path, 0, b"X"), "index of tokens"),
    "floats": ("idx", lambda path: change(path, 17, b"\x06"), "index of tokens"),
    "absurd counts": ("idx", lambda path: change(path, 18, b"\xff" * 16), "index of tokens"),
    "another order": ("idx", lambda path: change(path, 34 + 3 * 4, struct.pack("<q", 2)), "index of tokens"),
    "documents": ("idx", lambda path: change(path, 34 + 3 * 12 + 8, struct.pack("<q", 9)), "index of tokens"),
    "documents whose steps overflow": (
        "idx",
        lambda path: write_megatron(path.with_suffix(""), SEQUENCES, [0, 2**63 - 1, -(2**63), -1, 3]),
        "index of",
    ),
    "tokens cut short": ("bin", lambda path: path.write_bytes(path.read_bytes()[:-2]), "do not fit their index"),
}


@pytest.mark.parametrize("wrong", WRONG_MEGATRON)
def test_megatrons_files_that_are_damaged_are_refused_by_name(tmp_path, wrong):
    suffix, damage, match = WRONG_MEGATRON[wrong]
    write_megatron(tmp_path / "pair", SEQUENCES, [0, 1, 3])
    damage(tmp_path / f"pair.{suffix}")
    with pytest.raises(DataError, match=match) as caught:
        data.find([tmp_path / "pair"])
    assert str(tmp_path / f"pair.{suffix}") in caught.value.found


def test_tokens_of_two_tokenizers_or_beside_text_are_refused(tmp_path, documents):
    one = write_tokens(tmp_path / "one", *documents)
    other = write_tokens(tmp_path / "other", *documents, tokenizer="f" * 32)
    text = tmp_path / "text.txt"
    text.write_text("words " * 100)
    with pytest.raises(DataError, match="different tokenizers") as caught:
        data.find([one, other])
    assert str(other) in caught.value.found
    with pytest.raises(DataError, match="cannot be mixed") as caught:
        data.find([one, text])
    assert str(text) in caught.value.found
    with pytest.raises(DataError, match="another vocabulary") as caught:
        data.find([one], 49)
    assert str(one) in caught.value.found


def test_tokens_too_few_for_a_sequence_are_refused(tmp_path):
    path = write_tokens(tmp_path / "tokens", np.arange(40), [0], [100])
    with pytest.raises(DataError, match="too short") as caught:
        data.find([path]).open([path], 2)
    assert "40 tokens" in caught.value.found
    assert len(data.find([path]).open([path], 1).validation) == 2


def test_a_source_of_arrays_checks_them_and_tells_them_apart():
    ids = np.arange(30) % 7
    source = data.Source.of_arrays(ids, ids[:9], vocab=7)
    check(source.train, ids, None)
    others = [data.Source.of_arrays(ids, ids[:8], 7), data.Source.of_arrays(ids[::-1], ids[:9], 7)]
    assert len({each.fingerprint for each in (source, *others)}) == 3
    assert data.Source.of_arrays(ids.astype(np.uint8), ids[:9], 7).fingerprint == source.fingerprint
    with pytest.raises(DataError, match="out of range") as caught:
        data.Source.of_arrays(ids, ids, vocab=6)
    assert caught.value.found == "id 6 at position 6 of the array train"
    with pytest.raises(DataError, match="array of tokens"):
        data.Source.of_arrays(ids.reshape(2, 15), ids, vocab=7)
    known = data.Array(ids, documents=[0, 4, 20])
    assert known.starts(1, 20).tolist() == [4] and known.starts(4, 21).tolist() == [4, 20]
