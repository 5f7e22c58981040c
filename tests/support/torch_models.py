"""Small models in PyTorch, cut into stages, and the same model on one process by plain autograd."""

import copy

import numpy as np
import torch
from torch.nn import functional

WIDTH, WORDS, LENGTH = 16, 11, 6


class Block(torch.nn.Module):
    """A block of a GPT: causal attention and a feed-forward, each behind a norm and beside a residual."""

    def __init__(self, dim=WIDTH, heads=4, dropout=0.0):
        super().__init__()
        self.heads, self.dropout = heads, torch.nn.Dropout(dropout)
        self.norm, self.norm2 = torch.nn.LayerNorm(dim), torch.nn.LayerNorm(dim)
        self.qkv, self.out = torch.nn.Linear(dim, 3 * dim), torch.nn.Linear(dim, dim)
        self.up, self.down = torch.nn.Linear(dim, 4 * dim), torch.nn.Linear(4 * dim, dim)

    def forward(self, x):
        batch, seq, dim = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, seq, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, seq, dim)))
        return x + self.dropout(self.down(functional.gelu(self.up(self.norm2(x)))))


def parts(stages, dropout=0.0, dtype=torch.float64):
    """The modules of all stages: an embedding in front of the first block, a head behind the last."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        modules = [[Block(dropout=dropout)] for _ in range(stages)]
        modules[0].insert(0, torch.nn.Embedding(WORDS, WIDTH))
        modules[-1].append(torch.nn.Linear(WIDTH, WORDS))
    return [torch.nn.Sequential(*each).to(dtype) for each in modules]


def batch(rows=8, seed=0):
    """(words, next words)."""
    return np.random.default_rng(seed).integers(WORDS, size=(2, rows, LENGTH))


def cross_entropy(output, target):
    return functional.cross_entropy(output.reshape(-1, output.shape[-1]), target.reshape(-1))


def reference(modules, words, following):
    """(loss, the gradients of each module by name) of the whole batch at once."""
    whole = torch.nn.Sequential(*copy.deepcopy(modules))
    loss = cross_entropy(whole(torch.from_numpy(words)), torch.from_numpy(following))
    loss.backward()
    return loss.item(), [{name: p.grad.numpy() for name, p in each.named_parameters()} for each in whole]
