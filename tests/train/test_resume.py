"""A training that is cut short goes on as if nothing had been: on the same ranks to the bit, on others to rounding."""

import json
import shutil
import time
from dataclasses import fields
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from support.damage import flipped, sealed
from support.harness import on_rank_0
from support.small_training import MODEL, config_fixture, records
from support.tolerance import close
from support.training_tolerance import curve, path

from mpipipe import checkpoint, nn, optim
from mpipipe.checkpoint.save_task import ENDED
from mpipipe.errors import ArgumentError, ConfigError, NonFiniteError
from mpipipe.job.consensus import agreed_by
from mpipipe.job.group import group_of
from mpipipe.job.preemption import Preemption
from mpipipe.language.models import GPT
from mpipipe.train import train
from mpipipe.train.config_fields import option_of
from mpipipe.train.trainer import Trainer

pytestmark = pytest.mark.few
LossScaler = optim.LossScaler


config = config_fixture(in_pipe=True, steps=6, eval_every=3, sample_bytes=8, save_every=2)


@pytest.fixture
def cut_short(monkeypatch):
    """cut_short(config, comm, step, architecture=GPT): train until this step fails on all ranks."""

    def run(config, comm, step, architecture=GPT):
        def fail(self, number, original=Trainer.step):
            if number == step:
                raise agreed_by(NonFiniteError("cut short"), group_of(self.mesh.comm))
            return original(self, number)

        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "step", fail)
            with pytest.raises(NonFiniteError, match="cut short"):
                train(config, architecture, comm)
        comm.Barrier()

    return run


def content(folder):
    """Bytes of each file below a folder, by its path there."""
    return {
        file.relative_to(folder).as_posix(): file.read_bytes() for file in Path(folder).rglob("*") if file.is_file()
    }


def arrays_of(config):
    """All files of the newest checkpoint but the manifest, whose configuration has other paths; and its other state."""
    newest = checkpoint.read(config.out)
    found = {name: data for name, data in content(newest.path).items() if name != "manifest.json"}
    state = {key: value for key, value in newest.state.items() if key not in ("configuration", "record")}
    return newest.step, newest.optimizer_steps, state, found


def sample(text):
    return text[text.index("--- sample") : text.rindex("---")] if "--- sample" in text else ""


KINDS = {
    "pipeline, dropout, tied": dict(dropout=0.2, tied=True),
    "replicas, float16": dict(pipe=1, dtype="float16"),
    "sgd, interleaved": dict(optimizer="sgd", schedule="interleaved_1f1b", chunks=2, layers=4),
    "bfloat16, recomputed": dict(dtype="bfloat16", dropout=0.1, recompute=True),
}


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_a_training_that_was_cut_short_ends_bit_by_bit_as_one_that_was_not(
    comm, config, cut_short, capsys, monkeypatch, kind
):
    """Metrics, parameters, moments, loss scale, checkpoints, weights and sample."""
    if "float16" in KINDS[kind].values():

        def scaler(initial=2.0**26, **keys):  # too large, so that steps are skipped
            return LossScaler(initial, interval=2, **keys)

        monkeypatch.setattr(optim, "LossScaler", scaler)
    whole, parts = config("whole", **KINDS[kind]), config("parts", resume="auto", **KINDS[kind])
    expected = train(whole, GPT, comm)
    right = sample(capsys.readouterr().out)
    cut_short(parts, comm, 1)  # before the first checkpoint: it begins again
    cut_short(parts, comm, 5)  # behind that of step 4, with the record of step 5 already there
    assert checkpoint.newest(parts.out).name == "step-00000004"
    capsys.readouterr()
    found = train(parts, GPT, comm)
    printed = capsys.readouterr().out
    comm.Barrier()
    assert sample(printed) == right and (right != "") == (comm.rank == 0)
    assert records(parts) == records(whole)
    assert [line["step"] for line in records(parts)] == list(range(7))
    assert arrays_of(parts) == arrays_of(whole)
    assert content(parts.out + "/weights") == content(whole.out + "/weights")
    assert (found.loss, found.validation) == (expected.loss, expected.validation)
    if kind == "replicas, float16":
        assert records(parts)[-1]["skipped"] > 0  # a scale that was not restored would skip others


