"""Complex numbers in stages of numpy, PyTorch and JAX, in each order and over a skip: one convention, dRe + i dIm."""

from itertools import permutations

import numpy as np
import pytest

torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
from jax import numpy as jnp  # noqa: E402
from support import complex_model, dense  # noqa: E402

from mpipipe import Pipeline, adapters, nn  # noqa: E402

jax.config.update("jax_enable_x64", True)
pytestmark = pytest.mark.judges
ENOUGH = 1e-12


def near(found, expected, what=""):
    np.testing.assert_allclose(found, expected, rtol=0, atol=ENOUGH, err_msg=what)


def of_pairs(array):
    """Complex numbers as they are, or of pairs of real ones, as they lie in the buffers of a stage."""
    return array if array.dtype.kind == "c" else array.view(f"c{2 * array.itemsize}")[..., 0]


class TorchWave(torch.nn.Module):
    def __init__(self, number, gives, takes, dtype):
        super().__init__()
        for name, array in complex_model.values(number, dtype).items():
            setattr(self, name, torch.nn.Parameter(torch.from_numpy(array)))
        self.gives, self.takes = gives, takes

    def forward(self, z, far=None):
        y = z @ self.w + self.c * z.conj() * z.real
        if self.takes:
            y = y + far[0].conj() * far[1]
        return (y, (z * self.c, abs(z) ** 2)) if self.gives else y


def torch_stage(number, gives=(), takes=(), dtype="complex128"):
    module = TorchWave(number, gives, takes, dtype)
    return adapters.torch_stage(module, prefix=f"{number}.", gives=gives, takes=takes)


def jax_stage(number, gives=(), takes=(), dtype="complex128"):
    def wave(parameters, z, far=None):
        y = z @ parameters["w"] + parameters["c"] * z.conj() * z.real
        if takes:
            y = y + far[0].conj() * far[1]
        return (y, (z * parameters["c"], jnp.real(z * z.conj()))) if gives else y

    return adapters.jax_stage(wave, complex_model.values(number, dtype), prefix=f"{number}.", gives=gives, takes=takes)


KINDS = {"numpy": complex_model.Wave, "torch": torch_stage, "jax": jax_stage}
LOSSES = {
    "numpy": nn.mean_squared_error,
    "torch": adapters.torch_loss(lambda y, t: (abs(y - t) ** 2).mean()),
    "jax": adapters.jax_loss(lambda y, t: jnp.mean(abs(y - t) ** 2)),
}


@pytest.mark.parametrize("order", [*permutations(KINDS)], ids="-".join)
def test_stages_of_all_three_are_one_process(comm, order):
    """In both kinds of schedules, with recomputation in one of them."""
    name = ("interleaved_1f1b", "interleaved_zero_bubble")[order < order[::-1]]
    schedule = complex_model.built(name, comm.size)
    if schedule is None:
        return
    data = complex_model.batch(6)  # of one shape: JAX compiles once
    loss, gradients, dx = complex_model.reference(schedule.stages, *data)
    ends = complex_model.places(schedule.stages)
    numbers = schedule.stages_of(comm.rank)
    stages = [KINDS[order[number % 3]](number, *ends[number]) for number in numbers]
    recompute = name == "interleaved_1f1b"
    with Pipeline(stages, schedule, comm, loss=LOSSES[order[0]], recompute=recompute) as pipeline:
        for _ in range(2):
            result = pipeline.step(*dense.placed(schedule, comm.rank, *data))
        near(pipeline.evaluate(*dense.placed(schedule, comm.rank, *data)), loss, "evaluation")
    near(result.loss, loss, "loss")
    if result.input_grads is not None:
        near(np.concatenate(result.input_grads), dx, "dx")
    for number, stage in zip(numbers, stages):
        for key, expected in gradients[number].items():
            near(of_pairs(stage.gradients[key]), expected, f"{order[number % 3]} {key}")


@pytest.mark.parametrize("kind", KINDS)
def test_single_precision_stays_single(kind):
    stage, plain = KINDS[kind](0, dtype="complex64"), complex_model.Wave(0)
    x, target = complex_model.batch()
    y, saved = stage.forward(x.astype("complex64"))
    expected, kept = plain.forward(x)
    dx = stage.backward(target.astype("complex64"), saved)
    pairs = [(y, expected), (dx, plain.backward(target, kept))]
    gradients = [(of_pairs(stage.gradients[name]), plain.gradients[name]) for name in plain.gradients]
    for found, wanted in [*pairs, *gradients]:
        assert found.dtype == np.complex64
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_what_pytorch_has_not_conjugated_yet_is():
    stage = adapters.torch_stage(Lazy())
    x = complex_model.drawn((2, 3), 0)
    y, saved = stage.forward(x)
    np.testing.assert_array_equal(y["conjugate"], x.conj())
    np.testing.assert_array_equal(y["minus"], -x.imag)
    dx = stage.backward({"conjugate": x, "minus": x.real.copy()}, saved)
    near(dx, x.conj() - 1j * x.real)


class Lazy(torch.nn.Module):
    def forward(self, x):
        return {"conjugate": x.conj(), "minus": x.conj().imag}
