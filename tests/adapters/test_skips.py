"""Skips of modules and functions, as trees of any structure, and random numbers of both libraries."""

import numpy as np
import pytest

torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")

from mpipipe import Branches, adapters  # noqa: E402
from mpipipe.errors import ArgumentError  # noqa: E402
from mpipipe.nn import Position  # noqa: E402

jax.config.update("jax_enable_x64", True)
pytestmark = pytest.mark.judges


class Of(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *given, **named):
        return self.function(*given, **named)


MAKE = {
    "torch": lambda function, **skips: adapters.torch_stage(Of(function), **skips),
    "jax": lambda function, **skips: adapters.jax_stage(
        lambda _, *given, **named: function(*given, **named), {}, **skips
    ),
}


def halves(stage, dy, saved):
    return stage.backward_input(dy, saved)[0]


@pytest.mark.parametrize(
    "backward", [lambda stage, dy, saved: stage.backward(dy, saved), halves], ids=["whole", "halves"]
)
@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
@pytest.mark.parametrize(
    "main", [lambda x: x, lambda x: (x, 2 * x), lambda x: {"b": x, "a": 2 * x}], ids=["x", "*x", "**x"]
)
def test_trees_of_any_structure_cross_a_stage(make, backward, main):
    """A stage that takes two skips and gives two, one of them with integers."""

    def function(*given, **named):
        one, two, *rest = given if named else given[-2:] + given[:-2]  # skips come after what is not named
        b, a = [named["b"], named["a"]] if named else rest if len(rest) > 1 else [rest[0], 0]
        y = b * 3 + a * 5 + one["u"] * 7 + two[0] * 11
        return {"y": y, "also": y * 13}, two[1] + 1, (one["u"] * 17,)

    stage = make(function, takes=("one", "two"), gives=("count", "more"))
    x, u, v, count = np.full(2, 2.0), np.full(2, 3.0), np.full(2, 5.0), np.arange(2)
    y, saved = stage.forward(Branches(main(x), two=(v, count), one={"u": u}))
    tree = main(x)
    sizes = [3, 5] if isinstance(tree, (tuple, dict)) else [3]
    expected = sum(n * k for n, k in zip((2, 4), sizes)) + 3 * 7 + 5 * 11
    np.testing.assert_array_equal(y.main["y"], expected)
    np.testing.assert_array_equal(y.main["also"], expected * 13)
    np.testing.assert_array_equal(y["count"], count + 1)
    np.testing.assert_array_equal(y["more"][0], u * 17)
    one = np.ones(2)
    dx = backward(stage, Branches({"also": one, "y": one}, count=None, more=(one,)), saved)
    leaves = dx.main if isinstance(tree, tuple) else dx.main.values() if isinstance(tree, dict) else [dx.main]
    for leaf, factor in zip(leaves, sizes):
        np.testing.assert_array_equal(leaf, 14 * factor)
    np.testing.assert_array_equal(dx["one"]["u"], 14 * 7 + 17)
    np.testing.assert_array_equal(dx["two"][0], 14 * 11)
    assert dx["two"][1] is None


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_wrong_skips_are_refused(make):
    with pytest.raises(ArgumentError, match="gives") as caught:
        make(lambda x: x, gives="far")
    assert "'far'" in str(caught.value) and '("far",)' in str(caught.value)
    with pytest.raises(ArgumentError, match="gives over skips") as caught:
        make(lambda x: (x, x), gives=("far", "wide")).forward(np.ones(2))
    assert "tuple of 3: (y, far, wide)" in str(caught.value)
    for skips, takes in (({}, ("far",)), ({"far": np.ones(2)}, ()), ({"far": np.ones(2)}, ("wide",))):
        with pytest.raises(ArgumentError, match=r"other names than it is handed|names that no layer takes"):
            make(lambda x, *_: x, takes=takes).forward(Branches(np.ones(2), **skips) if skips else np.ones(2))


def dropped(_parameters, x, key, training):
    return x * jax.random.bernoulli(key, 0.5, x.shape) if training else x


DRAWING = {
    "torch": lambda **options: adapters.torch_stage(torch.nn.Dropout(0.5), **options),
    "jax": lambda **options: adapters.jax_stage(dropped, {}, **options),
}


@pytest.mark.parametrize("make", DRAWING.values(), ids=DRAWING)
def test_what_is_drawn_depends_on_the_place_and_comes_again_when_a_forward_is_made_anew(make):
    def mask(stage, **place):
        return stage.forward(np.ones((4, 64)), Position(**place))[0]

    stage = make()
    stage.index = 0
    first = mask(stage)
    np.testing.assert_array_equal(mask(stage), first)
    others = [mask(stage, step=1), mask(stage, microbatch=1), mask(stage, replica=1)]
    stage.index = 1
    for number, other in enumerate([*others, mask(stage), mask(make(seed=1))]):
        assert not np.array_equal(other, first), number
    np.testing.assert_array_equal(mask(stage, training=False), 1)
