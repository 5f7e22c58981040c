"""Low-rank adapters: W + (alpha / rank) B A in dense numpy, exact gradients of A and B, and W as it was."""

import numpy as np
import pytest
from support.gradcheck import check_stage
from support.tolerance import close, largest

from mpipipe import arrays, nn, optim
from mpipipe.attention import Local
from mpipipe.errors import ArgumentError
from mpipipe.language.models import GPT
from mpipipe.nn.lora import without_adapters

SIZES = dict(vocab=19, dim=8, layers=2, heads=2, kv_heads=1, hidden=12, seq_len=6)
GPT2 = dict(SIZES, kv_heads=2, norm="layer", positions="learned", feed_forward="gelu", feed_forward_bias=True)
LLAMA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RANDOM = np.random.default_rng(4)
IDS = RANDOM.integers(0, 19, (2, 6))


def stage_of(targets, sizes=SIZES, dtype="float64", rank=3, first=0, last=None):
    """A stage whose adapters are not their neutral elements."""
    layers = nn.LoRA(rank, 6.0, targets).apply(GPT(**sizes).build(Local()))[first:last]
    stage = nn.Stage(layers, dtype, seed=2, first=first)
    for name in stage.gradients:
        if name.endswith("lora_B"):
            random = np.random.default_rng(len(name) + sum(map(ord, name)))
            stage.parameters[name][...] = random.standard_normal(stage.parameters[name].shape) * 0.3
    stage.refresh()
    return stage


@pytest.mark.parametrize("targets", [["q_proj"], ["k_proj", "v_proj"], LLAMA_TARGETS])
def test_forward_is_that_of_the_plain_model_with_the_sum_in_place_of_the_matrix(targets):
    stage = stage_of(targets)
    plain = nn.Stage(GPT(**SIZES).build(Local()), "float64", seed=2)
    queries, keys, hidden = 8, 4, 12
    rows = {
        "q_proj": ("qkv", 0, queries), "k_proj": ("qkv", queries, queries + keys),
        "v_proj": ("qkv", queries + keys, queries + 2 * keys), "o_proj": ("out", 0, 8),
        "gate_proj": ("gate_up", 0, hidden), "up_proj": ("gate_up", hidden, 2 * hidden), "down_proj": ("down", 0, 8),
    }  # fmt: skip
    assert len(stage.gradients) == 2 * 2 * len(targets)
    for target in targets:
        key, start, stop = rows[target]
        for layer in (1, 3) if key in ("qkv", "out") else (2, 4):
            a, b = (stage.parameters[f"{layer}.layer.1.{target}.lora_{part}"] for part in "AB")
            assert a.shape[0] == b.shape[1] == 3
            plain.parameters[f"{layer}.layer.1.{key}"][start:stop] += 6.0 / 3 * b @ a
    merged = without_adapters([stage], merged=True)[0].parameters
    assert set(merged) == set(plain.parameters)
    for name, array in plain.parameters.items():
        close(merged[name], array, 3 + 2, 1 + largest(array))
    y, expected = stage.forward(IDS)[0], plain.forward(IDS)[0]
    close(y, expected, 2000, 1 + largest(expected))


@pytest.mark.parametrize("targets, sizes", [(LLAMA_TARGETS, SIZES), (["c_attn", "c_proj", "c_fc"], GPT2)])
def test_gradients_agree_with_finite_differences(targets, sizes):
    stage = stage_of(targets, sizes, first=1, last=3)
    check_stage(stage, RANDOM.standard_normal((2, 5, 8)))
    assert all(stage.gradients[name].any() for name in stage.gradients)


@pytest.mark.parametrize("frozen", "AB")
def test_one_matrix_of_an_adapter_may_be_frozen(frozen):
    def gradients(*patterns):
        layers = nn.LoRA(3, 6.0, LLAMA_TARGETS).apply(GPT(**SIZES).build(Local()))
        stage = nn.Stage(layers, "float64", frozen=patterns)
        for name, array in stage.parameters.items():
            array[...] = np.random.default_rng(len(name)).standard_normal(array.shape)
        stage.refresh()
        y, saved = stage.forward(IDS)
        stage.backward(y, saved)
        return dict(stage.gradients)

    whole, part = gradients(), gradients(f"*lora_{frozen}")
    assert 0 < len(part) == len(whole) // 2
    np.testing.assert_equal(part, {name: whole[name] for name in part})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_matrices_stay_as_they_are_and_layers_follow_the_adapters(dtype):
    stage = stage_of(["q_proj", "down_proj"], dtype=dtype)
    before = {name: array.copy() for name, array in stage.parameters.items()}
    optimizer = optim.AdamW([stage], 1e-2)
    stage.optimizer_writes_compute()
    for _ in range(20):
        y, saved = stage.forward(IDS)
        stage.gradients.flat.fill(0)
        stage.backward(y, saved)
        optimizer.step()
        stage.refresh()
    for name, array in stage.parameters.items():
        assert (array.tobytes() == before[name].tobytes()) == ("lora" not in name), name
    merged = without_adapters([stage], merged=True)[0].parameters
    for name in stage.buffers.merged:
        expected = merged[name].astype(arrays.dtype(dtype))
        layer, key = stage.buffers.merged[name][0], name.rpartition(".")[2]
        assert getattr(layer, key).tobytes() == expected.tobytes(), "layers compute with the adapters as they are now"
        assert expected.tobytes() != before[name].astype(arrays.dtype(dtype)).tobytes()


def test_at_the_start_the_model_is_the_plain_one():
    layers = GPT(**SIZES).build(Local())
    stage = nn.Stage(nn.LoRA(2, 4, LLAMA_TARGETS).apply(layers), "float32", seed=2)
    plain = nn.Stage(GPT(**SIZES).build(Local()), "float32", seed=2)
    assert stage.forward(IDS)[0].tobytes() == plain.forward(IDS)[0].tobytes()
    assert all(stage.parameters[name].any() == name.endswith("lora_A") for name in stage.gradients)


def test_a_loaded_model_goes_into_the_frozen_matrices():
    stage = stage_of(["q_proj"])
    (base,) = without_adapters([stage], merged=False)
    assert base.parameters["1.layer.1.qkv"] is stage.parameters["1.layer.1.qkv"]
    base.parameters["1.layer.1.qkv"][...] = 0
    base.sync_compute()
    a, b = (stage.parameters[f"1.layer.1.q_proj.lora_{part}"] for part in "AB")
    close(stage.layers[1].layer.layers[1].qkv[:8], 2.0 * b @ a, 6)
    assert without_adapters([other := nn.Stage([nn.Linear(2, 3)])], merged=True) == [other]


@pytest.mark.parametrize(
    "arguments, match",
    [
        ((0, 1.0, ["q_proj"]), "these are no adapters"), ((1, float("nan"), ["q_proj"]), "these are no adapters"),
        ((1, 1.0, ["q_proj", "query"]), r"projection of this name\n.*query\n.*gate_proj"),
        ((1, 1.0, ["q_proj", "c_attn"]), "same rows of a matrix"),
    ],
)  # fmt: skip
def test_wrong_adapters_are_refused(arguments, match):
    with pytest.raises(ArgumentError, match=match):
        nn.LoRA(*arguments).apply(GPT(**SIZES).build(Local()))
    layers = nn.LoRA(1, 1.0, ["q_proj"]).apply(GPT(**SIZES).build(Local()))
    with pytest.raises(ArgumentError, match="adapters already"):
        nn.LoRA(1, 1.0, ["v_proj"]).apply(layers)
