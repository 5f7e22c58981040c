"""Functions of JAX as stages: gradients are those of jax.grad, memory is shared, and traps are refused."""

import numpy as np
import pytest

jax = pytest.importorskip("jax")
from jax import numpy as jnp  # noqa: E402

from mpipipe import Pipeline, adapters, schedules  # noqa: E402
from mpipipe.errors import ArgumentError  # noqa: E402
from mpipipe.job import inprocess  # noqa: E402
from mpipipe.nn import Position  # noqa: E402

pytestmark = pytest.mark.judges
jax.config.update("jax_enable_x64", True)


def test_parameters_and_results_are_one_memory():
    tree = {"up": {"weight": np.ones((3, 3)), "bias": np.ones(3)}, "down": np.ones((3, 3))}
    stage = adapters.jax_stage(lambda p, x: (x @ p["up"]["weight"] + p["up"]["bias"]) @ p["down"], tree)
    for value, own in zip(stage.layer._values.values(), stage.parameters.values()):
        assert value.unsafe_buffer_pointer() == own.ctypes.data
    assert np.shares_memory(stage.tree["up"]["bias"], stage.parameters.flat)
    y, _ = stage.forward(np.ones((2, 3)))
    assert not y.flags.writeable and y.flags.c_contiguous


def test_where_jax_takes_no_memory_of_others_it_is_told_of_each_step(monkeypatch):
    """XLA may refuse to share memory; then a call begins with the parameters as they are."""
    monkeypatch.setattr("mpipipe.adapters.jax.layer.put", lambda array: jnp.array(array, copy=True))
    stage = adapters.jax_stage(lambda p, x: x * p, np.ones(3))
    x = np.ones((2, 3))

    def job(comm):
        square = adapters.jax_loss(lambda y, t: jnp.mean((y - t) ** 2))
        with Pipeline([stage], schedules.gpipe(1, 2), comm, loss=square) as pipe:
            losses = []
            for _ in range(3):
                losses.append(pipe.step(x, np.zeros((2, 3))).loss)
                stage.parameters.flat[:3] /= 2
            return losses

    assert inprocess.run(1, job) == [[1.0, 0.25, 0.0625]]


def test_a_function_is_compiled_once_for_each_shape():
    traced = []

    def function(parameters, x):
        traced.append(x.shape)
        return x * parameters["gain"]

    stage = adapters.jax_stage(function, {"gain": np.ones(3)})
    for rows in (2, 2, 4, 2, 4):
        for position in (Position(), Position(training=False)):
            y, saved = stage.forward(np.ones((rows, 3)), position)
        for _ in range(2):  # the halves of the backward are compiled once, too
            y, saved = stage.forward(np.ones((rows, 3)), Position())
            stage.backward(y, saved)
            _, pending = stage.backward_input(y, saved)
            stage.backward_weight(pending)
    assert sorted(traced) == [(2, 3)] * 2 + [(4, 3)] * 2  # for training and for evaluation


def test_64_bits_are_refused_where_jax_would_make_32_of_them_and_parameters_of_several_dtypes():
    for parameters in ({"a": np.ones(2), "b": np.ones(2, np.float32)}, {"a": np.ones(2, int)}):
        with pytest.raises(ArgumentError, match="one dtype"):
            adapters.jax_stage(lambda p, x: x, parameters)
    stage = adapters.jax_stage(lambda p, x: x * p, np.ones(3, np.float32))
    pairs = adapters.jax_stage(lambda p, x: x * p, np.ones(3, np.complex64))
    wide = (lambda: adapters.jax_stage(stage.function, np.ones(3)), lambda: stage.forward(np.ones((2, 3))),
            lambda: pairs.forward(np.ones((2, 3), np.complex128)))  # fmt: skip
    jax.config.update("jax_enable_x64", False)
    try:
        assert pairs.forward(np.ones((2, 3), np.complex64))[0].dtype == np.complex64
        for call in wide:
            with pytest.raises(ArgumentError, match="64-bit numbers switched off") as caught:
                call()
            assert "jax_enable_x64" in caught.value.remedy
    finally:
        jax.config.update("jax_enable_x64", True)
