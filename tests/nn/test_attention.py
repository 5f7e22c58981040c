"""SelfAttention against a dense float64 reference with rotations as products of complex numbers."""

import numpy as np
import pytest
from support import reference_attention
from support.gradcheck import check_stage
from support.tolerance import close, largest

from mpipipe import attention, nn
from mpipipe.attention import Ring
from mpipipe.errors import ArgumentError
from mpipipe.job import inprocess

RANDOM = np.random.default_rng(6)


def turned(x, positions, base):
    """x (batch, seq, heads, dim): pairs of neighbours as complex numbers; each axis of positions turns its block."""
    positions = np.reshape(positions, (x.shape[1], -1))
    width = x.shape[3] // positions.shape[1]
    frequencies = base ** (-np.arange(0, width, 2) / width)
    angles = np.concatenate([axis[:, None] * frequencies for axis in positions.T], 1)
    pairs = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)[:, None]
    return np.stack([pairs.real, pairs.imag], -1).reshape(x.shape)


def dense(x, parameters, heads, kv_heads, positions, base, causal):
    qkv = (x @ parameters["0.qkv"].T).reshape(*x.shape[:2], heads + 2 * kv_heads, -1)
    q, k, v = np.split(qkv, [heads, heads + kv_heads], 2)
    q, k = turned(q, positions, base), turned(k, positions, base)
    out = reference_attention.dense(q, k, v, np.zeros_like(q), causal)[0]
    return out.reshape(x.shape) @ parameters["0.out"].T


def cost(x, y, farthest):
    """(operations, size of terms) of self-attention: three products, the sum over positions, and the angles.

    An angle errs by its own size. The error of a score, a product of two activations, is a relative one of a weight.
    """
    return 3 * x.shape[-1] + x.shape[1], farthest * largest(x) ** 2 * largest(y)


