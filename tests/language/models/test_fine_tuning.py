"""Trainings of a part of a model, and of adapters: what stays as it is, what is left, what is refused."""

from pathlib import Path

import pytest
from support import huggingface_reference as theirs
from support.small_training import metrics
from support.text_plan import text_plan
from support.tolerance import close, largest

from mpipipe import nn
from mpipipe.attention import Local
from mpipipe.errors import ArgumentError, ConfigError
from mpipipe.language.models import GPT
from mpipipe.language.models.fine_tuning import FineTuning
from mpipipe.language.models.model_folder import convert, open_model
from mpipipe.planning.problem import declared, layers_with
from mpipipe.train import TrainConfig, train

pytestmark = pytest.mark.few
LORA = "2,4,q_proj,v_proj,down_proj"


@pytest.fixture
def base(comm, folder):
    """A model folder of a Llama."""
    return None if comm is None else folder()[0]


@pytest.fixture
def run(comm, chosen, source):
    """run(name, **keys): train, and return the output folder."""

    def go(name, architecture=GPT, **keys):
        config = chosen(name, **{"steps": 4, "lr": 1e-2, **keys})
        train(config, architecture, comm, data=source)
        return Path(config.out)

    return go


def validations(out):
    return [line["validation"] for line in metrics(out) if "validation" in line]


def test_a_training_of_adapters_leaves_them_and_the_model_with_them(comm, run, base, capsys):
    out = run("run", from_=str(base), lora=LORA, steps=50, eval_every=50)
    if comm.rank:
        return
    assert " parameters of which 552 are trained" in capsys.readouterr().out
    convert(out, out / "folder", "float64")
    before, after, adapter = (theirs.tensors_in(at) for at in (base, out / "folder", out / "adapter"))
    assert set(before) == set(after) and len(adapter) == 2 * 3 * 3
    for name, tensor in after.items():
        a, b = (adapter.get(f"base_model.model.{name.removesuffix('weight')}lora_{part}.weight") for part in "AB")
        if a is None:
            assert tensor.tobytes() == before[name].tobytes(), f"{name} stays as it is"
        else:
            assert b.any()
            close(tensor, before[name] + 2.0 * b @ a, 4, 1 + largest(b @ a), what=name)
    first, last = validations(out)
    assert last < first
    with pytest.raises(ArgumentError, match="merge_and_unload"):
        open_model(out / "adapter")


@pytest.mark.parametrize(
    "sharded",
    [{}, pytest.param({"dtype": "bfloat16", "pipe": 1, "batch": 8, "shard_optimizer": True}, marks=pytest.mark.long)],
)
def test_a_training_goes_on_with_adapters_and_from_a_checkpoint_to_the_bit(comm, run, base, sharded):
    keys = dict(from_=str(base), lora=LORA, steps=6, **sharded)
    whole = run("whole", **{**keys, "shard_optimizer": False})
    half = run("half", **keys, save_every=3)
    for name in ("weights", "adapter"):
        if comm.rank == 0:
            assert theirs.tensors_in(half / name).keys() == theirs.tensors_in(whole / name).keys()
    again = run("again", **keys, resume=str(half / "checkpoints" / "step-00000003"))
    if comm.rank == 0:
        found, expected = theirs.tensors_in(again / "adapter"), theirs.tensors_in(whole / "adapter")
        assert all(found[name].tobytes() == expected[name].tobytes() for name in expected)
        with pytest.raises(ConfigError, match="adapters apart from their matrices"):
            open_model(half / "checkpoints" / "step-00000006")
        assert open_model(half).kind == "weights"
    more = run("more", **{**keys, "lora": str(whole / "adapter"), "steps": 1})
    assert validations(more)[0] == validations(whole)[-1]


