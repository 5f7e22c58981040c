"""The GPT of models.GPT in PyTorch, for comparisons on one rank where PyTorch is installed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from mpipipe.language.models import GPT

# name -> (whether weights are bfloat16 with float32 masters, instead of float32 under autocast;
# whether compiled; the goal for our rate in that of this peer)
PEERS = {
    "eager, autocast": (False, False, "at least 1.3"),
    "eager, bfloat16 weights": (True, False, "at least 1.3"),
    "torch.compile, bfloat16 weights": (True, True, "at least 1.0"),
}


def micro_batch(
    model: GPT, tokens: np.ndarray, targets: np.ndarray, threads: int = 1
) -> Callable[[], None]:
    """Return a function that runs forward, loss and backward of one micro-batch on the host."""
    torch.set_num_threads(threads)
    gpt = sequential(model)
    inputs = torch.from_numpy(tokens)
    wanted = torch.from_numpy(targets).reshape(-1)

    def run() -> None:
        F.cross_entropy(gpt(inputs).view(-1, model.vocab), wanted).backward()

    return run


def training_step(
    model: GPT,
    tokens: np.ndarray,
    microbatches: int,
    dtype: torch.dtype,
    masters: bool,
    compiled: bool,
    device: str = "cuda",
) -> Callable[[], float]:
    """Return a function that makes a step: all micro-batches, clipping by the norm, AdamW.

    tokens : int64 (2, rows, seq): inputs and targets
    dtype : dtype of the products
    masters : weights of `dtype`, with float32 ones that the optimizer changes; otherwise float32
        under autocast
    """
    gpt = sequential(model).to(device)
    if masters:
        gpt = gpt.to(dtype)
    weights = list(gpt.parameters())
    trained = weights
    if masters:
        trained = [weight.detach().float().requires_grad_() for weight in weights]
    optimizer = torch.optim.AdamW(trained, 1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    inputs_and_targets = [torch.from_numpy(part).to(device).chunk(microbatches) for part in tokens]
    batches = [*zip(*inputs_and_targets)]

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, dtype, enabled=not masters):
            logits = gpt(inputs).view(-1, model.vocab).float()
            return F.cross_entropy(logits, targets.reshape(-1))

    loss_of = torch.compile(loss) if compiled else loss

    def step() -> float:
        for weight in weights:
            weight.grad = None
        total = torch.zeros((), device=device)
        for inputs, targets in batches:
            part = loss_of(inputs, targets) / microbatches
            part.backward()
            total = total + part.detach()
        if masters:
            for master, weight in zip(trained, weights):
                master.grad = weight.grad.float()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        if masters:
            with torch.no_grad():
                torch._foreach_copy_(weights, trained)
        return total.item()

    return step


def sequential(model: GPT) -> nn.Sequential:
    """Return embedding, blocks, last norm and head."""
    blocks = [_Block(model) for _ in range(model.layers)]
    tokens = nn.Embedding(model.vocab, model.dim)
    head = nn.Linear(model.dim, model.vocab, bias=False)
    if model.tied:
        tokens.weight.data.mul_(model.dim**-0.5)
        head.weight = tokens.weight
    return nn.Sequential(tokens, *blocks, nn.RMSNorm(model.dim, model.eps), head)


class _Block(nn.Module):
    """A transformer block."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.heads, self.size = model.heads, model.dim // model.heads
        self.before_attention = nn.RMSNorm(model.dim, model.eps)
        self.before_mlp = nn.RMSNorm(model.dim, model.eps)
        self.qkv = nn.Linear(model.dim, 3 * model.dim, bias=False)
        self.out = nn.Linear(model.dim, model.dim, bias=False)
        self.gate_up = nn.Linear(model.dim, 2 * model.hidden, bias=False)
        self.down = nn.Linear(model.hidden, model.dim, bias=False)
        frequencies = model.rope_base ** (-torch.arange(0, self.size, 2) / self.size)
        angles = torch.arange(model.seq_len)[:, None] * frequencies
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, dim = x.shape
        qkv = self.qkv(self.before_attention(x)).view(batch, seq, 3, self.heads, self.size)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(
            self.apply_rope(q), self.apply_rope(k), v, is_causal=True
        )
        x = x + self.out(y.transpose(1, 2).reshape(batch, seq, dim))
        gate, up = self.gate_up(self.before_mlp(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)

    def apply_rope(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate pairs of elements by the angles of their positions."""
        first, second = x.chunk(2, -1)
        cos = self.cos.to(x.dtype)
        sin = self.sin.to(x.dtype)
        return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)