def close_records(found, expected, dtype="float64"):
    for key in ("loss", "validation", "grad_norm"):
        one, other = ([line[key] for line in lines if key in line] for lines in (found, expected))
        growth = curve(MODEL, 7, 1e-2)[[line["step"] for line in expected if key in line]]
        close(one, other, path(MODEL, 8 * MODEL.seq_len), growth * np.abs(other), dtype=dtype)


CUTS = {
    "pipe 2 x data": dict(pipe=2),
    "data x pipe 2": dict(pipe=2, mesh_order="data,pipe,seq"),
    "data": dict(pipe=1),
    "two chunks": dict(pipe=2, schedule="interleaved_1f1b", chunks=2, microbatches=4),
    "seq": dict(seq=2, pipe=None),
}


@pytest.mark.few(False)
@pytest.mark.mpi(min_size=2)
def test_a_checkpoint_is_resumed_on_another_mesh(comm, config, cut_short):
    exact = dict(dtype="float64", tied=True)
    whole, first = (config(name, **exact) for name in ("whole", "run"))
    train(whole, GPT, comm)
    cut_short(first, comm, 4)
    for name, cut in CUTS.items():
        other = config(name, resume="auto", **exact, **cut)
        on_rank_0(comm, shutil.copytree, first.out, other.out)
        train(other, GPT, comm)
        assert [line["step"] for line in records(other)] == list(range(7)), name
        close_records(records(other), records(whole))
        assert records(other)[5]["loss"] != records(other)[4]["loss"]


@pytest.mark.mpi(min_size=2)
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("pipe", [1, pytest.param(2, marks=[pytest.mark.long, pytest.mark.few(False)])])
def test_a_sharded_optimizer_trains_the_same_and_goes_on_with_and_without_shards(comm, config, cut_short, pipe):
    """To the bit: on the same replicas, and on others, where sums over replicas round in another way."""
    keys = dict(tied=True, dtype="float16" if pipe == 1 else "float32", check_weights=2)
    whole, first = config("whole", pipe=pipe, **keys), config("first", pipe=pipe, shard_optimizer=True, **keys)
    train(whole, GPT, comm)
    cut_short(first, comm, 4)
    ends = {}
    for sharded, other in ((True, pipe), (False, pipe), (True, 3 - pipe), (False, 3 - pipe)):
        goes_on = config(f"{sharded} {other}", resume="auto", shard_optimizer=sharded, pipe=other, **keys)
        on_rank_0(comm, shutil.copytree, first.out, goes_on.out)
        train(goes_on, GPT, comm)
        ends[sharded, other] = records(goes_on), arrays_of(goes_on), content(goes_on.out + "/weights")
    assert ends[True, pipe] == ends[False, pipe] == (records(whole), arrays_of(whole), content(whole.out + "/weights"))
    assert ends[True, 3 - pipe] == ends[False, 3 - pipe]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("keys", [{"freeze": ("0.*",)}, {"tied": True, "optimizer": "sgd"}])
def test_what_a_sharded_training_begins_with_and_leaves_is_that_of_one_without_shards(comm, config, keys):
    base, ends = config("base", pipe=1, steps=1, tied="tied" in keys), []
    train(base, GPT, comm)
    for sharded in (False, True):
        small = dict(pipe=1, dtype="bfloat16", check_weights=1, from_=base.out)
        run = config(str(sharded), shard_optimizer=sharded, **small, **keys)
        train(run, GPT, comm)
        ends.append((records(run), arrays_of(run), content(run.out + "/weights")))
    assert ends[0] == ends[1] and len(ends[0][2]) > 1


def test_every_key_may_change_or_must_stay(comm, config, cut_short):
    """A resume with another value of any key is refused, or gives a training."""
    first = config()
    cut_short(first, comm, 3)
    before = content(first.out)
    for key, value in {
        "dim": 32, "layers": 3, "heads": 1, "kv_heads": 1, "hidden": 64, "seq_len": 15, "tied": True, "dropout": 0.1,
        "rope_base": 100.0, "batch": 16, "optimizer": "sgd", "lr": 1e-3, "warmup": 3, "momentum": 0.5,
        "weight_decay": 0.2, "clip": 2.0, "dtype": "float64", "loss_scale": 2.0, "seed": 1,
        "order": "epoch", "packing": "segments",
    }.items():  # fmt: skip
        with pytest.raises(ConfigError, match="another configuration") as caught:
            train(config(resume="auto", **{key: value}), GPT, comm)
        assert f"{key} = {value!r}" in caught.value.expected and f"{key} = " in caught.value.found
        assert "microbatches" in caught.value.remedy and "--init" in caught.value.remedy
    assert content(first.out) == before
    changed = dict(
        steps=4, microbatches=4, schedule="gpipe", recompute=True, log_every=3, eval_every=2, eval_batches=2,
        sample_bytes=0, save_every=1, keep=1, layout="striped",
        watchdog=60.0, check_weights=1,
    )  # fmt: skip
    assert set(changed) <= {entry.name for entry in fields(config()) if not option_of(entry).decides}
    left_open = dict(kv_heads=2)  # what it stands for without the key
    assert train(config(resume="auto", **changed, **left_open), GPT, comm).step == 4


