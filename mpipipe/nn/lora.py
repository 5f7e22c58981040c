"""Low-rank adapters: W + (alpha / rank) B A in place of W (Hu et al., "LoRA", 2021).

    parameters   W (outputs, inputs) frozen, A (rank, inputs), B (outputs, rank), zeros at first
    compute      W + (alpha / rank) B A, made anew after each step of the optimizer
    gradients    dB = (alpha / rank) dy^T (x A^T),   dA = (alpha / rank) (dy B)^T x

The sum is made once for all micro-batches, in the dtype of parameters, and rounded as a weight is.
That is as much work as `rank` rows of a batch; to take each row through A and B apart would double
it for every row and read x again. So forward and the gradient of the input are those of the layer
without adapters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array, Shape
from mpipipe.errors import ArgumentError
from mpipipe.nn.layers.layer import LORA_A, LORA_B, Adapter, Layer
from mpipipe.nn.parameters import Parameter, showing, zeros

if TYPE_CHECKING:
    from mpipipe.nn.stage import Stage

# Elements of a matrix that are summed at once on the host: they stay in a core's cache.
PIECE = 1 << 16


@dataclass(frozen=True)
class LoRA:
    """Which projections get adapters, and of what rank.

    Parameters
    ----------
    rank, alpha : int, float
        Rank of each adapter, at least 1; above 0, an adapter counts alpha / rank times.
    targets : sequence of str
        Names of projections: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj; or, for
        stacked queries, keys and values and a feed-forward layer without a gate, c_attn, c_proj,
        c_fc. `linear` is each `nn.Linear`.

    Examples
    --------
    >>> from mpipipe import attention, nn
    >>> from mpipipe.language.models import GPT
    >>> layers = GPT(dim=64, layers=1, heads=4).build(attention.Local())
    >>> stage = nn.Stage(nn.LoRA(rank=4, alpha=8, targets=["q_proj", "v_proj"]).apply(layers))
    >>> for name in stage.gradients:
    ...     print(name)
    1.layer.1.q_proj.lora_A
    1.layer.1.q_proj.lora_B
    1.layer.1.v_proj.lora_A
    1.layer.1.v_proj.lora_B
    """

    rank: int
    alpha: float
    targets: Sequence[str]

    def __post_init__(self) -> None:
        object.__setattr__(self, "targets", tuple(self.targets))
        if (
            type(self.rank) is not int
            or self.rank < 1
            or not (0 < self.alpha < math.inf)
            or not self.targets
        ):
            raise ArgumentError(
                "these are no adapters",
                found=f"rank {self.rank!r}, alpha {self.alpha!r}, targets {list(self.targets)}",
                expected="a rank of at least 1, a finite alpha above 0, and names of projections",
            )

    @property
    def scale(self) -> float:
        """Factor of B A."""
        return self.alpha / self.rank

    def apply(self, layers: Sequence[Layer]) -> list[Layer]:
        """Give adapters to layers that no stage has bound, and freeze all other parameters.

        Parameters
        ----------
        layers : sequence of Layer
            Of the whole model, or a part.

        Returns
        -------
        list of Layer
            The same layers.

        Raises
        ------
        ArgumentError
            No layer has a target, two targets have rows in common, or a layer has adapters or a
            stage.
        """
        inner = []
        known: set[str] = set()
        for top in layers:
            for _, layer in top.walk(""):
                inner.append(layer)
                known.update(layer.projections())
        unknown = sorted({*self.targets} - known)
        if unknown:
            raise ArgumentError(
                "no layer has a projection of this name",
                found=", ".join(unknown),
                expected=" or ".join(sorted(known)) or "layers with projections",
            )
        for layer in inner:
            self._adapt(layer)
        return list(layers)

    def _adapt(self, layer: Layer) -> None:
        if layer.stage is not None or layer.adapters:
            raise ArgumentError(
                f"{type(layer).__name__} has a stage or adapters already", remedy="build new layers"
            )
        declared = {}
        for key, parameter in layer.declared.items():
            declared[key] = replace(parameter, frozen=True)
        adapters: dict[str, list[Adapter]] = {}
        for target, (key, start, stop) in layer.projections().items():
            if target not in self.targets:
                continue
            several = adapters.setdefault(key, [])
            for other in several:
                if start < other.stop and other.start < stop:
                    raise ArgumentError(
                        "two targets are the same rows of a matrix",
                        found=f"{target} and {other.target}",
                    )
            several.append(Adapter(target, start, stop, self.scale))
            inputs = declared[key].shape[1]
            declared[f"{target}.{LORA_A}"] = Parameter((self.rank, inputs), _uniform)
            declared[f"{target}.{LORA_B}"] = Parameter((stop - start, self.rank), zeros)
        if declared:
            layer.declared = declared
        if adapters:
            layer.adapters = adapters


def _uniform(generator: np.random.Generator, shape: Shape) -> np.ndarray:
    """Draw as the library PEFT does: uniform in +- 1 / sqrt(inputs)."""
    bound = shape[1] ** -0.5
    return generator.uniform(-bound, bound, shape)


def is_adapter(name: str) -> bool:
    """Return whether a parameter is A or B of an adapter."""
    return name.endswith((f".{LORA_A}", f".{LORA_B}"))


def merge_into(stage: Stage, name: str, layer: Layer, target: Array) -> None:
    """Set the rows of `target` with adapters to W + (alpha / rank) B A, W called `name`.

    On the host this is done piece by piece, while a piece is in cache.
    """
    prefix, _, key = name.rpartition(".")
    parameters = stage.parameters
    kernels = stage.kernels
    for adapter in layer.adapters[key]:
        a = parameters[f"{prefix}.{adapter.target}.{LORA_A}"]
        b = parameters[f"{prefix}.{adapter.target}.{LORA_B}"]
        matrix = parameters[name][adapter.start : adapter.stop]
        out = target[adapter.start : adapter.stop]
        turned = arrays.copied(b.T)
        kernels.scale(turned, adapter.scale, turned)
        total = out
        if out.dtype != matrix.dtype:
            total = arrays.empty(matrix.shape, matrix.dtype, stage.device)
        if stage.device == "cuda":
            step = len(matrix)
        else:
            step = max(1, PIECE // matrix.shape[1])
        for start in range(0, len(matrix), step):
            piece = slice(start, start + step)
            kernels.copy(matrix[piece], total[piece])
            kernels.linear_backward_weight(turned[:, piece], a, total[piece])
        if total is not out:
            kernels.copy(total, out)


def merge(stage: Stage, anew: bool = False) -> None:
    """Renew the rows with adapters of a stage's matrices, or all rows `anew`."""
    for name, (layer, target) in stage.buffers.merged.items():
        if anew:
            stage.kernels.copy(stage.parameters[name], target)
        merge_into(stage, name, layer, target)


def without_adapters(stages: Iterable[Any], merged: bool) -> list[Any]:
    """Return stages with the parameters of the plain model, to load or, merged, to save.

    Matrices come with their adapters, as new arrays, where they are `merged`; else they are the
    frozen ones themselves.
    """
    plain = []
    for stage in stages:
        if not stage.buffers.merged:
            plain.append(stage)
            continue
        views = {}
        for name, array in stage.parameters.items():
            if not is_adapter(name):
                views[name] = array
        if merged:
            for name, (layer, _) in stage.buffers.merged.items():
                views[name] = arrays.copied(views[name])
                merge_into(stage, name, layer, views[name])
        loader = SimpleNamespace(
            parameters=showing(stage.parameters, views),
            before_write=stage.before_write,
            index=stage.index,
            sync_compute=stage.sync_compute,
        )
        plain.append(loader)
    return plain
