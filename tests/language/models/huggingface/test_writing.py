"""Folders written by the ranks that hold the layers, and by one process; what a failed save leaves."""

from __future__ import annotations

import json
import os
import resource
from dataclasses import asdict
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file
from support import huggingface_reference as theirs
from support import saved_model

from mpipipe import Mesh, checkpoint, nn, schedules
from mpipipe.attention import Local
from mpipipe.errors import ArgumentError, ConfigError, NonFiniteError, StorageError
from mpipipe.language.models import GPT, huggingface
from mpipipe.language.models.model_folder import convert, open_model
from mpipipe.language.models.weights import own_arrays

CHANGES = {
    "llama": {"tie_word_embeddings": True, "attention_bias": True, "bos_token_id": 5, "initializer_range": 0.5},
    "mistral": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    "qwen3": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    "gpt2": {"n_inner": 24, "attn_pdrop": 0.3},
}


def hand_made(folder, family, tokenizer=True):
    """(config, tensors) of a folder with a tokenizer beside them."""
    config = {**theirs.CONFIGS[family], **CHANGES[family]}
    tensors = theirs.tensors_of(config)
    theirs.write_folder(folder, config, tensors)
    if tokenizer:
        (folder / "tokenizer.json").write_text('{"a": "tokenizer"}')
        (folder / "generation_config.json").write_text('{"eos_token_id": 7}')
    return config, tensors


def own_stages(model, mesh, chunks=1):
    """The stages of this rank of an interleaved pipeline, and the schedule."""
    schedule = schedules.interleaved_1f1b(mesh.pipe.size, chunks, 4)
    layers, parts = model.build(Local()), schedules.partition(model.costs(), schedule.stages)
    spans = [parts[number] for number in schedule.stages_of(mesh.pipe.rank)]
    return [nn.Stage(layers[start:stop], "float64", first=start) for start, stop in spans]


def check_index(folder):
    """The index names the file of each tensor, and the files have nothing else."""
    facts = json.loads((folder / "model.safetensors.index.json").read_text())
    for path in folder.glob("*.safetensors"):
        assert set(load_file(path)) == {name for name, file in facts["weight_map"].items() if file == path.name}
    assert facts["metadata"]["total_size"] == sum(tensor.nbytes for tensor in theirs.tensors_in(folder).values())


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("family", CHANGES)
def test_ranks_read_their_layers_and_write_them_as_they_were(comm, mpi_tmp_path, family, chunks):
    source, target = Path(mpi_tmp_path, "source"), Path(mpi_tmp_path, "target")
    if comm.rank == 0:
        hand_made(source, family)
    comm.Barrier()
    found = open_model(source)
    with Mesh(comm, pipe=comm.size) as mesh:
        stages = own_stages(found.model, mesh, chunks)
        found.load(stages, mesh)
        origin = huggingface.Origin.of(source)
        huggingface.save(target, found.model, own_arrays(stages), mesh, dtype="float64", origin=origin, most=4000)
    expected, written = theirs.tensors_in(source), theirs.tensors_in(target)
    assert set(written) == set(expected)
    for name, tensor in expected.items():
        np.testing.assert_array_equal(written[name], tensor, err_msg=name)
    check_index(target)
    assert open_model(target).model == found.model
    for name in ("tokenizer.json", "generation_config.json"):
        assert (target / name).read_text() == (source / name).read_text()
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, target))
    for key in ("model_type", "architectures", "bos_token_id", "initializer_range", "attn_pdrop"):
        assert after.get(key) == before.get(key)
    assert not list(Path(mpi_tmp_path).glob("*.partial"))


