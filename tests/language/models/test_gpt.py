"""The GPT with every option against a model in plain numpy, alone and over ranks, and what does not go together."""

from itertools import pairwise

import numpy as np
import pytest
from support import dense, reference_gpt
from support.tolerance import close, largest
from support.training_tolerance import path

from mpipipe import Pipeline, arrays, nn, schedules
from mpipipe.attention import KVCache, Layout, Local, Ring
from mpipipe.errors import ArgumentError
from mpipipe.job import inprocess
from mpipipe.language.models import GPT

SIZES = dict(vocab=11, dim=16, layers=2, heads=4, hidden=24, seq_len=8)
LLAMA3 = nn.Llama3Scaling(8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_positions=16)
YARN = nn.YarnScaling(4.0, original_positions=64, beta_fast=8.0)
OPTIONS = {
    "GPT-2": dict(
        norm="layer", eps=1e-5, positions="learned", max_positions=10, qkv_bias=True, out_bias=True,
        feed_forward="gelu", feed_forward_bias=True, tied=True,
    ),
    "Llama 3": dict(kv_heads=2, eps=1e-5, rope_base=5e5, rope_scaling=LLAMA3),
    "Mistral": dict(kv_heads=1, windows=(3, 3), rope_scaling=nn.LinearScaling(2.0)),
    "Qwen 2": dict(kv_heads=2, qkv_bias=True, windows=(None, 3), rope_base=1e4, rope_scaling=YARN, tied=True),
    "Qwen 3": dict(kv_heads=2, head_dim=6, qk_norm=True),
    "norms of learned positions": dict(positions="learned", qk_norm=True, eps=0.1, head_dim=3),
    "all of SwiGLU": dict(feed_forward_bias=True, out_bias=True, embedding_scale=4.0),
    "one key head": dict(kv_heads=1, rope_base=50.0, layers=1),
    "GELU without biases": dict(feed_forward="gelu", norm="layer", eps=0.01, embedding_scale=-0.5, tied=True),
}  # fmt: skip


def model_of(name, **sizes):
    return GPT(**{**SIZES, **OPTIONS[name], **sizes})


def stir(stages):
    """Move gains and biases away from their neutral elements, each by its name."""
    for stage in stages:
        for name, array in stage.parameters.items():
            if array.ndim == 1:
                values = arrays.download(array) + np.random.default_rng([*name.encode()]).normal(0, 0.3, array.shape)
                arrays.copy_into(array, values if stage.device == "cpu" else arrays.upload(values))
        stage.refresh()


def whole(model, attend=None, positions=None, **options):
    """All layers as one stage, in float64 if the options of nn.Stage do not say otherwise."""
    stage = nn.Stage(model.build(attend or Local(), positions), **{"dtype": "float64", **options})
    stir([stage])
    return stage


def text(model, rows=3, seed=0):
    """(tokens, targets) for the model."""
    ids = np.random.default_rng(seed).integers(0, model.vocab, (rows, model.seq_len + 1))
    return np.ascontiguousarray(ids[:, :-1]), np.ascontiguousarray(ids[:, 1:])


@pytest.mark.parametrize("name", OPTIONS)
def test_loss_and_gradients_equal_those_of_an_independent_model(name):
    model = model_of(name)
    stage, (tokens, targets) = whole(model), text(model)
    logits, saved = stage.forward(tokens)
    value, gradient = nn.softmax_cross_entropy(logits, targets)
    stage.backward(gradient, saved)
    operations = path(model, tokens.size)
    expected = reference_gpt.forward(stage.parameters, model, tokens)
    close(logits, expected, operations, largest(expected))
    once = {tied[-1] for tied in stage.ties.values()}
    assert model.parameters == sum(array.size for key, array in stage.parameters.items() if key not in once)
    close(value, reference_gpt.loss(stage.parameters, model, tokens, targets), operations)
    parameters = dict(stage.parameters)
    if model.tied:
        first, head = stage.ties["tokens"]
        stage.gradients[first][...] += stage.gradients[head]  # one matrix in two places
    for key, array in parameters.items():
        if model.tied and key == head:
            continue
        direction = {key: np.random.default_rng(2).standard_normal(array.shape)}
        if model.tied and key == first:
            direction[head] = direction[first]
        slope = reference_gpt.derivative(parameters, model, tokens, targets, direction)
        products = stage.gradients[key] * direction[key]
        assert np.abs(stage.gradients[key]).max() > 1e-6, key  # far beyond rounding
        close(products.sum(), slope, operations, np.abs(products).sum(), what=key)


