"""Trainings with the head in slices: the losses of the whole head, and folders that others can read."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support import huggingface_reference as theirs
from support.small_training import config_fixture, records

from mpipipe import Mesh, nn
from mpipipe.attention import Local
from mpipipe.errors import ArgumentError, ConfigError
from mpipipe.language.inference.evaluation import build_evaluator, count_windows, open_tokens
from mpipipe.language.models import GPT
from mpipipe.language.models.model_folder import convert, open_model, open_on_all
from mpipipe.train import TrainConfig, train

pytestmark = pytest.mark.few


config = config_fixture(in_pipe=True, steps=4, eval_every=2, dtype="float64")


def close_records(found, expected):
    for one, other in zip(records(found), records(expected), strict=True):
        assert one.keys() == other.keys()
        for key in {"loss", "validation", "grad_norm"} & {*one}:
            np.testing.assert_allclose(one[key], other[key], rtol=1e-9, err_msg=f"{key} of step {one['step']}")


def parameters(folder):
    """All parameters of a model folder, with its own names."""
    found = open_model(folder)
    stage = nn.Stage(found.model.build(Local()), found.dtype)
    found.read(stage.parameters)
    return found.model, stage.parameters


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_training_has_the_losses_of_the_whole_head(comm, config, capsys, tied):
    """Also with replicas, shards and slices of sequences, a sample at the end, and resumed."""
    whole = config("whole", tied=tied, sample_bytes=12)
    train(whole, GPT, comm)
    said = capsys.readouterr().out
    trainings = {
        "split": dict(head_slices=5, schedule="zero_bubble_h1", recompute=True),
        "replicas": dict(head_slices=2, pipe=1),
        "shards of the optimizer": dict(head_slices=3, pipe=1, shard_optimizer=True),
        "slices of sequences": dict(head_slices=3, slices=2),
        "shards of sequences": dict(head_slices=2, pipe=None, seq=min(comm.size, 2)),
    }
    for name, keys in {"slices": dict(head_slices=3), **dict([*trainings.items()][tied::2])}.items():
        sliced = config(name, tied=tied, sample_bytes=12, save_every=2, **keys)
        train(sliced, GPT, comm)
        close_records(sliced, whole)
        found = capsys.readouterr().out
        assert found.partition("--- sample")[2].splitlines()[:3] == said.partition("--- sample")[2].splitlines()[:3]
    last, saved = records(config("slices"))[-1], Path(config("slices").out, "checkpoints", "step-00000002")
    assert last["step"] == 4
    again = config("again", tied=tied, head_slices=3, resume=str(saved))
    train(again, GPT, comm)
    assert records(again)[-1]["loss"] == last["loss"]
    with pytest.raises(ConfigError, match="another configuration"):
        train(replace(again, out=again.out + "2", head_slices=2), GPT, comm)


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.long)])
def test_folders_have_the_whole_head_and_are_cut_where_they_are_read(comm, config, tied):
    keys = dict(tied=tied, head_slices=3, steps=2)
    plain, ours = config("plain", tied=tied, steps=2), config("ours", **keys)
    for each in (plain, ours):
        train(each, GPT, comm)
    folders = [Path(each.out, "folder") for each in (plain, ours)]
    if comm.rank == 0:
        for each, place in zip((plain, ours), folders):
            convert(each.out, place, most=4000)
        expected, found = map(theirs.tensors_in, folders)
        assert expected.keys() == found.keys() and ("lm_head.weight" in found) == (not tied)
        for name, tensor in expected.items():
            np.testing.assert_allclose(found[name], tensor, rtol=1e-9, atol=1e-12, err_msg=name)
        model, whole = parameters(folders[1])
        assert model.head_slices == 1 and open_model(ours.out).model.head_slices == 3
        cut = open_model(folders[1]).with_slices(3)
        stage = nn.Stage(cut.model.build(Local()), "float64")
        cut.read(stage.parameters)
        head = [stage.parameters[name] for name in ("5.1.weight", "6.weight", "7.weight")]
        assert np.concatenate(head).tobytes() == whole["5.1.weight"].tobytes()
    losses = []
    for each in (plain, ours):
        folder = open_on_all(comm, each.out)
        with Mesh(comm, pipe=comm.size) as mesh:
            tokens, _ = open_tokens(folder, list(each.data), mesh)
            with build_evaluator(folder, mesh, 16, rows=4, dtype="float64", device="cpu") as evaluator:
                losses.append(evaluator.run(tokens, 16, count_windows(tokens, 16)).loss)
    assert losses[0] > 0 and losses[1] == pytest.approx(losses[0], rel=1e-9)
    validations = []
    for name, options in {"one": {}, "other": dict(head_slices=3), "more": dict(head_slices=5)}.items():
        begun = small(config, f"from {name}", folders[1], **options)
        train(begun, GPT, comm)
        validations.append([line["validation"] for line in records(begun) if "validation" in line])
    np.testing.assert_allclose(validations[1:], [validations[0]] * 2, rtol=1e-9)
    with pytest.raises(ConfigError, match="their head in other slices"):
        train(small(config, "refused", Path(ours.out), head_slices=2), GPT, comm)
    kept = small(config, "kept", Path(ours.out), lora="2,4,q_proj,v_proj")
    assert train(kept, GPT, comm).step == 2


def small(config, name, folder, **keys):
    """A training that begins from a folder, which has the sizes."""
    usual = config(name)
    sizes = dict(data=usual.data, out=usual.out, seq_len=usual.seq_len, batch=usual.batch, pipe=usual.pipe)
    more = dict(steps=2, eval_every=1, eval_batches=1, sample_bytes=0, device="cpu", dtype="float64", microbatches=2)
    return TrainConfig(**{**sizes, **more, "from_": str(folder), **keys})


def test_what_cannot_be_cut_is_an_error():
    with pytest.raises(ArgumentError, match="more slices than rows"):
        GPT(vocab=5, head_slices=6)
    for bad in ("none", "0", "-1", 1.5):
        with pytest.raises(ConfigError, match="head_slices"):
            TrainConfig(head_slices=bad)

    with pytest.raises(ArgumentError, match="head"):
        nn.LoRA(2, 4.0, ["head"]).apply(GPT(head_slices=2).build(Local()))