def test_what_is_frozen_stays_as_it_is(comm, run, base, capsys):
    out = run("run", from_=str(base), freeze=("*", "!5.*", "!7.1.weight"), steps=50, eval_every=50,
              schedule="zero_bubble_h1")  # fmt: skip
    if comm.rank:
        return
    assert "of which 1,552 are trained" in capsys.readouterr().out  # norm and attention of a block, head
    convert(out, out / "folder", "float64")
    before, after = theirs.tensors_in(base), theirs.tensors_in(out / "folder")
    changed = {name for name in after if after[name].tobytes() != before[name].tobytes()}
    attention = [f"self_attn.{part}_proj.weight" for part in "qkvo"]
    expected = {"lm_head.weight"} | {f"model.layers.2.{name}" for name in ["input_layernorm.weight", *attention]}
    assert changed == expected
    assert validations(out)[1] < validations(out)[0]


def test_the_schedule_has_nothing_for_what_is_frozen():
    keys = dict(dim=16, layers=4, heads=2, seq_len=8, batch=4, microbatches=4, schedule="zero_bubble_h1")
    config = TrainConfig(**keys)
    tuning = FineTuning(freeze=("*", "!3.*"))
    task, plan = text_plan(config, 4, tuning=tuning)
    trained = next(stage for stage, (start, stop) in enumerate(plan.layer_ranges) if start <= 3 < stop)
    ops = {stage: {a.op for order in plan.schedule.orders for a in order if a.stage == stage} for stage in range(4)}
    for stage, found in ops.items():
        assert found == ({"F"} if stage < trained else {"F", "I", "W"} if stage == trained else {"F", "B"})
    held = [layers_with(task.trained()).intersection(plan.layers_of(rank)) for rank in range(4)]
    assert [bool(own) for own in held] == [stage == trained for stage in range(4)]
    alone, _ = text_plan(config, 4, tuning=FineTuning(lora=nn.LoRA(1, 1.0, ["q_proj"])))
    assert sum(entry.size for entry in alone.trained().values()) == 4 * 2 * 16


def test_frozen_layers_count_less_in_the_cut_into_stages():
    model = GPT(dim=16, layers=2, heads=2, seq_len=8)
    whole = model.costs()
    assert FineTuning().costs(model, declared(model.build(Local()))) == whole
    counts = [1, 1, 1, 3, 2, 3]
    expected = [cost * count / 3 for cost, count in zip(whole, counts)]
    assert FineTuning(freeze=("*", "!3.*", "!5.0.gain")).costs(model, ["3.layer.1.down", "5.0.gain"]) == expected
    adapted = FineTuning(lora=nn.LoRA(1, 1.0, ["q_proj"]))
    assert adapted.costs(model, ["1.layer.1.q_proj.lora_A"])[1:] == [cost * 2 / 3 for cost in whole[1:]]


@pytest.mark.parametrize(
    "keys, match",
    [
        ({"freeze": ("*.qvk",)}, "a pattern of freeze fits no parameter"),
        ({"freeze": ("*",)}, "nothing is left to train"),
        ({"lora": "8"}, "lora is neither adapters nor the folder of one"),
        ({"lora": "8,16,"}, "lora is neither adapters nor the folder of one"),
        ({"lora": "a,16,q_proj"}, "lora is neither adapters nor the folder of one"),
        ({"lora": "8,16,qkv"}, "no layer has a projection of this name"),
        ({"lora": "8,16,c_attn"}, "has no module c_attn"),
        ({"lora": "2,4,q_proj", "freeze": ("!0.*",)}, "fits no parameter"),
        ({"tied": True, "freeze": ("0.*",)}, "tied parameter 'tokens' is frozen in some of its places"),
    ],
)
def test_what_cannot_be_trained_is_refused_on_all_ranks_before_anything_is_written(
    comm, run, mpi_tmp_path, keys, match
):
    with pytest.raises((ArgumentError, ConfigError), match=match):
        run("run", dim=16, layers=2, heads=2, **keys)
    assert not Path(mpi_tmp_path, "run").exists()
