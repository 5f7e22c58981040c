"""Attention of this package as a module of PyTorch: exact over the ranks of a ring.

Everything happens in the thread that calls `backward`: PyTorch computes the gradients of tensors on
the host there. The ranks of a ring go backward in one order, since autograd takes the latest node
first, and the ring compares them.
"""

from __future__ import annotations

from typing import Any

import torch

from mpipipe.adapters.pytorch.tensors import Tensor, on_stream
from mpipipe.arrays import array_of, tensor_of
from mpipipe.errors import ArgumentError
from mpipipe.nn import ForwardAndBackward, as_attend


class TorchAttend(torch.nn.Module):
    """See `mpipipe.adapters.torch_attend`. Copies of a module have the same `attend`."""

    def __init__(self, attend: ForwardAndBackward):
        if not isinstance(attend, ForwardAndBackward):
            raise ArgumentError(
                "torch_attend",
                found=type(attend).__name__,
                expected="an object that attends, such as attention.Local() or "
                "attention.Ring(comm)",
            )
        super().__init__()
        self.attend = as_attend(attend)

    def __deepcopy__(self, _memo: dict) -> TorchAttend:
        return TorchAttend(self.attend)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            raise ArgumentError(
                "attention of mpipipe within torch.compile",
                remedy="compile the parts before and after it; or torch.compiler.disable the "
                "module that holds it",
            )
        return Attention.apply(self.attend, q, k, v)


class Attention(torch.autograd.Function):
    """Attention with the backward of the object that attends."""

    @staticmethod
    def forward(ctx: Any, attend: Any, *qkv: Tensor) -> Tensor:
        """Attend; tensors that the backward reads are saved: PyTorch sees who writes to them."""
        with on_stream(qkv[0].device.type):
            inputs = [array_of(tensor, contiguous=tensor.is_cuda) for tensor in qkv]
            out, ctx.saved = attend.forward(*inputs)
            result = tensor_of(out)
        ctx.attend = attend
        ctx.save_for_backward(*qkv, result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return the gradients of q, k and v."""
        if torch.is_grad_enabled():
            raise ArgumentError(
                "the gradient of attention cannot be differentiated again",
                found="create_graph=True",
                expected="first derivatives alone",
                remedy="torch.nn.functional.scaled_dot_product_attention on one rank has second "
                "derivatives",
            )
        # Raises where one of them was written to, or the graph is used up.
        q, *_ = ctx.saved_tensors
        with on_stream(q.device.type):
            return None, *map(tensor_of, ctx.attend.backward(array_of(gradients[0]), ctx.saved))