def through_pipeline(comm, name, schedule, recompute):
    """{name: gradient} of this rank, and the loss."""
    model = model_of(name)
    layers, cuts = model.build(Local()), schedules.partition(model.costs(), schedule.stages)
    mine = [cuts[number] for number in schedule.stages_of(comm.rank)]
    stages = [nn.Stage(layers[a:b], dtype="float64", first=a) for a, b in mine]
    stir(stages)
    for stage in stages:
        for gradient in stage.gradients.values():
            gradient.fill(np.nan)  # the first part of a step replaces what is there
    with Pipeline(stages, schedule, comm, loss=nn.softmax_cross_entropy, recompute=recompute) as pipeline:
        loss = pipeline.step(*dense.placed(schedule, comm.rank, *text(model, 4))).loss
    return {key: stage.gradients[key].copy() for stage in stages for key in stage.gradients}, loss


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_pipeline_that_splits_the_backward_gives_the_same_bits(name, recompute):
    alone, loss = inprocess.run(1, lambda comm: through_pipeline(comm, name, schedules.gpipe(1, 4), False))[0]
    split = schedules.zero_bubble_h1(2, 4)
    parts = inprocess.run(2, lambda comm: through_pipeline(comm, name, split, recompute))
    found = {key: gradient for gradients, _ in parts for key, gradient in gradients.items()}
    assert {loss} == {other for _, other in parts}
    assert {key: x.tobytes() for key, x in found.items()} == {key: x.tobytes() for key, x in alone.items()}
    model = model_of(name)
    stage, (tokens, targets) = whole(model), text(model, 4)
    logits, saved = stage.forward(tokens)
    stage.backward(nn.softmax_cross_entropy(logits, targets)[1], saved)
    expected = dict(stage.gradients)
    for tied in stage.ties.values():
        expected |= dict.fromkeys(tied, sum(expected[key] for key in tied))
    for key, gradient in alone.items():
        close(gradient, expected[key], path(model, tokens.size), largest(gradient), what=key)


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_on_the_device_are_those_of_the_host(gpu, name):
    model = model_of(name)
    host, device = (whole(model, device=where) for where in ("cpu", "cuda"))
    tokens, targets = text(model)
    for stage in (host, device):
        gpu.reset()
        logits, saved = stage.forward(tokens)
        stage.backward(nn.softmax_cross_entropy(logits, targets)[1], saved)
        assert gpu.synchronisations == []
    for key, expected in host.gradients.items():
        close(arrays.download(device.gradients[key]), expected, path(model, tokens.size), largest(expected), what=key)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_ring_of_two_gives_the_whole_sequence(name):
    model = model_of(name)
    tokens, _ = text(model)
    stage, cut = whole(model), Layout("zigzag", 2, model.seq_len)
    logits, saved = stage.forward(tokens)
    dy = np.random.default_rng(3).standard_normal(logits.shape)
    stage.backward(dy, saved)

    def on_each_rank(comm):
        ring = Ring(comm, layout="zigzag")
        part = whole(model, ring, cut.positions(comm.rank))
        y, kept = part.forward(cut.shard(tokens, comm.rank))
        part.backward(cut.shard(dy, comm.rank), kept)
        return y, part.gradients.flat

    outputs, gradients = zip(*inprocess.run(2, on_each_rank))
    close(cut.unshard(outputs), logits, path(model), largest(logits))
    close(sum(gradients), stage.gradients.flat, path(model, tokens.size), largest(stage.gradients.flat))


@pytest.mark.parametrize("name", OPTIONS)
def test_decoding_with_caches_equals_the_forward(name):
    """A prompt, then one token after the other."""
    model = model_of(name)
    tokens, _ = text(model)
    expected, _ = whole(model).forward(tokens)

    stage = whole(model, lambda window=None: KVCache(model.seq_len, window=window))
    cuts = [0, 3, 4, 5, model.seq_len]
    found = np.concatenate([stage.forward(tokens[:, a:b])[0] for a, b in pairwise(cuts)], axis=1)
    close(found, expected, path(model), largest(expected))


