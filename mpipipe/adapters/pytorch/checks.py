"""Modules that cannot be a stage, and what a module must not do in its forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from mpipipe.adapters.pytorch.arrays import Tensor
from mpipipe.errors import ArgumentError

COMPILED = "OptimizedModule"  # what torch.compile makes
# why a module is refused
BATCH = "the statistics of a micro-batch are not those of the batch, so results would depend on how it is cut"
RUNNING = "running statistics would count a forward twice under recompute, and replicas would drift apart"


def check_module(module: Any) -> None:
    """Raise ArgumentError for what is no module, and for modules that count in their forward."""
    if not isinstance(module, torch.nn.Module):
        raise ArgumentError("torch_stage", found=type(module).__name__, expected="a torch.nn.Module")
    for name, each in module.named_modules():
        over_batch = isinstance(each, torch.nn.modules.batchnorm._BatchNorm)
        running = isinstance(each, torch.nn.modules.batchnorm._NormBase) and each.track_running_stats
        why = [BATCH] * over_batch + [RUNNING] * running
        if why:
            raise ArgumentError(
                f"a module with {'batch normalisation' if over_batch else 'running statistics'} cannot be a stage",
                found=f"{type(each).__name__} {name}".rstrip(),
                expected=f"normalisation within a sample, without running statistics: {'; '.join(why)}",
                remedy="torch.nn.GroupNorm or LayerNorm; or fold statistics that are fixed into the weights"
                if over_batch
                else "track_running_stats=False",
            )


def modules_for_hooks(module: Any) -> Iterator[Any]:
    """Yield the modules within that have parameters and can have hooks.

    TorchScript takes none, and a graph of torch.compile would break at each.
    """
    if isinstance(module, torch.jit.ScriptModule) or type(module).__name__ == COMPILED:
        return
    if any(True for _ in module.parameters(recurse=False)):
        yield module
    for each in module.children():
        yield from modules_for_hooks(each)


class Buffers:
    """The buffers of a module, which its forward must leave as they are.

    A forward runs once for each micro-batch, again under `recompute`, and in an evaluation. What it counts would depend
    on that, and differ between replicas.
    """

    def __init__(self, module: Any):
        self._places = [
            (f"{prefix}.{key}".lstrip("."), owner, key)
            for prefix, owner in module.named_modules()
            for key, buffer in owner._buffers.items()
            if buffer is not None
        ]

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Raise ArgumentError if a buffer was written to within, or replaced by one of the same shape."""
        before = [(owner._buffers.get(key), _version(owner._buffers.get(key))) for _, owner, key in self._places]
        yield
        for (name, owner, key), (old, version) in zip(self._places, before):
            now = owner._buffers.get(key)
            if now is old:
                changed = _version(now) != version
            else:  # a table that was made anew with other values; one that has grown is no count
                alike = now is not None and old is not None and (now.shape, now.dtype) == (old.shape, old.dtype)
                changed = alike and not torch.equal(now, old)
            if changed:
                raise ArgumentError(
                    f"the forward of a module changes its buffer {name}",
                    expected="a forward that changes nothing: it runs for each micro-batch, and again under recompute",
                    remedy="keep counts outside of the module, or return them as outputs",
                )


def _version(tensor: Tensor | None) -> int:
    return 0 if tensor is None else int(tensor._version)


@contextmanager
def inputs_unchanged(inputs: Sequence[Tensor], who: str = "a module", what: str = "its input") -> Iterator[None]:
    """Raise ArgumentError if one of the tensors is written to within: PyTorch knows no tensors that are read only."""
    versions = [_version(each) for each in inputs]
    try:
        yield
    except RuntimeError as error:
        if "in-place operation" in str(error) and "leaf" in str(error):
            raise _written(who, what) from error
        raise
    if versions != [_version(each) for each in inputs]:
        raise _written(who, what)


def _written(who: str, what: str) -> ArgumentError:
    return ArgumentError(
        f"{who} writes to {what} in place",
        expected="arrays that stay as they are: the memory belongs to another stage, or to you",
        remedy="inplace=False in the first layer, x = x + 1 in place of x += 1, or x = x.clone() first",
    )
