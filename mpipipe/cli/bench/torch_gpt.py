"""The GPT of `bench train` in PyTorch, for a comparison on one rank where PyTorch is installed."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def micro_batch(model, tokens, targets):
    """A function of no arguments that runs forward, loss and backward of one micro-batch on one thread."""
    torch.set_num_threads(1)
    blocks = [_Block(model) for _ in range(model.layers)]
    head = nn.Linear(model.dim, model.vocab, bias=False)
    gpt = nn.Sequential(nn.Embedding(model.vocab, model.dim), *blocks, nn.RMSNorm(model.dim), head)
    inputs, wanted = torch.from_numpy(tokens), torch.from_numpy(targets).reshape(-1)

    def run():
        F.cross_entropy(gpt(inputs).view(-1, model.vocab), wanted).backward()

    return run


class _Block(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.heads, self.size = model.heads, model.dim // model.heads
        self.before_attention, self.before_mlp = nn.RMSNorm(model.dim), nn.RMSNorm(model.dim)
        self.qkv = nn.Linear(model.dim, 3 * model.dim, bias=False)
        self.out = nn.Linear(model.dim, model.dim, bias=False)
        self.gate_up = nn.Linear(model.dim, 2 * model.hidden, bias=False)
        self.down = nn.Linear(model.hidden, model.dim, bias=False)
        frequencies = model.rope_base ** (-torch.arange(0, self.size, 2) / self.size)
        angles = torch.arange(model.seq)[:, None] * frequencies
        self.cos, self.sin = angles.cos(), angles.sin()

    def forward(self, x):
        batch, seq, dim = x.shape
        qkv = self.qkv(self.before_attention(x)).view(batch, seq, 3, self.heads, self.size)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(self.turn(q), self.turn(k), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, seq, dim))
        gate, up = self.gate_up(self.before_mlp(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)

    def turn(self, x):
        first, second = x.chunk(2, -1)
        return torch.cat([first * self.cos - second * self.sin, first * self.sin + second * self.cos], -1)
