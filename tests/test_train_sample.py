"""Text from a model: what the model sees for each byte, and how a byte is drawn."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from mpipipe.train.sample import draw, generate, readable


class Counting:
    """Stands for a pipeline whose model says that the byte after b is b + 1, whatever follows in the window."""

    def __init__(self, comm):
        self.comm, self.windows = comm, []
        self.schedule = SimpleNamespace(placement=tuple(range(comm.size)))

    def forward(self, inputs):
        assert (inputs is None) == (self.comm.rank != 0)
        inputs = self.comm.bcast(inputs, 0)
        self.windows.append(inputs[0].tolist())
        logits = np.zeros((1, inputs.shape[1], 256), np.float32)
        np.put_along_axis(logits, ((inputs + 1) % 256)[..., None], 100.0, axis=2)
        return logits if self.comm.rank == self.comm.size - 1 else None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_rank_gets_the_continuation(comm, temperature):
    pipeline = Counting(comm)
    text = generate(pipeline, comm, bytes([250, 251]), 8, seq_len=4, temperature=temperature, seed=0)
    assert list(text) == [252, 253, 254, 255, 0, 1, 2, 3]
    assert pipeline.windows[:4] == [[250, 251, 0, 0], [250, 251, 252, 0], [250, 251, 252, 253], [251, 252, 253, 254]]


def test_a_prompt_longer_than_a_sequence_is_seen_from_its_end(comm):
    pipeline = Counting(comm)
    assert list(generate(pipeline, comm, bytes(range(9)), 1, seq_len=3, temperature=0.0, seed=0)) == [9]
    assert pipeline.windows == [[6, 7, 8]]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_bytes_are_drawn_from_the_softmax_of_the_scaled_logits(temperature):
    logits = np.array([0.0, 1.0, -1.0, 2.0], np.float32)
    random = np.random.default_rng(0)
    counts = np.bincount([draw(logits, temperature, random) for _ in range(20_000)], minlength=4)
    expected = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
    np.testing.assert_allclose(counts / 20_000, expected, atol=0.015)


def test_huge_logits_and_tiny_temperatures_do_not_overflow():
    logits = np.array([-3e38, 3e38, 0.0], np.float32)
    assert draw(logits, 1.0, np.random.default_rng(0)) == 1
    assert draw(np.array([0.0, 1e-3], np.float32), 1e-9, np.random.default_rng(0)) == 1
    assert draw(logits, 0.0, np.random.default_rng(0)) == 1


def test_the_last_index_can_be_drawn_and_none_beyond_it():
    almost_one = SimpleNamespace(random=lambda: np.nextafter(1.0, 0.0))
    assert draw(np.zeros(256, np.float32), 1.0, almost_one) == 255
    assert draw(np.array([0.0, -200.0]), 1.0, almost_one) == 0


def test_generated_bytes_cannot_harm_a_terminal():
    assert readable(b"a\tb\n\x1b[2J\r\x07\xff") == "a\tb\n\ufffd[2J\ufffd\ufffd\ufffd"
    assert readable("gr\u00fc\u00df".encode()) == "gr\u00fc\u00df"
