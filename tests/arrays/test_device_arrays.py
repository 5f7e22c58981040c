"""`arrays` on a GPU: copies, memory, devices, and rounding to 16 bits."""

import numpy as np
import pytest

from mpipipe import arrays
from mpipipe.arrays import transfer
from mpipipe.errors import BackendError

HOST = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.mark.parametrize("name", ["float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8", "bool"])
def test_upload_and_download(gpu, name):
    for shape in ((3, 4), (), (0, 5), (1 << 17,)):
        host = (np.arange(np.prod(shape, dtype=int)) % 100).reshape(shape).astype(arrays.dtype(name))
        x = arrays.upload(host)
        assert (arrays.device_of(x), x.shape, x.dtype) == ("cuda", shape, host.dtype)
        found, same, last = arrays.download(x, host, x)
        assert isinstance(found, np.ndarray) and found.dtype == host.dtype and same is host
        np.testing.assert_array_equal(found, host)
        np.testing.assert_array_equal(last, arrays.download(x))


def test_upload_of_what_changes_afterwards(gpu):
    host = HOST.copy()
    x, turned = arrays.upload(host), arrays.upload(host.T)
    host[...] = -1
    np.testing.assert_array_equal(arrays.download(x), HOST)
    np.testing.assert_array_equal(arrays.download(turned), HOST.T)
    arrays.upload(host, out=x)
    np.testing.assert_array_equal(arrays.download(x), host)


def test_memory_functions(gpu):
    x = arrays.upload(HOST)
    twin = arrays.copy(x)
    assert not arrays.shares_memory(x, twin)
    arrays.set_zero(x)
    np.testing.assert_array_equal(arrays.download(x), np.zeros_like(HOST))
    np.testing.assert_array_equal(arrays.download(arrays.copy(twin.T)), HOST.T)
    joined = arrays.concatenate([twin, twin[1:], twin[:0]])
    np.testing.assert_array_equal(arrays.download(joined), np.concatenate([HOST, HOST[1:]]))
    arrays.copy_into(x, twin)
    np.testing.assert_array_equal(arrays.download(x), HOST)
    zeros = arrays.zeros((2, 3), np.dtype(np.float64), "cuda")
    assert (arrays.download(zeros) == 0).all()
    assert arrays.empty_like(x, np.dtype(np.int64)).dtype == np.int64
    arrays.set_zero(x[:0])
    arrays.copy_into(x[:0], twin[:0])


def test_which_arrays_share_memory(gpu):
    x = arrays.upload(HOST)
    assert arrays.shares_memory(x, x[1]) and arrays.shares_memory(x[1:], x[:2])
    assert not arrays.shares_memory(x[0], x[1]) and not arrays.shares_memory(x[2:], x[:2])
    assert arrays.shares_memory(x[::-1], x[0]) and not arrays.shares_memory(x, x[:0])
    assert not arrays.shares_memory(x, HOST) and not arrays.shares_memory(HOST, x)


def test_which_device(gpu):
    assert arrays.check_device("cuda") == arrays.check_device("auto") == arrays.check_device("cuda:0") == "cuda"
    assert arrays.check_device("cpu") == "cpu"
    for bad in ("gpu", "cuda:x", "cpu:0", "cuda:999", None):
        with pytest.raises(BackendError):
            arrays.check_device(bad)
    assert len(arrays.describe_gpus()) == arrays.device_count() >= 1
    assert ("AMD gfx" if arrays.is_amd() else "compute capability") in arrays.describe_gpus()[0]
    assert arrays.is_array(HOST) and arrays.is_device(arrays.upload(HOST)) and not arrays.is_device(HOST)


def test_large_arrays_travel_in_pieces_through_few_pages(gpu, monkeypatch):
    monkeypatch.setattr(transfer, "PIECE_BYTES", 1000)
    values = np.random.default_rng(0).normal(size=(13, 101))
    first, second = arrays.upload(values), arrays.upload(values[:2] + 1)
    small = arrays.upload(np.arange(3))
    found = arrays.download(first, small, second)
    for host, expected in zip(found, (values, np.arange(3), values[:2] + 1)):
        np.testing.assert_array_equal(host, expected)
