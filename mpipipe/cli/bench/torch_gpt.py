"""The GPT of models.GPT in PyTorch, for comparisons on one rank where PyTorch is installed."""

from __future__ import annotations

from statistics import median

import torch
import torch.nn.functional as F
from torch import nn

# name -> (whether weights are bfloat16 beside float32 masters, instead of float32 under autocast; whether compiled)
PEERS = {
    "eager, autocast": (False, False),
    "eager, bfloat16 weights": (True, False),
    "torch.compile, bfloat16 weights": (True, True),
}


def micro_batch(model, tokens, targets):
    """A function of no arguments that runs forward, loss and backward of one micro-batch on one thread of the host."""
    torch.set_num_threads(1)
    gpt = _model(model)
    inputs, wanted = torch.from_numpy(tokens), torch.from_numpy(targets).reshape(-1)

    def run():
        F.cross_entropy(gpt(inputs).view(-1, model.vocab), wanted).backward()

    return run


def training_step(model, tokens, microbatches: int, dtype, masters: bool, compiled: bool, device: str = "cuda"):
    """A function of no arguments that makes a step: all micro-batches, clipping by the norm, AdamW.

    Parameters
    ----------
    model : sizes, models.GPT
    tokens : int64 (2, rows, seq): inputs and targets
    dtype : of the products, torch.bfloat16
    masters : weights of `dtype` beside float32 ones that the optimizer changes; otherwise float32 under autocast
    compiled : by torch.compile
    """
    gpt = _model(model).to(device)
    if masters:
        gpt = gpt.to(dtype)
    weights = list(gpt.parameters())
    kept = [w.detach().float().requires_grad_() for w in weights] if masters else weights
    optimizer = torch.optim.AdamW(kept, 1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    batches = [
        (inputs.to(device), targets.reshape(-1).to(device))
        for inputs, targets in zip(*(torch.from_numpy(part).chunk(microbatches) for part in tokens))
    ]

    def loss(inputs, targets):
        with torch.autocast(device, dtype, enabled=not masters):
            return F.cross_entropy(gpt(inputs).view(-1, model.vocab).float(), targets)

    loss_of = torch.compile(loss) if compiled else loss

    def step():
        for weight in weights:
            weight.grad = None
        total = torch.zeros((), device=device)
        for inputs, targets in batches:
            part = loss_of(inputs, targets) / microbatches
            part.backward()
            total = total + part.detach()
        if masters:
            for master, weight in zip(kept, weights):
                master.grad = weight.grad.float()
        nn.utils.clip_grad_norm_(kept, 1.0)
        optimizer.step()
        if masters:
            with torch.no_grad():
                torch._foreach_copy_(weights, kept)
        return total.item()

    return step


def device_seconds(call, repeats: int, warmup: int = 3) -> float:
    """Median device time of `call()` on PyTorch's current stream."""
    for _ in range(warmup):
        call()
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in marks:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return median(start.elapsed_time(end) * 1e-3 for start, end in marks)


def _model(model):
    blocks = [_Block(model) for _ in range(model.layers)]
    tokens = nn.Embedding(model.vocab, model.dim)
    head = nn.Linear(model.dim, model.vocab, bias=False)
    if model.tied:
        tokens.weight.data.mul_(model.dim**-0.5)
        head.weight = tokens.weight
    return nn.Sequential(tokens, *blocks, nn.RMSNorm(model.dim), head)


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
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

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
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)
