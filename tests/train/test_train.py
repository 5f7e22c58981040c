"""Small trainings through real pipelines: they learn, do not depend on the cut, and refuse bad input everywhere."""

import math
import os
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from support import harness
from support.small_training import MODEL, config_fixture, metrics
from support.tolerance import close
from support.training_tolerance import close_curves

from mpipipe import optim
from mpipipe.errors import ArgumentError, BackendError, ConfigError, DataError, MismatchError, NonFiniteError
from mpipipe.language import data
from mpipipe.language.models import GPT
from mpipipe.planning.layer_plan import LayerPlan
from mpipipe.train import train
from mpipipe.train.trainer import Trainer

pytestmark = pytest.mark.few
LAST_LINE = re.compile(
    r"mpipipe: ok steps=(\d+) loss=(\d+\.\d{4}) validation=(\d+\.\d{4}) tokens/s=(\d+) "
    r"bubble=(\d\.\d{4}) predicted=(\d\.\d{4})"
)
STATM = Path("/proc/self/statm")
STEPS = 1000 if harness.AT_LENGTH else 400


config = config_fixture(steps=6, eval_every=3)


def test_a_training_learns_and_says_so(comm, config, capsys):
    chosen = config(steps=60, log_every=20, eval_every=30, sample_bytes=12)
    record = train(chosen, GPT, comm)
    records, printed = metrics(chosen), capsys.readouterr().out
    assert [entry["step"] for entry in records] == [0, 1, 20, 30, 40, 60]
    assert records[0]["validation"] > 5 and records[-1]["validation"] == record.validation < 2
    assert record.loss == records[-1]["loss"] < records[1]["loss"]
    for entry in records[1:]:
        assert {"loss", "lr", "grad_norm", "tokens_per_second", "bubble", "predicted"} <= set(entry)
        assert all(math.isfinite(value) for value in entry.values())
        assert 0 <= entry["predicted"] < 1 and 0 <= entry["bubble"] < 1
        assert ("validation" in entry) == (entry["step"] in (30, 60))
    lines = printed.splitlines()
    if comm.rank:
        assert printed == ""
        return
    assert any(line.startswith("step 20/60  loss") for line in lines)
    assert any(line.startswith("--- sample") for line in lines)
    found = LAST_LINE.fullmatch(lines[-1])
    assert found and found[1] == "60"
    assert found[3] == f"{record.validation:.4f}"


