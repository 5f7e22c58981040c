"""Files of tokens for tests, written byte by byte as the formats have them."""

from __future__ import annotations

import struct
from hashlib import blake2b

import numpy as np

HASH = "0123456789abcdef" * 2


def header(*, version=2, itemsize=2, vocab=50, end=-1, tokens=0, documents=0, nbytes=0, tokenizer=HASH, index=b""):
    """The 128 bytes at the start of a file of tokens, with a checksum that is right; `index` are the bytes of that."""
    fields = struct.pack(
        "<8sIIQqQQQ32s", b"MPITOKEN", version, itemsize, vocab, end, tokens, documents, nbytes, tokenizer.encode()
    )
    if version > 1:
        fields += blake2b(index, digest_size=16).digest()
    return (fields + blake2b(fields, digest_size=16).digest()).ljust(128, b"\0")


def write_tokens(path, ids, starts=(), nbytes=(), vocab=50, **facts):
    """Write a file of tokens; `starts` and `nbytes` are those of each document."""
    itemsize = 2 if vocab <= 65536 else 4
    body = np.asarray(ids, f"<u{itemsize}").tobytes()
    before = np.concatenate([[0], np.cumsum(nbytes)[:-1]]) if len(nbytes) else []
    index = np.concatenate([np.asarray(starts, "<u8"), np.asarray(before, "<u8")]).astype("<u8").tobytes()
    counts = {"tokens": len(ids), "documents": len(starts), "nbytes": int(sum(nbytes)), "index": index}
    head = header(itemsize=itemsize, vocab=vocab, **{**counts, **facts})
    path.write_bytes(head + body + b"\0" * (-len(body) % 8) + index)
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