def test_a_position_beyond_the_learned_table_is_named():
    model = model_of("GPT-2")
    stage = whole(model, lambda: KVCache(20))
    stage.forward(text(model)[0])
    with pytest.raises(ArgumentError, match=r"layer 0\.1 .*no row") as caught:
        stage.forward(text(model)[0][:, :3])
    assert caught.value.found == "positions 8 ... 10" and caught.value.expected == "0 ... 9"
    stage.forward(text(model)[0][:, :2])  # those that fit, as if nothing had been


def test_an_object_without_windows_is_refused_where_layers_have_them():
    class Bare:
        forward = backward = Local().forward

    for attend in (Bare(), KVCache(8)):
        with pytest.raises(ArgumentError, match="window for each layer") as caught:
            GPT(**SIZES, windows=(None, 3)).build(attend)
        assert "lambda window=None" in caught.value.remedy


def test_sizes_and_costs_follow_the_description():
    assert (GPT(dim=96, heads=4).hidden, GPT(dim=384, heads=4).hidden) == (256, 1024)
    model = GPT(vocab=256, dim=32, layers=3, heads=4, kv_heads=2, hidden=64, seq_len=100)
    attention = 2 * 32 * (32 + 16 + 16 + 32) + 4 * 100 * 32 / 2
    assert model.costs() == [32, *[attention, 2 * 3 * 32 * 64] * 3, 2 * 32 * 256]
    assert len(model.build(Local())) == len(model.costs())
    sizes = dict(vocab=256, dim=32, layers=2, heads=4, kv_heads=2, hidden=64, seq_len=100)
    products = 2 * 32 * (4 * 12 + 2 * 2 * 12 + 4 * 12)
    wide = GPT(**sizes, head_dim=12, feed_forward="gelu", windows=(60, None)).costs()
    seen = sum(min(position + 1, 60) for position in range(100)) / 100  # half a key more than a causal row counts
    assert wide[1] - products == pytest.approx(4 * (4 * 12) * seen, rel=0.02)
    assert wide[2] == wide[4] == 2 * 2 * 32 * 64
    assert wide[3] == products + 4 * (4 * 12) * 100 / 2
    assert GPT(**sizes, windows=(100, 1000)).costs() == GPT(**sizes).costs()
    assert GPT(**sizes, positions="learned").costs()[0] == 64


@pytest.mark.parametrize(
    "options, match",
    [
        ({"dim": 0}, "dim"),
        ({"seq_len": 1.5}, "seq_len"),
        ({"heads": 16}, "heads"),
        ({"kv_heads": 3}, "kv_heads"),
        ({"norm": "batch"}, "norm"),
        ({"eps": -1e-6}, "eps"),
        ({"qkv_bias": "no"}, "qkv_bias"),
        ({"positions": "alibi"}, "positions"),
        ({"positions": "learned", "max_positions": 7}, "max_positions"),
        ({"positions": "learned", "rope_scaling": LLAMA3}, "rope_scaling"),
        ({"max_positions": 8}, "max_positions"),
        ({"rope_scaling": "llama3"}, "rope_scaling"),
        ({"rope_scaling": {"kind": "linear", "factors": 2.0}}, "factors"),
        ({"rope_scaling": {"kind": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_base": 1}, "rope_base"),
        ({"head_dim": 5}, "head_dim"),
        ({"heads": 3}, "2 x heads(.|\\n)*for example dim ="),
        ({"heads": 3, "positions": "learned"}, "multiple of heads(.|\\n)*for example dim ="),
        ({"windows": (3, 0)}, "windows"),
        ({"windows": 3}, "windows"),
        ({"feed_forward": "relu"}, "feed_forward"),
        ({"embedding_scale": float("nan")}, "embedding_scale"),
    ],
)
def test_options_that_make_no_sense_are_refused_by_name(options, match):
    with pytest.raises(ArgumentError, match=match) as caught:
        GPT(**SIZES | options).build(Local())
    assert caught.value.expected or caught.value.found


def test_the_last_matrix_of_each_branch_starts_smaller_the_more_branches_there_are():
    stage = nn.Stage(GPT(seq_len=8, dim=64, layers=6, heads=4).build(Local()))
    for name, matrix in stage.parameters.items():
        if matrix.ndim == 2:
            gain = 12**-0.5 if name.endswith((".out", ".down")) else 1.0
            # the standard deviation of n normal numbers is right to 1 / sqrt(2 n), five times of that and more here
            assert matrix.std() * matrix.shape[1] ** 0.5 == pytest.approx(gain, rel=0.06), name
