"""A rank's part of the sequences: nothing lost, losses that add up, uneven shares included."""

import numpy as np
import pytest
from support.tolerance import close, largest

from mpipipe import Pipeline, nn, schedules
from mpipipe.errors import ConfigError
from mpipipe.job import inprocess
from mpipipe.language.models import GPT
from mpipipe.language.task import TextTask
from mpipipe.nn.layers.head_slices import TILE_BYTES
from mpipipe.train import Shard, TrainConfig


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("axis", [1, -1, 2])
def test_parts_positions_and_the_whole_fit_together(layout, axis):
    field = np.random.default_rng(0).normal(size=(2, 9, 9))

    def work(comm):
        shard = Shard(comm, layout)
        part = shard.part(field, axis)
        np.testing.assert_array_equal(part, np.take(field, shard.positions(9), axis))
        np.testing.assert_array_equal(shard.whole(part, axis), field)
        with pytest.raises(ConfigError, match="no part"):
            shard.divide(comm.size - 1)
        return True

    assert all(inprocess.run(3, work))


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_on_paper_attention_is_at_the_positions_of_a_rank(layout):
    def work(comm):
        shard = Shard(comm, layout, size=4)
        attend, own = shard.attend(9), shard.positions(9)
        np.testing.assert_array_equal(attend.positions(len(own)), own)
        stage = nn.Stage([nn.SelfAttention(8, 2, attend=attend, coordinates=np.zeros((9, 2)))])
        return stage.forward(np.ones((1, len(own), 8), np.float32))[0].shape[1] == len(own)

    assert inprocess.run(1, work) == [True]


class Given:
    """Gives the loss what it was given, and notes the gradient."""

    gradients = None

    def forward(self, x):
        return x, None

    def backward(self, dy, saved):
        self.dy = dy
        return dy


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped"])
@pytest.mark.parametrize("seq_len", [16, 29])
def test_losses_and_gradients_of_the_shards_are_those_of_the_whole(comm, layout, seq_len):
    rng = np.random.default_rng(0)
    output, target = rng.normal(size=(3, seq_len, 7)), rng.integers(0, 7, size=(3, seq_len))
    expected, gradient = nn.softmax_cross_entropy(output, target)
    shard, alone, stage = Shard(comm, layout), comm.Split(comm.rank, 0), Given()
    loss = nn.softmax_cross_entropy
    with Pipeline([stage], schedules.gpipe(1, 1), alone, loss=loss, replicas=comm) as pipeline:
        value = pipeline.step(shard.part(output), shard.part(target)).loss
    close(value, expected, target.size + 7, 1 + 2 * largest(output))
    close(stage.dy, shard.part(gradient), 7 + 4, (1 + 2 * largest(output)) * largest(gradient))
    alone.Free()
    np.testing.assert_array_equal(target[:, shard.positions(seq_len)], shard.part(target))


@pytest.mark.parametrize("seq_len", [16, 29])
def test_large_logits_are_made_in_tiles_with_the_same_loss(comm, monkeypatch, seq_len):
    stage = nn.Stage([nn.Head(5, 9)], dtype="float64")
    x, target = np.random.default_rng(0).normal(size=(3, seq_len, 5)), np.arange(3 * seq_len).reshape(3, -1) % 9
    shard, task = Shard(comm, "zigzag"), TextTask(TrainConfig(seq_len=seq_len), GPT)
    assert task.loss_for(stage, 3, shard) == nn.softmax_cross_entropy
    monkeypatch.setitem(TILE_BYTES, "cpu", 4 * 9 * 8)
    loss = task.loss_for(stage, 3, shard)
    assert isinstance(loss, nn.HeadCrossEntropy)
    value, _ = nn.softmax_cross_entropy(stage.forward(shard.part(x))[0], shard.part(target))
    close(loss(shard.part(x), shard.part(target))[0], value, 9 + target.size, 8)
    assert task.loss_for(nn.Stage([nn.Linear(5, 9)]), 3, shard) == nn.softmax_cross_entropy