def test_a_model_with_windows_and_a_scaling_goes_on_and_no_other_model_does(comm, config, cut_short):
    """Its checkpoint holds lists and mappings where the model has tuples and objects."""
    architecture = partial(GPT, windows=(3, None), rope_scaling=nn.YarnScaling(4.0, 16), norm="layer")
    cut_short(config(), comm, 3, architecture)
    for field, value in (("norm", "rms"), ("windows", (5, None)), ("rope_scaling", nn.LinearScaling(2.0))):
        with pytest.raises(ConfigError, match="another configuration") as caught:
            train(config(resume="auto"), partial(architecture, **{field: value}), comm)
        assert f"{field} = " in caught.value.found
    assert train(config(resume="auto"), architecture, comm).step == 6


def without_sizes(manifest):
    facts = json.loads(manifest)
    facts["state"]["model"] = [1]
    return sealed(facts).encode()


NEWEST = "checkpoints/step-00000004"
REFUSED = [
    (dict(resume="auto", data="other"), "on other data"),
    (dict(resume="auto", steps=3), "past the end"),
    (dict(resume="no"), "not empty"),
    (dict(resume="absent"), "no checkpoint is here"),
    (dict(resume="checkpoint", out="elsewhere"), "not empty"),
    (dict(from_="absent", out="new"), "no model is here"),
    (dict(resume="auto", damaged=("metrics.jsonl", lambda whole: b"precious")), "metrics of a training to go on with"),
    (dict(resume="auto", damaged=(f"{NEWEST}/part-0.safetensors", flipped(-1))), "checksum"),
    (dict(resume="auto", damaged=(f"{NEWEST}/manifest.json", without_sizes)), "not one of `mpipipe train`"),
]


def test_what_cannot_be_resumed_is_refused_on_every_rank_and_nothing_is_changed(comm, config, cut_short, mpi_tmp_path):
    first = config()
    cut_short(first, comm, 5)
    if comm.rank == 0:
        (mpi_tmp_path / "other").write_text("five six seven\n" * 200)
        (mpi_tmp_path / "elsewhere").mkdir()
        (mpi_tmp_path / "elsewhere" / "mine").write_text("precious")
    for keys, match in REFUSED:
        keys = dict(keys)
        name, damage = keys.pop("damaged", ("train.log", bytes))
        whole = Path(first.out, name).read_bytes()
        comm.Barrier()
        if comm.rank == 0:
            Path(first.out, name).write_bytes(damage(whole))
        if keys.get("resume") == "checkpoint":
            keys["resume"] = str(checkpoint.newest(first.out))
        if "out" in keys:
            keys["out"] = str(mpi_tmp_path / keys["out"])
        if "data" in keys:
            keys["data"] = [str(mpi_tmp_path / keys["data"])]
        comm.Barrier()
        before = content(mpi_tmp_path)
        comm.Barrier()
        with pytest.raises(ArgumentError, match=match) as caught:
            train(config(**keys), GPT, comm)
        comm.Barrier()
        assert content(mpi_tmp_path) == before, match
        assert caught.value.remedy
        on_rank_0(comm, Path(first.out, name).write_bytes, whole)


@pytest.mark.long
def test_an_older_checkpoint_is_resumed_and_those_behind_it_are_set_aside(comm, config, cut_short, capsys):
    chosen = config()
    cut_short(chosen, comm, 5)
    older = checkpoint.newest(chosen.out).with_name("step-00000002")
    cut_short(config(resume=str(older)), comm, 3)
    root = Path(chosen.out, "checkpoints")
    assert sorted(path.name for path in root.iterdir()) == ["aside-step-00000004", "step-00000002"]
    assert ("is now called" in capsys.readouterr().out) == (comm.rank == 0)
    assert train(config(resume="auto"), GPT, comm).step == 6
    comm.Barrier()
    assert [line["step"] for line in records(chosen)] == list(range(7))


