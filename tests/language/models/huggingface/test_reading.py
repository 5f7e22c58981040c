"""Folders written by hand in the convention of each family, read, and compared with that convention in plain numpy."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support import huggingface_reference as theirs
from support.harness import on_rank_0
from support.tolerance import close, largest
from support.training_tolerance import path

from mpipipe import Mesh, arrays, nn, schedules
from mpipipe.attention import Local
from mpipipe.errors import ArgumentError, NonFiniteError
from mpipipe.language.models import huggingface
from mpipipe.language.models.huggingface.names import parts_of
from mpipipe.language.models.model_folder import open_on_all

LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
OPTIONS = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "eps": {"rms_norm_eps": 0.3},
    "head_dim": {"head_dim": 10},
    "base": {"rope_theta": 7.0},
    "base in rope_parameters": {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}},
    "one key head": {"num_key_value_heads": 1},
    "linear": {"rope_scaling": {"type": "linear", "factor": 2.5}},
    "linear in rope_parameters": {
        "rope_theta": None, "rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 7.0},
    },
    "llama3": {"head_dim": 12, "rope_scaling": LLAMA3},
    "llama3 from the longest": {"rope_scaling": {k: v for k, v in LLAMA3.items() if k[0] != "o"}},
    "yarn": {"head_dim": 12, "rope_scaling": YARN},
    "yarn with betas": {"head_dim": 12, "rope_scaling": {**YARN, "beta_fast": 8.0, "beta_slow": 2}},
    "yarn with a factor": {"rope_scaling": {**YARN, "attention_factor": 1.7}},
}  # fmt: skip
CASES = [("llama", name, change) for name, change in OPTIONS.items()] + [
    ("llama", "attention bias", {"attention_bias": True}),
    ("llama", "mlp bias", {"mlp_bias": True}),
    ("mistral", "a window everywhere", {}),
    ("mistral", "no window", {"sliding_window": None}),
    ("qwen2", "biases on q, k, v", {}),
    ("qwen2", "windows in later layers", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}),
    (
        "qwen2",
        "windows by list",
        {
            "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 28,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    ("qwen3", "norms on q and k", {}),
    ("qwen3", "biases", {"attention_bias": True}),
    ("qwen3", "tied", {"tie_word_embeddings": True}),
    ("gpt2", "tied", {}),
    ("gpt2", "untied", {"tie_word_embeddings": False}),
    ("gpt2", "eps", {"layer_norm_epsilon": 0.2}),
    ("gpt2", "inner width", {"n_inner": 24}),
]  # fmt: skip


def case(tmp_path, family, change=None, files=1, **keys):
    """(config, tensors, folder) of a family with some options changed; None takes one away."""
    config = {**theirs.CONFIGS[family], **(change or {})}
    config = {key: value for key, value in config.items() if value is not None or key == "sliding_window"}
    tensors = theirs.tensors_of(config)
    return config, tensors, theirs.write_folder(tmp_path / "model", config, tensors, files, **keys)


def stage_of(folder, dtype="float64"):
    """(description, a stage of the whole model with the parameters of a folder)."""
    found = huggingface.open_folder(folder)
    stage = nn.Stage(found.model.build(Local()), dtype=dtype, seed=9)
    huggingface.read(found, stage.parameters)
    return found.model, stage


@pytest.mark.parametrize(("family", "what", "change"), CASES, ids=[f"{f} {w}".replace(" ", "-") for f, w, _ in CASES])
def test_a_folder_gives_the_logits_of_its_family(tmp_path, family, what, change):
    config, tensors, folder = case(tmp_path, family, change)
    model, stage = stage_of(folder)
    ids = np.random.default_rng(1).integers(0, 48, (2, 12))
    found, expected = stage.forward(ids)[0], theirs.logits(config, tensors, ids)
    close(found, expected, path(model), largest(expected), what=what)
    before = theirs.logits({**theirs.CONFIGS[family]}, theirs.tensors_of(theirs.CONFIGS[family]), ids)
    if change and before.shape == expected.shape:  # the option changes the result, so the test sees it
        assert abs(before - expected).max() > 1e-3 * largest(expected)


@pytest.mark.parametrize(
    ("stored", "dtype"), [("float64", "float32"), ("float16", "float64"), ("bfloat16", "bfloat16")]
)
def test_values_are_converted_to_the_dtype_asked_for(tmp_path, stored, dtype):
    _, tensors, folder = case(tmp_path, "llama")
    kind = np.dtype(ml_dtypes.bfloat16 if stored == "bfloat16" else stored)
    save_file({name: tensor.astype(kind) for name, tensor in tensors.items()}, folder / "model.safetensors")
    _, stage = stage_of(folder, dtype)
    wide = np.dtype("float64" if dtype == "float64" else "float32")
    expected = tensors["model.layers.1.mlp.up_proj.weight"].astype(kind).astype(wide)
    np.testing.assert_array_equal(stage.parameters["4.layer.1.gate_up"][20:], expected)
    assert stage.parameters.flat.dtype == wide


def test_files_of_the_bare_decoder_have_no_prefix(tmp_path):
    """As those of the first GPT-2, which also hold masks that are no parameters."""
    config, tensors, folder = case(tmp_path, "gpt2")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    bare["h.0.attn.bias"] = np.tril(np.ones((1, 1, 64, 64)))
    save_file(bare, folder / "model.safetensors")
    ids = np.random.default_rng(1).integers(0, 48, (1, 7))
    model, stage = stage_of(folder)
    expected = theirs.logits(config, tensors, ids)
    close(stage.forward(ids)[0], expected, path(model), largest(expected))


def test_a_head_beside_a_tied_embedding_is_refused(tmp_path):
    _, tensors, folder = case(tmp_path, "llama", {"tie_word_embeddings": True})
    head = tensors["model.embed_tokens.weight"] + 1e-3
    save_file({**tensors, "lm_head.weight": head}, folder / "model.safetensors")
    with pytest.raises(ArgumentError, match=r"a tensor lm_head\.weight that the model has not"):
        stage_of(folder)


def test_values_that_are_not_finite_and_parameters_that_the_family_has_not_are_refused_by_name(tmp_path):
    _, _, folder = case(tmp_path, "llama")
    with pytest.raises(ArgumentError, match=r"no tensor for the parameter 1\.layer\.1\.lora"):
        huggingface.read(huggingface.open_folder(folder), {"1.layer.1.lora": np.zeros(3)})
    tensors, name = load_file(folder / "model.safetensors"), "model.layers.1.self_attn.k_proj.weight"
    tensors[name][3, 2] = np.nan
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(NonFiniteError, match=f"the tensor {name} is not finite\\s+found: 1 of 128 values"):
        stage_of(folder)


@pytest.mark.parametrize("files", [1, 5])
def test_reading_on_a_gpu_sets_what_lies_there(tmp_path, gpu, files):
    """Also where the parts of one parameter are in several files."""
    _, _, folder = case(tmp_path, "llama", {"tie_word_embeddings": True}, files)
    found = huggingface.open_folder(folder)
    here = nn.Stage(found.model.build(Local()), seed=1)
    there = nn.Stage(found.model.build(Local()), seed=2, device="cuda")
    huggingface.read(found, here.parameters)
    huggingface.read(found, there.parameters)
    for name, array in there.parameters.items():
        np.testing.assert_array_equal(arrays.download(array), here.parameters[name])


IO = Path("/proc/self/io")
SIZES = {"vocab_size": 1000, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6}


def bytes_read():
    """Bytes that this process has asked the system for so far."""
    return int(next(line for line in IO.read_text().splitlines() if "rchar" in line).split()[1])


@pytest.mark.skipif(not IO.exists(), reason="the system does not say how much a process reads")
@pytest.mark.parametrize("files", [1, 5])
@pytest.mark.parametrize("tied", [False, True])
def test_a_rank_reads_its_share_and_one_percent(comm, mpi_tmp_path, files, tied):
    folder = Path(mpi_tmp_path, "model")
    config = {**theirs.CONFIGS["llama"], **SIZES, "tie_word_embeddings": tied}
    tensors = theirs.tensors_of(config)
    on_rank_0(comm, theirs.write_folder, folder, config, tensors, files)
    found = open_on_all(comm, str(folder))
    with Mesh(comm, pipe=comm.size) as mesh:
        start, stop = schedules.partition(found.model.costs(), comm.size)[comm.rank]
        stage = nn.Stage(found.model.build(Local())[start:stop], first=start)
        own = {
            part.theirs for part in parts_of(found.folder.family.table, found.model) if part.ours in stage.parameters
        }
        if tied and "13.1.weight" in stage.parameters:
            own.add("model.embed_tokens.weight")
        share = sum(tensors[name].nbytes for name in own)
        comm.Barrier()
        before = bytes_read()
        found.load([stage], mesh)
        read = bytes_read() - before
    assert share <= read <= 1.01 * share + 4096  # and what the system's own files take, such as /proc/self/io
