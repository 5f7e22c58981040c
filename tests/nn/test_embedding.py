"""Embedding against a one-hot product."""

from __future__ import annotations

import numpy as np
import pytest
from support.gradcheck import check_stage
from support.tolerance import close, largest

from mpipipe import arrays, nn
from mpipipe.errors import ArgumentError

RANDOM = np.random.default_rng(2)


@pytest.mark.parametrize("shape", [(6,), (3, 6), (2, 3, 4), (0,)])
@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8"])
def test_embedding_is_a_product_with_one_hot_rows(shape, dtype):
    stage = nn.Stage([nn.Embedding(9, 4)], dtype="float64")
    ids = RANDOM.integers(0, 9, shape).astype(dtype)
    one_hot = np.eye(9)[ids]
    y, saved = stage.forward(ids)
    np.testing.assert_array_equal(y, one_hot @ stage.parameters["0.weight"])
    dy = RANDOM.standard_normal(y.shape)
    assert stage.backward(dy, saved) is None
    rows, slopes = one_hot.reshape(-1, 9), dy.reshape(-1, 4)
    close(stage.gradients["0.weight"], rows.T @ slopes, len(rows), rows.T @ np.abs(slopes))


def test_gradients_of_embedding_agree_with_finite_differences():
    check_stage(nn.Stage([nn.Embedding(5, 3), nn.Linear(3, 2)], dtype="float64"), RANDOM.integers(0, 5, (3, 4)))


@pytest.mark.parametrize("ids", [[0, 9], [-1, 3]])
def test_an_id_outside_the_table_is_refused(ids):
    stage = nn.Stage([nn.Embedding(9, 4)])
    with pytest.raises(ArgumentError, match="out of range"):
        stage.forward(np.array(ids))


def test_ids_must_be_integers():
    stage = nn.Stage([nn.Embedding(9, 4)])
    with pytest.raises(ArgumentError, match="must be integers"):
        stage.forward(np.zeros(3, np.float32))


def test_a_tied_head_starts_equal_but_apart():
    first = nn.Stage([nn.Embedding(9, 4, tie="tokens")], seed=5)
    last = nn.Stage([nn.Linear(4, 9, bias=False, tie="tokens")], seed=5, first=8)
    np.testing.assert_array_equal(first.parameters["0.weight"], last.parameters["8.weight"])
    assert first.ties == {"tokens": ["0.weight"]} and last.ties == {"tokens": ["8.weight"]}
    both = nn.Stage([nn.Embedding(9, 4, tie="tokens"), nn.Linear(4, 9, bias=False, tie="tokens")])
    assert both.ties == {"tokens": ["0.weight", "1.weight"]}
    assert not np.shares_memory(both.parameters["0.weight"], both.parameters["1.weight"])
    assert not np.shares_memory(both.gradients["0.weight"], both.gradients["1.weight"])


def test_rows_are_scaled_and_so_is_their_gradient():
    plain, scaled = (nn.Stage([nn.Embedding(5, 3, scale=scale)], dtype="float64") for scale in (1.0, 4.0))
    ids, dy = np.array([[3, 1, 3]]), np.random.default_rng(0).standard_normal((1, 3, 3))
    (y, saved), (y_scaled, saved_scaled) = plain.forward(ids), scaled.forward(ids)
    np.testing.assert_array_equal(y_scaled, 4 * y)
    before = dy.copy()
    assert plain.backward(dy, saved) is None and scaled.backward(dy, saved_scaled) is None
    np.testing.assert_array_equal(scaled.gradients.flat, 4 * plain.gradients.flat)  # a power of two: no rounding
    np.testing.assert_array_equal(dy, before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scaled_rows_are_the_same_on_the_device(gpu, dtype):
    host, device = (nn.Stage([nn.Embedding(5, 8, scale=3.0)], dtype, device=where) for where in ("cpu", "cuda"))
    ids = np.array([[3, 1, 3]])
    (y, saved), (y_there, saved_there) = host.forward(ids), device.forward(ids)
    np.testing.assert_array_equal(arrays.download(y_there), y)
    host.backward(y, saved)
    device.backward(y_there, saved_there)
    close(arrays.download(device.gradients.flat), host.gradients.flat, 3, largest(host.gradients.flat))