def test_a_training_that_has_ended_is_resumed_for_more_steps_or_for_none(comm, config, capsys):
    train(config(), GPT, comm)
    comm.Barrier()
    before, said = records(config()), sample(capsys.readouterr().out)
    record = train(config(resume="auto"), GPT, comm)
    comm.Barrier()
    assert records(config()) == before and record.step == 6 and record.loss == before[-1]["loss"]
    printed = capsys.readouterr().out
    assert sample(printed) == said and ("mpipipe: ok steps=6 loss=" in printed) == (comm.rank == 0)
    train(config(resume="auto", steps=8), GPT, comm)
    assert [line["step"] for line in records(config())] == list(range(9))


def test_at_most_so_many_checkpoints_stay_and_none_without_the_option(comm, config, monkeypatch):
    """How long each save took is told to what must leave in time, also where the next step saves, too."""
    times = []
    monkeypatch.setattr(Preemption, "save_took", lambda self, seconds: times.append(seconds))
    for name, keys, steps in (("some", dict(save_every=1, keep=3), [4, 5, 6]), ("none", dict(save_every=0), [])):
        train(config(name, **keys), GPT, comm)
        found = checkpoint.find(Path(config(name).out, "checkpoints"))
        assert [path.name for path in found] == [f"step-0000000{step}" for step in steps]
    assert len(times) >= 5


def test_a_checkpoint_is_whole_steps_before_the_next_save(comm, config, monkeypatch):
    chosen, found = config(save_every=3), []

    def step(self, number, original=Trainer.step):
        while number > 3 and self.saver.in_flight and self.saver._task.progress != ENDED:
            time.sleep(0.01)
        found.append(checkpoint.newest(chosen.out))
        return original(self, number)

    monkeypatch.setattr(Trainer, "step", step)
    train(chosen, GPT, comm)
    assert found[-1].name == "step-00000003"


def test_a_disk_that_is_full_at_a_checkpoint_ends_the_training_which_goes_on_from_the_one_before(
    comm, config, monkeypatch, room
):
    chosen = config(resume="auto")

    def step(self, number, original=Trainer.step):
        if number == 5 and comm.rank == comm.size - 1:
            room(20_000)
        return original(self, number)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", step)
        with pytest.raises(ArgumentError, match="checkpoint cannot be written"):
            train(chosen, GPT, comm)
    room(None)
    assert checkpoint.newest(chosen.out).name == "step-00000004"
    comm.Barrier()
    assert train(chosen, GPT, comm).step == 6


def test_auto_begins_in_a_new_folder_and_in_none_that_is_somebody_elses(comm, config):
    chosen = config(resume="auto")
    out = Path(chosen.out)
    train(chosen, GPT, comm)
    on_rank_0(comm, shutil.rmtree, out / "checkpoints")
    with pytest.raises(ConfigError, match="no checkpoint to go on from, and the folder is not empty"):
        train(chosen, GPT, comm)
    on_rank_0(comm, (out / "finished").unlink)
    with pytest.raises(ConfigError, match="found: weights"):
        train(chosen, GPT, comm)
    assert len(records(chosen)) == 7, "nothing was cut"
    # an end that was cut short
    on_rank_0(comm, (out / "weights" / "step-00000006" / "manifest.json").unlink)
    assert train(chosen, GPT, comm).step == 6
    assert [line["step"] for line in records(chosen)] == list(range(7))


def test_a_training_begins_with_the_weights_of_another_one(comm, config):
    first = config("first")
    train(first, GPT, comm)
    comm.Barrier()
    validation = records(first)[-1]["validation"]
    for source in ("weights", "checkpoint", "run without weights"):
        if source == "run without weights" and comm.rank == 0:
            shutil.rmtree(Path(first.out, "weights"))
        comm.Barrier()
        place = str(checkpoint.newest(first.out)) if source == "checkpoint" else first.out
        chosen = config(source, from_=place, steps=2, lr=2e-2, optimizer="sgd")
        train(chosen, GPT, comm)
        found = records(chosen)
        assert [line["step"] for line in found] == [0, 1, 2], source
        assert found[0]["validation"] == validation and found[1]["lr"] == 1e-2
        comm.Barrier()
