"""A model of complex numbers with a skip past its middle, as stages in plain numpy, and the same by real numbers alone.

Every stage computes y = z w + c conj(z) Re(z), which is no analytic function. The first one gives z c and |z|^2 over
the skip "far", and the last adds conj(z c) |z|^2 to what it puts out. Gradients are dRe + i dIm.
"""

import numpy as np

from mpipipe import Branches, nn, schedules
from support import dense

SIZE = 3
CHUNKS = {1: 3, 2: 2, 4: 1}


def built(name, ranks):
    """A schedule of three or four stages with the skip, or None."""
    if ranks not in CHUNKS:
        return None
    made = schedules.by_name(name, ranks=ranks, chunks=CHUNKS[ranks], microbatches=3)
    return schedules.with_skips(made, {"far": (0, made.stages - 1)})


def drawn(shape, seed):
    return np.random.default_rng(seed).normal(size=(*shape, 2)) @ [1, 1j]


def values(number, dtype="complex128"):
    return {
        "w": (drawn((SIZE, SIZE), 10 + number) / 4).astype(dtype),
        "c": (drawn((SIZE,), 20 + number) / 4).astype(dtype),
    }


def batch(rows=7, dtype="complex128"):
    return (drawn((rows, SIZE), 1) / 2).astype(dtype), (drawn((rows, SIZE), 2) / 2).astype(dtype)


def places(stages):
    """(gives, takes) of each stage."""
    return [(("far",) * (n == 0), ("far",) * (n == stages - 1)) for n in range(stages)]


class Wave(dense.Halves):
    """One stage in numpy, gradients by hand: for y of z and conj(z), conj(dy/dz) g + dy/dconj(z) conj(g)."""

    def __init__(self, number, gives=(), takes=(), dtype="complex128"):
        own = values(number, dtype)
        shapes = {f"{number}.{name}": array.shape for name, array in own.items()}
        self.parameters, self.gradients = (nn.FlatBuffer(shapes, dtype) for _ in range(2))
        (self.w, self.c), (self.dw, self.dc) = self.parameters.values(), self.gradients.values()
        self.w[...], self.c[...] = own["w"], own["c"]
        self.gives, self.takes = gives, takes

    def forward(self, x):
        z, far = (x.main, x["far"]) if self.takes else (x, None)
        y = z @ self.w + self.c * z.conj() * z.real
        if self.takes:
            y = y + far[0].conj() * far[1]
        if self.gives:
            y = Branches(y, far=(z * self.c, abs(z) ** 2))
        return y, (z, far)

    def backward_input(self, dy, saved):
        (z, far), (g, dfar) = saved, (dy.main, dy["far"]) if self.gives else (dy, None)
        inner = self.c.conj() * g
        dz = g @ self.w.conj().T + z / 2 * inner + (z / 2 + z.conj()) * inner.conj()
        if self.gives:
            dz = dz + self.c.conj() * dfar[0] + 2 * z * dfar[1]
        if self.takes:
            dz = Branches(dz, far=(far[1] * g.conj(), (far[0] * g).real.copy()))
        return dz, (z, g, dfar)

    def backward_weight(self, pending):
        z, g, dfar = pending
        self.dw += z.conj().T @ g
        self.dc += (z * z.real * g).sum(0) + (0 if dfar is None else (z.conj() * dfar[0]).sum(0))


def squared(output, target):
    difference = output - target
    return float(np.mean(abs(difference) ** 2)), 2 * difference / difference.size


def reference(stages, x, target):
    """(loss, gradients of each stage, gradient of x): the chain rule by hand, all rows at once, on one process."""
    model, kept = [Wave(number, *place) for number, place in enumerate(places(stages))], []
    far = dfar = None
    for stage in model:
        y, saved = stage.forward(Branches(x, far=far) if stage.takes else x)
        kept.append(saved)
        x, far = (y.main, y["far"]) if stage.gives else (y, far)
    loss, dy = squared(x, target)
    for stage, saved in zip(model[::-1], kept[::-1]):
        dx = stage.backward(Branches(dy, far=dfar) if stage.gives else dy, saved)
        dy, dfar = (dx.main, dx["far"]) if stage.takes else (dx, dfar)
    return loss, [stage.gradients for stage in model], dy
