"""`slices = n`: trainings on slices have the losses of those on whole sequences, whatever else is switched on."""

import numpy as np
import pytest
from support.small_training import config_in, estimate, metrics
from support.token_files import random_documents, write_tokens

from mpipipe import nn, schedules
from mpipipe.errors import ConfigError, MpipipeError
from mpipipe.job import inprocess
from mpipipe.language.models import GPT
from mpipipe.train import Task, TaskConfig, run, train

SMALL = dict(dtype="float64", steps=3, eval_every=3, seq_len=24, batch=4)


@pytest.fixture
def config(tmp_path):
    """config(name, **keys): a small training in float64 on documents of tokens."""
    file = tmp_path / "tokens"
    write_tokens(file, *random_documents(np.random.default_rng(0), 300, 37, longest=20), 37)
    return config_in(tmp_path, data=[str(file)], **SMALL)


def losses(ranks, config):
    """(loss, validation, norm) of each record."""
    inprocess.run(ranks, lambda comm: train(config, GPT, comm))
    return [[line[name] for name in ("loss", "validation", "grad_norm") if line.get(name)] for line in metrics(config)]


def near(found, expected):
    """Rounding of some thousand operations in each of three steps."""
    assert [*map(len, found)] == [*map(len, expected)]
    np.testing.assert_allclose(np.concatenate(found), np.concatenate(expected), rtol=1e-9)


@pytest.mark.parametrize(
    "both, ranks, keys",
    [
        (dict(packing="segments"), 2, dict(slices=4)),
        (dict(lora="2,4,q_proj,v_proj"), 2, dict(slices=3, schedule="interleaved_zero_bubble", chunks=2)),
        (dict(freeze=("0.*", "1.*")), 2, dict(slices=24, recompute=True)),
        (dict(tied=True, kv_heads=1), 4, dict(slices=4, pipe=2, microbatches=1)),
        (dict(), 4, dict(slices=3, pipe=2, seq=2, recompute_limit=3)),
    ],
)
def test_losses_are_those_of_whole_sequences(config, both, ranks, keys):
    near(losses(ranks, config("sliced", **both, **keys)), losses(1, config("whole", **both)))


def test_an_order_of_a_file_may_have_slices_and_what_cannot_be_cut_is_refused(config, tmp_path):
    path, whole = tmp_path / "order.csv", losses(1, config("whole"))
    path.write_text(schedules.zero_bubble_h1(2, 2, slices=3).to_csv())
    near(losses(2, config("sliced", schedule=str(path), slices=3)), whole)
    with pytest.raises(ConfigError, match="not of slices = 2"):
        losses(2, config("none", schedule=str(path), slices=2))
    with pytest.raises(MpipipeError, match="a sequence cannot be cut into these slices"):
        losses(2, config("none", slices=25))
    assert not (tmp_path / "none").exists()


def test_a_training_is_resumed_with_another_number_of_slices(config):
    whole = losses(1, config("whole"))
    losses(2, config("sliced", slices=4, save_every=2, steps=2))
    near(losses(1, config("sliced", slices=3, resume="auto", microbatches=4))[-1:], whole[-1:])


class Causal(Task):
    """A task of one's own, in which two layers share what they attend with; `causal` is that of the second one."""

    causal = True

    def layers(self, shard):
        attends = [shard.attend(8, causal=True), shard.attend(8, causal=self.causal)]
        return [
            nn.Linear(3, 8),
            *(nn.Residual(nn.SelfAttention(8, 2, attend=attend)) for attend in attends),
            nn.Linear(8, 3),
        ]

    loss = staticmethod(nn.mean_squared_error)

    def batch(self, step, rows, shard):
        fields = np.random.default_rng(step).normal(size=(64, 8, 3))[rows]
        return shard.part(fields), shard.part(np.cumsum(fields, 1))

    def validation(self, index, rows, shard):
        return self.batch(1000 + index, rows, shard)

    def metrics(self, output, target):
        return {"far": float(np.abs(output - target).mean())}


def test_a_task_of_ones_own_attends_to_slices_by_its_shard(tmp_path):
    keys = dict(steps=3, batch=4, microbatches=2, warmup=0, log_every=1, dtype="float64", device="cpu")
    found = []
    cases = ("whole", 1, {}), ("sliced", 2, {"slices": 4}), ("sharded", 2, {"slices": 2, "seq": 2})
    for name, ranks, more in cases:
        config = TaskConfig(**keys, **more, out=str(tmp_path / name))
        inprocess.run(ranks, lambda comm, config=config: run(Causal(), config, comm))
        found.append([[line.get(key, 0) for key in ("loss", "validation", "far")] for line in metrics(config)])
    near(found[1], found[0])
    near(found[2], found[0])
    other = Causal()
    other.causal = False
    with pytest.raises(ConfigError, match="slices of a sequence cannot attend in this way"):
        inprocess.run(2, lambda comm: run(other, TaskConfig(**keys, slices=2, out=str(tmp_path / "none")), comm))
    assert not (tmp_path / "none").exists()


def test_a_loss_that_is_no_mean_over_positions_is_refused(tmp_path):
    def by_rows(output, target):
        value, gradient = nn.mean_squared_error(output, target)
        return value * output[0].size, gradient * output[0].size

    task, keys = Causal(), dict(steps=1, batch=4, microbatches=1, device="cpu")
    task.loss = by_rows
    inprocess.run(1, lambda comm: run(task, TaskConfig(**keys, out=str(tmp_path / "whole")), comm))
    with pytest.raises(MpipipeError, match="no mean over the positions"):
        inprocess.run(1, lambda comm: run(task, TaskConfig(**keys, slices=2, out=str(tmp_path / "sliced")), comm))


def test_a_dry_run_counts_slices_and_what_is_kept_of_whole_sequences(config):
    sizes = dict(seq_len=256, batch=1, microbatches=1, dim=64, layers=4, pipe=2, dtype="float32")
    whole, sliced = (estimate(config("none", **sizes, slices=slices), GPT, 2).ranks[0] for slices in (1, 8))
    assert whole.activations <= sliced.activations <= 1.3 * whole.activations  # one sequence, and sums of gradients
    assert sliced.scratch < 0.4 * whole.scratch
