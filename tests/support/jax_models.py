"""A multi-layer perceptron in JAX, cut into stages, and the same on one process by jax.grad."""

import jax
import numpy as np
from jax import numpy as jnp

jax.config.update("jax_enable_x64", True)
WIDTH = 8


def layer(parameters, x):
    hidden = jnp.tanh(x @ parameters["up"]["weight"] + parameters["up"]["bias"])
    return x + hidden @ parameters["down"]


def parameters(stages, dtype="float64"):
    rng = np.random.default_rng(7)

    def one():
        up = {"weight": rng.normal(size=(WIDTH, 2 * WIDTH)), "bias": rng.normal(size=2 * WIDTH)}
        return {"up": up, "down": rng.normal(size=(2 * WIDTH, WIDTH)) / 4}

    return [jax.tree.map(lambda x: x.astype(dtype), one()) for _ in range(stages)]


def batch(rows=8):
    return np.random.default_rng(3).normal(size=(2, rows, WIDTH))


def squared_error(output, target):
    return jnp.mean((output - target) ** 2)


def reference(everything, x, target):
    """(loss, gradients of each stage, gradient of x) of the whole batch at once."""

    def loss(everything, x):
        for each in everything:
            x = layer(each, x)
        return squared_error(x, target)

    value, (gradients, dx) = jax.value_and_grad(loss, (0, 1))(everything, x)
    return float(value), gradients, np.asarray(dx)


def named(tree, prefix=""):
    """A tree of parameters as the stage names them."""
    return {f"{prefix}down": tree["down"], f"{prefix}up.bias": tree["up"]["bias"],
            f"{prefix}up.weight": tree["up"]["weight"]}  # fmt: skip
