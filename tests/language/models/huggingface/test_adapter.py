"""Folders of adapters: what PEFT would find in them, what they add to a model, and which are refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support import huggingface_reference as theirs
from support.tolerance import close, largest

from mpipipe import Mesh, nn, schedules
from mpipipe.attention import Local
from mpipipe.errors import ArgumentError, ConfigError, NonFiniteError
from mpipipe.language.models import huggingface
from mpipipe.language.models.huggingface.adapter import open_adapter, read_adapter, save_adapter
from mpipipe.language.models.huggingface.families import FAMILIES
from mpipipe.language.models.weights import own_arrays
from mpipipe.nn.lora import without_adapters

TARGETS = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "qwen3": ["k_proj", "down_proj"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
}


def source_of(tmp_path, family):
    """(the folder of a model made by hand, its description)."""
    folder = Path(tmp_path, "model")
    if not folder.exists():
        config = theirs.CONFIGS[family]
        theirs.write_folder(folder, config, theirs.tensors_of(config))
    return huggingface.open_folder(folder)


def stages_of(model, mesh, lora, seed=0):
    schedule = schedules.one_f_one_b(mesh.pipe.size, 1)
    layers = lora.apply(model.build(Local()))
    ((start, stop),) = (
        schedules.partition(model.costs(), schedule.stages)[n] for n in schedule.stages_of(mesh.pipe.rank)
    )
    return [nn.Stage(layers[start:stop], "float64", seed=seed, first=start)]


def fill(stages):
    """Set all adapters to numbers that depend on their names alone."""
    for stage in stages:
        for name in stage.gradients:
            seed = sum(place * ord(letter) for place, letter in enumerate(name))
            array = stage.parameters[name]
            array[...] = np.random.default_rng(seed).standard_normal(array.shape)
        stage.refresh()


@pytest.mark.parametrize("family", TARGETS)
def test_an_adapter_is_written_by_all_ranks_and_is_what_the_merged_model_has_more(comm, mpi_tmp_path, family):
    found = source_of(mpi_tmp_path, family) if comm.rank == 0 else None
    found = comm.bcast(found)
    lora, out = nn.LoRA(2, 6.0, TARGETS[family]), Path(mpi_tmp_path)
    with Mesh(comm) as mesh:
        stages = stages_of(found.model, mesh, lora)
        huggingface.read(found, own_arrays(without_adapters(stages, merged=False)))
        fill(stages)
        origin = huggingface.Origin.of(found.path)
        save_adapter(out / "adapter", lora, found.model, own_arrays(stages), mesh, origin)
        merged = own_arrays(without_adapters(stages, merged=True))
        groups = comm.allgather({name: array.copy() for name, array in merged.items()})
        if comm.rank == 0:
            huggingface.save(out / "merged", found.model, groups, dict, dtype="float64", origin=origin)
        again = stages_of(found.model, mesh, open_adapter(out / "adapter").lora, seed=5)
        read_adapter(open_adapter(out / "adapter"), FAMILIES[family], found.model, own_arrays(again))
        for one, other in zip(stages, again):
            for name in one.gradients:
                assert one.parameters[name].tobytes() == other.parameters[name].tobytes(), name
    if comm.rank:
        return
    facts = json.loads((out / "adapter" / "adapter_config.json").read_text())
    assert facts["init_lora_weights"] is facts["inference_mode"] is True
    assert (facts["r"], facts["lora_alpha"], facts["target_modules"]) == (2, 6, sorted(TARGETS[family]))
    assert facts["fan_in_fan_out"] == (family == "gpt2") and facts["base_model_name_or_path"] == str(found.path)
    adapter = load_file(out / "adapter" / "adapter_model.safetensors")
    before, after = (theirs.tensors_in(out / place) for place in ("model", "merged"))
    prefix, count = "base_model.model.", 0
    for name, tensor in after.items():
        module = name.removesuffix(".weight")
        if f"{prefix}{module}.lora_A.weight" not in adapter:
            np.testing.assert_array_equal(tensor, before[name], name)
            continue
        a, b = (adapter[f"{prefix}{module}.lora_{part}.weight"] for part in "AB")
        more = 3.0 * b @ a
        count += 1
        close(tensor, before[name] + (more.T if family == "gpt2" else more), 4, 1 + largest(more), what=name)
    assert 2 * count == len(adapter)


def good_adapter(tmp_path, family="llama"):
    """The folder of an adapter, and the model that it belongs to."""
    found = source_of(tmp_path, family)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"],
              "bias": "none", "lora_dropout": 0.1, "peft_version": "0.21"}  # fmt: skip
    model, folder = found.model, Path(tmp_path, "adapter")
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    random, width = np.random.default_rng(0), model.heads * model.head_dim
    tensors = {}
    for block in range(model.layers):
        module = f"base_model.model.model.layers.{block}.self_attn.q_proj"
        tensors[f"{module}.lora_A.weight"] = random.standard_normal((2, model.dim)).astype(np.float32)
        tensors[f"{module}.lora_B.weight"] = random.standard_normal((width, 2)).astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder, config, tensors, found


def read(folder, found):
    opened = open_adapter(folder)
    layers = opened.lora.apply(found.model.build(Local()))
    stage = nn.Stage(layers, "float32")
    read_adapter(opened, found.family, found.model, dict(stage.parameters.items()))
    return stage


@pytest.mark.parametrize(
    "key, value",
    [("use_rslora", True), ("use_dora", True), ("bias", "all"), ("modules_to_save", ["lm_head"]), ("peft_type", "IA3"),
     ("rank_pattern", {"q_proj": 4}), ("layers_to_transform", [0]), ("r", 0), ("lora_alpha", None), ("new_option", 1),
     ("init_lora_weights", "pissa"), ("target_modules", "q_proj"), ("target_modules", ["model.layers.0.q_proj"])],
)  # fmt: skip
def test_options_that_change_the_result_or_are_not_known_are_refused_by_name(tmp_path, key, value):
    folder, config, _, _ = good_adapter(tmp_path)
    (folder / "adapter_config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(ConfigError, match=key) as caught:
        open_adapter(folder)
    assert "adapter_config.json" in str(caught.value)


def test_an_adapter_of_another_model_is_refused(tmp_path):
    folder, config, tensors, found = good_adapter(tmp_path)
    path = folder / "adapter_model.safetensors"
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
    save_file({**tensors, name: tensors[name][:-1].copy()}, path)
    with pytest.raises(ArgumentError, match=r"layers\.0\.self_attn\.q_proj\.lora_B\.weight of an adapter does not fit"):
        read(folder, found)
    save_file({key: value for key, value in tensors.items() if key != name}, path)
    with pytest.raises(ArgumentError, match="does not fit") as caught:
        read(folder, found)
    assert "none in" in str(caught.value)
    save_file({**tensors, name.replace("layers.0", "layers.77"): tensors[name]}, path)
    with pytest.raises(ArgumentError, match=r"layers\.77.*does not belong to the model"):
        read(folder, found)
    save_file({**tensors, name: np.full_like(tensors[name], np.nan)}, path)
    with pytest.raises(NonFiniteError, match="not finite"):
        read(folder, found)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ArgumentError, match="damaged"):
        read(folder, found)
    path.unlink()
    with pytest.raises(ArgumentError, match="cannot be read"):
        read(folder, found)
    (folder / "adapter_config.json").write_text(json.dumps({**config, "target_modules": ["o_proj", "c_attn"]}))
    with pytest.raises(ConfigError, match="no module c_attn"):
        read(folder, found)