@pytest.mark.parametrize("heads, kv_heads", [(4, None), (4, 2), (4, 1), (1, 1)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("positions", [None, [3, 0, 9, 4, 100]])
def test_self_attention_is_its_definition(heads, kv_heads, causal, positions):
    layer = nn.SelfAttention(16, heads, kv_heads, attention.Local(causal), positions, rope_base=500.0)
    stage = nn.Stage([layer], dtype="float64")
    x = RANDOM.standard_normal((2, 5, 16))
    expected = dense(x, stage.parameters, heads, kv_heads or heads, positions or range(5), 500.0, causal)
    close(stage.forward(x)[0], expected, *cost(x, expected, 1))


# -- Positions of several axes ----------------------------------------------------------------------------------------


def grid(rows=3, columns=5):
    """The latitudes and longitudes of the patches of a sphere, row after row."""
    return np.stack(np.meshgrid(90 - 25.5 * np.arange(rows), 72.0 * np.arange(columns), indexing="ij"), -1).reshape(
        -1, 2
    )


@pytest.mark.parametrize("coordinates", [grid(), grid()[:, :1], np.concatenate([grid() // 7, grid()], 1)], ids=np.shape)
@pytest.mark.parametrize("causal", [True, False])
def test_each_axis_of_coordinates_turns_its_block_of_a_head(coordinates, causal):
    layer = nn.SelfAttention(32, 4, 2, attention.Local(causal), rope_base=500.0, coordinates=coordinates)
    x = RANDOM.standard_normal((2, 15, 32))
    stage = nn.Stage([layer], dtype="float64")
    expected = dense(x, stage.parameters, 4, 2, coordinates, 500.0, causal)
    close(stage.forward(x)[0], expected, *cost(x, expected, np.abs(coordinates).max()))


@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("ranks, of", [(1, Ring), (2, Ring), (4, attention.Ulysses)])
def test_each_rank_takes_the_coordinates_of_its_own_rows(kind, ranks, of):
    x, dy = RANDOM.standard_normal((2, 2, 15, 32))
    layout = attention.Layout(kind, ranks, 15)

    def run(attend, x, dy):
        stage = nn.Stage([nn.SelfAttention(32, 4, attend=attend, coordinates=grid())], "float64", seed=3)
        y, saved = stage.forward(x)
        return y, stage.backward(dy, saved), stage.gradients.flat, stage

    def on_each_rank(comm):
        return run(of(comm, False, layout), layout.shard(x, comm.rank), layout.shard(dy, comm.rank))

    ys, dxs, gradients, stages = zip(*inprocess.run(ranks, on_each_rank))
    expected = dense(x, stages[0].parameters, 4, 4, grid(), 10000.0, False)
    close(layout.unshard(ys), expected, *cost(x, expected, 300))
    one = run(attention.Local(False), x, dy)
    for found, right in zip((layout.unshard(ys), layout.unshard(dxs), sum(gradients)), one):
        np.testing.assert_allclose(found, right, rtol=0, atol=1e-12 * largest(right))


@pytest.mark.parametrize(
    "coordinates, options, match",
    [
        (np.zeros(4), {}, r"\(seq, axes\)"),
        (np.zeros((4, 2), complex), {}, "complex"),
        ([[0.0, np.nan]] * 4, {}, "NaN"),
        (np.zeros((4, 3)), {}, r"\[4, 3\]\n.*4 pairs of head_dim=8"),
        (np.zeros((4, 0)), {}, r"\[4, 0\]"),
        (np.zeros((4, 2)), dict(rope_base=None), "rope_base"),
    ],
)
def test_coordinates_that_do_not_fit_are_refused(coordinates, options, match):
    with pytest.raises(ArgumentError, match=match):
        nn.SelfAttention(16, 2, attend=attention.Local(), coordinates=coordinates, **options)


def test_a_sequence_that_is_not_that_of_the_coordinates_is_refused_on_all_ranks():
    wrong = (3, None), (5, None), (4, [0, 1, 2, 4]), (4, [-1, 0, 1, 2])
    for length, positions in wrong:
        layer = nn.SelfAttention(16, 2, attend=attention.Local(), positions=positions, coordinates=np.zeros((4, 2)))
        with pytest.raises(ArgumentError, match="4 positions, a row of coordinates for each"):
            nn.Stage([layer]).forward(np.zeros((1, length, 16), np.float32))

    def on_each_rank(comm):
        ring = Ring(comm, layout=attention.Layout("zigzag", 2, 9))
        with pytest.raises(ArgumentError, match=r"\(9, axes\)"):
            nn.SelfAttention(16, 2, attend=ring, coordinates=np.zeros((8, 2)))

    inprocess.run(2, on_each_rank)


OPTIONS = {
    "none": {},
    "width of a head": dict(head_dim=6),
    "biases": dict(qkv_bias=True, out_bias=True),
    "norms of heads": dict(qk_norm=True, eps=0.1),
    "norms of heads that are not turned": dict(qk_norm=True, rope_base=None, head_dim=3),
    "all of them": dict(head_dim=6, qkv_bias=True, out_bias=True, qk_norm=True, rope_scaling=nn.YarnScaling(4.0, 64)),
}


def stirred(layer):
    """A stage of this layer alone, with biases and gains away from their neutral elements."""
    stage = nn.Stage([layer], dtype="float64")
    for name, array in stage.parameters.items():
        if array.ndim == 1:
            array += np.random.default_rng(len(name)).standard_normal(array.shape) * 0.3
    return stage


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_with_options_agree_with_finite_differences(name):
    attend = attention.Local(window=2 if name == "all of them" else None)
    layer = nn.SelfAttention(8, 4, 2, attend, **OPTIONS[name])
    check_stage(stirred(layer), RANDOM.standard_normal((2, 3, 8)))


def test_without_a_base_nothing_is_turned():
    x = RANDOM.standard_normal((1, 4, 8))
    stage = nn.Stage([nn.SelfAttention(8, 2, attend=attention.Local(causal=False), rope_base=None)], dtype="float64")
    y = stage.forward(x)[0]
    close(stage.forward(x[:, ::-1])[0], y[:, ::-1], *cost(x, y, 1))  # positions play no part


def test_gains_begin_as_ones_and_biases_as_zeros_without_decay():
    stage = nn.Stage([nn.SelfAttention(8, 4, 2, attention.Local(), **OPTIONS["all of them"])])
    shapes = {name: array.shape for name, array in stage.parameters.items()}
    assert shapes == {
        "0.qkv": (48, 8), "0.out": (8, 24), "0.qkv_bias": (48,), "0.out_bias": (8,), "0.q_norm": (6,), "0.k_norm": (6,),
    }  # fmt: skip
    for name, value in (("qkv_bias", 0), ("out_bias", 0), ("q_norm", 1), ("k_norm", 1)):
        assert (stage.parameters[f"0.{name}"] == value).all()
    assert [decays for *_, decays in stage.decay_ranges] == [True, False]


def test_positions_have_gradients_and_a_wrong_shape_is_named():
    stage = nn.Stage([nn.SelfAttention(8, 2, attend=attention.Local(), positions=[5, 2, 7])], dtype="float64")
    check_stage(stage, RANDOM.standard_normal((2, 3, 8)))
    for shape in [(2, 3, 7), (3, 8), (2, 4, 8)]:
        with pytest.raises(ArgumentError, match="layer 0"):
            stage.forward(np.zeros(shape))


@pytest.mark.parametrize(
    "arguments, options",
    [((9, 2), {}), ((6, 2), {}), ((8, 4, 3), {}), ((8, 0), {}), ((8, 2), dict(head_dim=5)), ((8, 2), dict(head_dim=0))],
)
def test_impossible_heads_are_refused(arguments, options):
    with pytest.raises(ArgumentError, match="head"):
        nn.SelfAttention(*arguments, attend=attention.Local(), **options)
    with pytest.raises(ArgumentError, match="attend"):
        nn.SelfAttention(8, 2)