@pytest.mark.parametrize("family", CHANGES)
def test_one_process_converts_there_and_back_without_a_change(tmp_path, family):
    config, tensors = hand_made(tmp_path / "source", family)
    said = convert(tmp_path / "source", tmp_path / "ours", most=6000)
    assert "weights in float64" in said and len(list((tmp_path / "ours").glob("stage-*"))) > 2
    said = convert(tmp_path / "ours", tmp_path / "back", most=6000)
    assert f"{config['architectures'][0]} in float64" in said
    written = theirs.tensors_in(tmp_path / "back")
    assert set(written) == set(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(written[name], tensor, err_msg=name)
    check_index(tmp_path / "back")
    assert open_model(tmp_path / "back").model == open_model(tmp_path / "source").model
    assert (tmp_path / "back" / "tokenizer.json").read_text() == '{"a": "tokenizer"}'
    after = json.loads((tmp_path / "back" / "config.json").read_text())
    for key in ("bos_token_id", "attn_pdrop"):
        assert key not in CHANGES[family] or after[key] == CHANGES[family][key]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_files_are_written_in_the_dtype_asked_for(comm, mpi_tmp_path, dtype):
    model, target = GPT(vocab=16, dim=8, layers=2, heads=2, hidden=8), Path(mpi_tmp_path, "target")
    with Mesh(comm, pipe=1) as mesh:
        stage = nn.Stage(model.build(Local()))
        parameters = stage.parameters
        huggingface.save(target, model, parameters, mesh, dtype=dtype, origin=huggingface.Origin())
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


@pytest.mark.parametrize(
    ("dtype", "error", "match"),
    [
        ("float16", NonFiniteError, r"2\.layer\.1\.down cannot be written as float16"),  # a value is too large for it
        ("float32", StorageError, "the model folder cannot be written"),  # the disk of one rank is full
    ],
)
def test_a_save_that_fails_on_one_rank_is_an_error_on_all_and_leaves_nothing(comm, mpi_tmp_path, dtype, error, match):
    model, target = GPT(vocab=16, dim=8, layers=2, heads=2, hidden=8), Path(mpi_tmp_path, "target")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Mesh(comm, pipe=comm.size) as mesh:
        stages = own_stages(model, mesh)
        for stage in stages:
            if "2.layer.1.down" in stage.parameters:
                stage.parameters["2.layer.1.down"][1, 1] = 1e6
        try:
            if dtype == "float32" and comm.rank == comm.size - 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
            with pytest.raises(error, match=match):
                huggingface.save(target, model, own_arrays(stages), mesh, dtype=dtype, origin=huggingface.Origin())
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    comm.Barrier()
    assert os.listdir(mpi_tmp_path) == []


def test_a_folder_with_files_is_not_written_over(comm, mpi_tmp_path):
    model, target = GPT(vocab=16, dim=8, layers=1, heads=2, hidden=8), Path(mpi_tmp_path, "target")
    if comm.rank == 0:
        target.mkdir()
        (target / "mine").write_text("")
    comm.Barrier()
    with Mesh(comm, pipe=1) as mesh:
        stage = nn.Stage(model.build(Local()))
        keys = dict(dtype="float32", origin=huggingface.Origin())
        with pytest.raises(ArgumentError, match="the folder for the model is not empty"):
            huggingface.save(target, model, stage.parameters, mesh, **keys)
        huggingface.save(target, model, stage.parameters, mesh, **keys, replaces=True)
    assert sorted(os.listdir(target)) == ["config.json", "model.safetensors"]
    assert os.listdir(mpi_tmp_path) == ["target"]


def test_a_checkpoint_is_converted(comm, mpi_tmp_path):
    with Mesh(comm, pipe=comm.size) as mesh:
        stages, optimizer = saved_model.trained(mesh)
        state = {"model": asdict(saved_model.MODEL)}
        checkpoint.save(mpi_tmp_path / "run" / "checkpoints", mesh, stages, optimizer, step=3, state=state)
        everywhere = comm.allgather(
            {name: np.array(array) for each in stages for name, array in each.parameters.items()}
        )
    parameters = {name: array for part in everywhere for name, array in part.items()}
    if comm.rank == 0:
        convert(Path(mpi_tmp_path, "run"), Path(mpi_tmp_path, "target"))
        written = theirs.tensors_in(Path(mpi_tmp_path, "target"))
        np.testing.assert_array_equal(written["model.embed_tokens.weight"], parameters["0.weight"])
        np.testing.assert_array_equal(
            written["model.layers.1.mlp.up_proj.weight"], parameters["4.layer.1.gate_up"][12:]
        )
        assert "lm_head.weight" not in written


def test_what_is_not_converted_is_refused(tmp_path):
    hand_made(tmp_path / "source", "llama")
    for dtype in ("bfloat16", "int8"):
        with pytest.raises(ConfigError, match="dtype of weights of this package"):
            convert(tmp_path / "source", tmp_path / "target", dtype)
    convert(tmp_path / "source", tmp_path / "ours")
    with pytest.raises(ConfigError, match="dtype of a folder of Hugging Face"):
        convert(tmp_path / "ours", tmp_path / "target", "int8")
    with pytest.raises(ArgumentError, match="no model is here"):
        convert(tmp_path / "nothing", tmp_path / "target")
    assert sorted(os.listdir(tmp_path)) == ["ours", "source"]
