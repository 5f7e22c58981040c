"""Files of tensors that somebody else has written: what their headers may say, and what is refused."""

import json
import os

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from mpipipe.checkpoint.tensor_files import TensorFile

ARRAYS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.array([1.5, -2.5], ml_dtypes.bfloat16),
    "c": np.arange(3, dtype=np.int64),
    "empty": np.zeros((0, 4), np.float16),
    "scalar": np.array(7.0),
}


def written(path, facts, data=b"", length=None):
    """A file with any header."""
    text = facts if isinstance(facts, bytes) else json.dumps(facts).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def read_all(path):
    with TensorFile(path) as file:
        found = {name: np.empty(stored.shape, stored.kind) for name, stored in file.arrays.items()}
        for name, array in found.items():
            file.read_into(name, array)
        return found


def test_what_the_library_writes_is_read_and_a_part_of_an_array_alone(tmp_path):
    save_file(ARRAYS, tmp_path / "file", {"format": "pt"})
    found = read_all(tmp_path / "file")
    assert set(found) == set(ARRAYS)
    for name, array in ARRAYS.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)
    with TensorFile(tmp_path / "file") as file:
        before, part = file.bytes_read, np.empty(3, np.float32)
        file.read_into("a", part, 12)
        assert file.bytes_read - before == 12
    np.testing.assert_array_equal(part, [3, 4, 5])


WRONG = {
    "a gap": {"x": entry(offsets=(4, 12))},
    "cut short": {"x": entry(shape=(3,), offsets=(0, 12))},
    "bytes after the last array": {"x": entry(shape=(1,), offsets=(0, 4))},
    "another size": {"x": entry(shape=(3,))},
    "a dtype that numpy does not have": {"x": entry("F8_E4M3", (8,))},
    "a shape below 0": {"x": entry(shape=(-2,))},
    "a size that overflows": {"x": entry(shape=(2**60,), offsets=(0, 2**62))},
    "a list": [],
    "no JSON": b"{]",
    "deep": b"[" * 100_000,
    "no arrays": {},
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_header_is_refused(tmp_path, what):
    path = written(tmp_path / "file", WRONG[what], b"12345678")
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError):
        TensorFile(path)
    assert len(os.listdir("/proc/self/fd")) == descriptors  # it is closed again


@pytest.mark.parametrize("length", [0, 1, 10**6, 10**9, 2**63, 2**64 - 1])
def test_an_absurd_length_of_the_header_takes_no_memory(tmp_path, length):
    path = written(tmp_path / "file", {"x": entry()}, b"12345678", length=length)
    with pytest.raises(ValueError):
        TensorFile(path)


def test_only_regular_files_are_opened_and_one_that_is_shorter_than_its_header_is_refused(tmp_path):
    for content in (b"", b"1", b"1234567", b"12345678"):
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(ValueError):
            TensorFile(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, tmp_path / "none", "/dev/zero"):
        with pytest.raises(OSError):
            TensorFile(path)


def test_a_file_that_is_cut_while_it_is_read_raises(tmp_path):
    save_file(ARRAYS, tmp_path / "file")
    with TensorFile(tmp_path / "file") as file:
        last = max(file.arrays, key=lambda name: file.arrays[name].start + file.arrays[name].nbytes)
        os.truncate(tmp_path / "file", os.path.getsize(tmp_path / "file") - 1)
        stored = file.arrays[last]
        with pytest.raises(ValueError, match=f"within {last}"):
            file.read_into(last, np.empty(stored.shape, stored.kind))
