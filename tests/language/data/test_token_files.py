"""Files of tokens: what is read of them, and what is refused."""

import json
import struct

import numpy as np
import pytest
from support.token_files import HASH, facts_text, random_documents, write_megatron, write_tokens

from mpipipe.errors import DataError
from mpipipe.language import data
from mpipipe.language.data import token_files
from mpipipe.language.data.token_files import DOCUMENTS, FACTS, beside


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
    path = write_tokens(tmp_path / "tokens", ids, starts, nbytes, vocab)
    found = data.find([path])
    assert (found.vocab, found.unit, found.tokenizer) == (vocab, "tokens", HASH)
    whole = found.whole()
    check(whole, ids, starts)
    assert whole.nbytes == nbytes.sum()
    assert [*found.files] == [(place, place.stat().st_size) for place in (path, beside(path, DOCUMENTS))]


@pytest.mark.parametrize("name", ["pair", "pair.bin", "pair.idx"])
@pytest.mark.parametrize(("code", "dtype"), [(8, "<u2"), (4, "<i4")])
def test_megatrons_files_are_read_as_they_are(tmp_path, name, code, dtype):
    rng = np.random.default_rng(2)
    sequences = [rng.integers(0, 50, size) for size in (5, 9, 1, 30, 8)]
    write_megatron(tmp_path / "pair", sequences, [0, 2, 3, 5], code, dtype)
    found = data.find([tmp_path / name])
    ids = np.concatenate(sequences)
    assert found.vocab == ids.max() + 1
    check(found.whole(), ids, np.array([0, 14, 15]))
    assert found.whole().nbytes is None


def test_several_files_are_joined_and_each_begins_a_document(tmp_path, documents):
    ids, starts, nbytes = documents
    cut = len(ids) // 2
    first = write_tokens(tmp_path / "a", ids[:cut], starts[starts < cut], nbytes[starts < cut])
    second = write_tokens(tmp_path / "b", ids[cut:], [0], [5])
    whole = data.find([first, second]).whole()
    check(whole, ids, np.append(starts[starts < cut], cut))
    assert whole.nbytes == nbytes[starts < cut].sum() + 5


def change(path, offset, content):
    whole = bytearray(path.read_bytes())
    whole[offset : offset + len(content)] = content
    path.write_bytes(whole)


STARTS = [10 * document for document in range(8)]  # positions of eight documents of ten tokens each


def rewrite(path, **changed):
    """Let the facts beside a file of tokens say something else, with a checksum that is right."""
    facts = json.loads(beside(path, FACTS).read_text())
    del facts["checksum"]
    beside(path, FACTS).write_text(facts_text({**facts, **changed}))


DAMAGE = {
    "cut short": ("", lambda path: path.write_bytes(path.read_bytes()[:-3])),
    "cut in the header": ("", lambda path: path.write_bytes(path.read_bytes()[:60])),
    "too long": ("", lambda path: path.write_bytes(path.read_bytes() + b"more")),
    "ids of another width": ("", lambda path: np.save(path.open("wb"), np.zeros(80, "<u4"))),
    "fewer tokens": ("", lambda path: np.save(path.open("wb"), np.zeros(79, "<u2"))),
    "a changed fact": (FACTS, lambda path: change(beside(path, FACTS), 11, b"1")),
    "no facts": (FACTS, lambda path: beside(path, FACTS).write_text("{}")),
    "facts that are no object": (FACTS, lambda path: beside(path, FACTS).write_text("[5]")),
    "a fact that nobody knows": (FACTS, lambda path: rewrite(path, other=5)),
    "facts that are gone": (FACTS, lambda path: beside(path, FACTS).unlink()),  # as of a file of another program
    "no index": (DOCUMENTS, lambda path: beside(path, DOCUMENTS).unlink()),
    "another number of documents": (DOCUMENTS, lambda path: rewrite(path, documents=9)),
    "an index of another shape": (
        DOCUMENTS, lambda path: np.save(beside(path, DOCUMENTS).open("wb"), np.zeros(16, "<u8"))
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_of_tokens_is_refused_by_name(tmp_path, damage):
    path = write_tokens(tmp_path / "tokens", np.zeros(80), STARTS, [7] * 8)
    end, change_it = DAMAGE[damage]
    change_it(path)
    with pytest.raises(DataError) as caught:
        data.find([path])
    assert str(beside(path, end)) in caught.value.found and caught.value.remedy


def test_an_npy_file_of_another_program_is_refused_with_what_to_do(tmp_path):
    np.save(tmp_path / "ids.npy", np.arange(9))
    with pytest.raises(DataError, match="what is said of a file of tokens") as caught:
        data.find([tmp_path / "ids.npy"])
    assert str(tmp_path / "ids.npy") in caught.value.found and "Megatron" in caught.value.remedy


def test_an_id_out_of_range_is_an_error_with_file_position_and_id(tmp_path, documents):
    ids, starts, nbytes = documents
    ids = ids.copy()
    ids[123] = 50
    path = write_tokens(tmp_path / "tokens", ids, starts, nbytes)
    whole = data.find([path]).whole()
    whole.read(0, 123)
    with pytest.raises(DataError, match="out of range") as caught:
        whole.read(100, 40)
    assert caught.value.found == f"id 50 at position 123 of {path}" and "below 50" in caught.value.expected
    write_megatron(tmp_path / "pair", [np.array([4, 3, -2, 9])], [0, 1], 4, "<i4")
    with pytest.raises(DataError, match="out of range") as caught:
        data.find([tmp_path / "pair"]).whole().read(0, 4)
    assert caught.value.found == f"id -2 at position 2 of {tmp_path / 'pair.bin'}"


SEQUENCES = [np.arange(5), np.arange(3), np.arange(4)]
WRONG_MEGATRON = {
    "cut short": ("idx", lambda path: path.write_bytes(path.read_bytes()[:-1]), "index of tokens"),
    "another magic": ("idx", lambda path: change(path, 0, b"X"), "index of tokens"),
    "floats": ("idx", lambda path: change(path, 17, b"\x06"), "index of tokens"),
    "absurd counts": ("idx", lambda path: change(path, 18, b"\xff" * 16), "index of tokens"),
    "another order": ("idx", lambda path: change(path, 34 + 3 * 4, struct.pack("<q", 2)), "index of tokens"),
    "documents": ("idx", lambda path: change(path, 34 + 3 * 12 + 8, struct.pack("<q", 9)), "index of tokens"),
    "documents that end early": ("idx", lambda path: change(path, 34 + 3 * 12 + 16, struct.pack("<q", 2)), "index of"),
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


def test_every_bit_of_the_index_of_documents_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(token_files, "BLOCK", 3)  # so that neighbours lie in different blocks
    path = write_tokens(tmp_path / "tokens", np.zeros(80), STARTS, [7] * 8)
    index = beside(path, DOCUMENTS)
    whole = index.read_bytes()
    for byte in range(128, len(whole)):
        change(index, byte, bytes([whole[byte] ^ 1 << byte % 8]))
        with pytest.raises(DataError, match="file of tokens is damaged") as caught:
            data.find([path])
        assert str(index) in caught.value.found
        index.write_bytes(whole)
    check(data.find([path]).whole(), np.zeros(80), np.array(STARTS))