@pytest.mark.few(False)
@pytest.mark.parametrize(("tied", "steps"), [(True, 6), pytest.param(False, 40, marks=pytest.mark.long)])
def test_loss_curves_of_all_cuts_agree_to_rounding(comm, config, tied, steps):
    cuts = [dict(pipe=pipe) for pipe in (1, 2, 4) if comm.size % pipe == 0]
    cuts.append(dict(pipe=comm.size, chunks=6 // comm.size, schedule="interleaved_1f1b", recompute=True))
    curves = []
    for number, cut in enumerate(cuts):
        chosen = config(str(number), dtype="float64", tied=tied, steps=steps, lr=3e-3 if steps > 6 else 1e-2, **cut)
        train(chosen, GPT, comm)
        curves.append([[entry["loss"], entry["grad_norm"], entry["lr"]] for entry in metrics(chosen)[1:]])
    for other in curves[1:]:
        close_curves(other, curves[0], MODEL, rate=chosen.lr)


def test_the_same_seed_gives_the_same_bits_and_another_seed_does_not(comm, config):
    losses = []
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        chosen = config(name, seed=seed, dropout=0.1)
        train(chosen, GPT, comm)
        losses.append([entry["loss"] for entry in metrics(chosen)[1:]])
    assert losses[0] == losses[1] != losses[2]
    assert losses[0][-1] < losses[0][0]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_learning_rate_and_clipping_reach_the_optimizer(comm, config, optimizer):
    free, bound = (config(name, optimizer=optimizer, clip=clip, lr=lr, weight_decay=0.0)
                   for name, clip, lr in (("free", math.inf, 1e-2), ("bound", 1e-12, 1e-6)))  # fmt: skip
    changes = []
    for chosen in (free, bound):
        train(chosen, GPT, comm)
        records = metrics(chosen)
        changes.append(abs(records[-1]["validation"] - records[0]["validation"]))
    close([entry["lr"] for entry in metrics(free)[1:3]], [0.005, 0.01], 4)
    assert metrics(free)[1]["grad_norm"] == metrics(bound)[1]["grad_norm"] > 1e-3  # that before clipping
    assert changes[0] > 1e-2 and changes[1] < 1e-4
    losses = [entry["loss"] for entry in metrics(bound)[1:]]
    assert min(abs(np.diff(losses))) > 1e-3  # the model hardly moves, so these are different batches


@pytest.mark.long
def test_memory_stays_flat_over_hundreds_of_steps(comm, config, monkeypatch):
    pages = []

    def measured(self, step, original=Trainer.step):
        result = original(self, step)
        if step >= 20:
            pages.append(int(STATM.read_text().split()[1]) if STATM.exists() else 0)
        return result

    monkeypatch.setattr(Trainer, "step", measured)
    cut = dict(pipe=min(2, comm.size), chunks=2, schedule="interleaved_1f1b")
    train(config(steps=STEPS, seq_len=8, batch=2 * comm.size, log_every=100, eval_every=200, **cut), GPT, comm)
    assert len(pages) == STEPS - 20
    assert (max(pages) - pages[0]) * os.sysconf("SC_PAGE_SIZE") < 4 << 20


@pytest.mark.few(False)
def test_only_the_ranks_of_the_first_and_last_stage_open_the_data(comm, config, monkeypatch):
    opened, original = [], data.DataListing.open
    monkeypatch.setattr(data.DataListing, "open", lambda *arguments: opened.append(1) or original(*arguments))
    train(config(pipe=comm.size, steps=1), GPT, comm)
    assert len(opened) == (comm.rank in (0, comm.size - 1))


@pytest.mark.parametrize(
    ("keys", "error", "match"),
    [
        ({"pipe": 3}, ArgumentError, "mesh does not fit"),
        ({"name": "text.txt/run"}, ConfigError, "cannot be used"),
        ({"device": "cuda"}, BackendError, "cuda"),
    ],
)
def test_bad_input_raises_on_every_rank_before_anything_is_written(comm, config, monkeypatch, keys, error, match):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    chosen = config(**keys)
    with pytest.raises(error, match=match):
        train(chosen, GPT, comm)
    comm.Barrier()
    assert not Path(chosen.out).exists()


def test_stages_that_one_rank_cannot_make_are_an_error_on_every_rank(comm, config, monkeypatch):
    def refuse(*arguments):
        raise MemoryError("Unable to allocate 8.00 GiB")

    if comm.rank == comm.size - 1:
        monkeypatch.setattr(LayerPlan, "stages", refuse)
    chosen = config()
    with pytest.raises(ArgumentError, match="Unable to allocate"):
        train(chosen, GPT, comm)
    assert not Path(chosen.out).exists()


@pytest.mark.mpi(min_size=2)
def test_ranks_with_different_settings_are_told(comm, config):
    with pytest.raises(MismatchError, match="configurations") as caught:
        train(config(lr=1e-3 if comm.rank == 1 else 2e-3), GPT, comm)
    assert "lr = 0.001" in str(caught.value) and "lr = 0.002, as on rank 0" in str(caught.value)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("has", "error", "text"),
    [(True, MismatchError, "contents(.|\n)*other data on rank {}"), (False, DataError, "rank {}: data cannot be read")],
)
def test_ranks_that_see_other_data_or_none_are_told(comm, config, mpi_tmp_path, has, error, text):
    own, last = mpi_tmp_path / str(comm.rank), comm.rank == comm.size - 1
    own.mkdir()
    if has or not last:
        (own / f"{has}.txt").write_bytes((b"%d" % last) * 5000)
    os.chdir(own)
    try:
        with pytest.raises(error, match=text.format(comm.size - 1)):
            train(config(data=[f"{has}.txt"], pipe=comm.size), GPT, comm)
    finally:
        os.chdir("/")
    assert not Path(config().out).exists()


@pytest.mark.few(False)
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("layout", ["zigzag", pytest.param("striped", marks=pytest.mark.long)])
def test_sharing_sequences_does_not_change_the_training(comm, config, layout):
    """15 bytes on 2 or 4 ranks: shares of different length, and still the same losses to rounding."""
    keys = dict(seq_len=15, dtype="float64", schedule="one_f_one_b")
    alone = comm.Split(comm.rank, 0)
    train(config(f"whole-{comm.rank}", **keys), GPT, alone)
    alone.Free()
    sharded = config("sharded", seq=2, layout=layout, **keys)
    train(sharded, GPT, comm)
    both = [metrics(chosen) for chosen in (config(f"whole-{comm.rank}"), sharded)]
    for key in ("loss", "validation", "grad_norm"):
        close_curves(*([entry[key] for entry in entries if key in entry] for entries in both), MODEL)


@pytest.mark.long
@pytest.mark.few(False)
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
def test_steps_whose_gradients_overflow_are_skipped_by_every_rank_until_the_scale_fits(comm, config, monkeypatch):
    monkeypatch.setattr(optim, "LossScaler", partial(optim.LossScaler, initial=2.0**24))
    chosen = config(dtype="float16", steps=24, eval_every=1, pipe=max(1, comm.size // 2))
    record = train(chosen, GPT, comm)
    first, *records = metrics(chosen)
    skipped = records[-1]["skipped"]
    assert 2 < skipped < 20
    for number, entry in enumerate(records):
        good = number >= skipped
        assert ("grad_norm" in entry) == good
        assert (entry["validation"] != first["validation"]) == good  # a skipped step leaves the parameters alone
        assert entry["loss_scale"] == 2.0 ** (24 - min(number + 1, skipped))
    assert records[-1]["loss"] < records[0]["loss"] - 0.5
    assert comm.allgather((record.skipped, record.loss)) == [(skipped, record.loss)] * comm.size


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
def test_an_overflow_that_no_smaller_scale_can_cure_ends_the_training_on_every_rank(comm, config):
    with pytest.raises(NonFiniteError, match="gradient"):
        train(config(dtype="float16", loss_scale=2.0**40, pipe=comm.size), GPT, comm)
