"""Folders written by one process, whatever the model was cut into; what a failed save leaves."""

import json
import os

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file
from support import huggingface_reference as theirs

from mpipipe import nn
from mpipipe.attention import Local
from mpipipe.errors import ArgumentError, ConfigError, NonFiniteError
from mpipipe.language.models import GPT, huggingface
from mpipipe.language.models.model_folder import convert, open_model

CHANGES = {
    "llama": {"tie_word_embeddings": True, "attention_bias": True, "bos_token_id": 5, "initializer_range": 0.5},
    "mistral": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    "qwen3": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    "gpt2": {"n_inner": 24, "attn_pdrop": 0.3},
}


def hand_made(folder, family):
    """(config, tensors) of a folder with a tokenizer beside them."""
    config = {**theirs.CONFIGS[family], **CHANGES[family]}
    tensors = theirs.tensors_of(config)
    theirs.write_folder(folder, config, tensors)
    (folder / "tokenizer.json").write_text('{"a": "tokenizer"}')
    (folder / "generation_config.json").write_text('{"eos_token_id": 7}')
    return config, tensors


def check_index(folder):
    """The index names the file of each tensor, and the files have nothing else."""
    facts = json.loads((folder / "model.safetensors.index.json").read_text())
    for path in folder.glob("*.safetensors"):
        assert set(load_file(path)) == {name for name, file in facts["weight_map"].items() if file == path.name}
    assert facts["metadata"]["total_size"] == sum(tensor.nbytes for tensor in theirs.tensors_in(folder).values())


@pytest.mark.parametrize("family", CHANGES)
def test_a_folder_is_written_as_it_was(tmp_path, family):
    config, tensors = hand_made(tmp_path / "source", family)
    said = convert(tmp_path / "source", tmp_path / "back", most=6000)
    assert f"{config['architectures'][0]} in float64" in said
    written = theirs.tensors_in(tmp_path / "back")
    assert set(written) == set(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(written[name], tensor, err_msg=name)
    check_index(tmp_path / "back")
    assert open_model(tmp_path / "back").model == open_model(tmp_path / "source").model
    for name in ("tokenizer.json", "generation_config.json"):
        assert (tmp_path / "back" / name).read_text() == (tmp_path / "source" / name).read_text()
    before, after = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("source", "back"))
    for key in ("model_type", "architectures", "bos_token_id", "initializer_range", "attn_pdrop"):
        assert after.get(key) == before.get(key)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_files_are_written_in_the_dtype_asked_for(tmp_path, dtype):
    model, target = GPT(vocab=16, dim=8, layers=2, heads=2, hidden=8), tmp_path / "target"
    stage = nn.Stage(model.build(Local()))
    huggingface.save(target, model, [stage.parameters], dict, dtype=dtype, origin=huggingface.Origin())
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    written = load_file(target / "model.safetensors")
    assert {tensor.dtype for tensor in written.values()} == {kind}
    expected = stage.parameters["2.layer.1.down"].astype(kind)
    np.testing.assert_array_equal(written["model.layers.0.mlp.down_proj.weight"], expected)
    config = json.loads((target / "config.json").read_text())
    assert config["torch_dtype"] == dtype
    # a model that was made here has no special tokens: the library would take ids of its own, and end a text at one
    assert [config[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [None] * 3
    assert not (target / "model.safetensors.index.json").exists()


def test_a_value_that_the_dtype_cannot_hold_is_refused_and_nothing_is_left(tmp_path):
    model = GPT(vocab=16, dim=8, layers=2, heads=2, hidden=8)
    stage = nn.Stage(model.build(Local()))
    stage.parameters["2.layer.1.down"][1, 1] = 1e6
    with pytest.raises(NonFiniteError, match=r"2\.layer\.1\.down cannot be written as float16"):
        huggingface.save(
            tmp_path / "target", model, [stage.parameters], dict, dtype="float16", origin=huggingface.Origin()
        )
    assert os.listdir(tmp_path) == []


def test_what_is_not_converted_is_refused_and_no_folder_with_files_is_written_over(tmp_path):
    hand_made(tmp_path / "source", "llama")
    with pytest.raises(ConfigError, match="dtype of a folder of Hugging Face"):
        convert(tmp_path / "source", tmp_path / "target", "int8")
    with pytest.raises(ArgumentError, match="no model is here"):
        convert(tmp_path / "nothing", tmp_path / "target")
    assert sorted(os.listdir(tmp_path)) == ["source"]
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "mine").write_text("")
    with pytest.raises(ArgumentError, match="the folder for the model is not empty"):
        convert(tmp_path / "source", tmp_path / "target")
    assert os.listdir(tmp_path / "target") == ["mine"]
