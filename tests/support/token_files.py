"""Files of tokens for tests, written as docs/data.md describes them, without the code that is tested."""

import json
import struct
import zlib
from hashlib import blake2b

import numpy as np

HASH = "0123456789abcdef" * 2


def facts_text(facts):
    """The content of the .json beside a file of tokens, with the checksum of its facts."""
    plain = json.dumps(facts, sort_keys=True).encode()
    return json.dumps({**facts, "checksum": f"{zlib.crc32(plain):08x}"})


def write_tokens(path, ids, starts=(), nbytes=(), vocab=50, **changed):
    """Write a file of tokens with the two files beside it; `starts` and `nbytes` are those of each document."""
    before = np.concatenate([[0], np.cumsum(nbytes)[:-1]]) if len(nbytes) else []
    index = np.array([starts, before], "<u8")
    facts = {
        "vocab": vocab, "end": None, "tokens": len(ids), "documents": len(starts), "nbytes": int(sum(nbytes)),
        "tokenizer": HASH, "index": blake2b(index.tobytes(), digest_size=16).hexdigest(),
    }  # fmt: skip
    for end, array in (("", np.asarray(ids, "<u2" if vocab <= 65536 else "<u4")), (".documents", index)):
        with open(f"{path}{end}", "wb") as file:
            np.save(file, array)
    path.with_name(path.name + ".json").write_text(facts_text({**facts, **changed}))
    return path


def write_megatron(prefix, sequences, documents, code=8, dtype="<u2"):
    """Write prefix.bin and prefix.idx; `documents` are the numbers of their first sequences, and of all at the end."""
    sizes = [len(each) for each in sequences]
    itemsize = np.dtype(dtype).itemsize
    places = np.concatenate([[0], np.cumsum(sizes)[:-1]]) * itemsize
    prefix.with_name(prefix.name + ".bin").write_bytes(np.concatenate(sequences).astype(dtype).tobytes())
    prefix.with_name(prefix.name + ".idx").write_bytes(
        b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(sizes), len(documents))
        + np.array(sizes, "<i4").tobytes() + places.astype("<i8").tobytes() + np.array(documents, "<i8").tobytes()
    )  # fmt: skip
    return prefix


def random_documents(rng, count, vocab=50, longest=60):
    """(ids, starts, nbytes) of so many documents of 1 to `longest` tokens."""
    lengths = rng.integers(1, longest + 1, count)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    return rng.integers(0, vocab, lengths.sum()), starts, rng.integers(1, 300, count)
