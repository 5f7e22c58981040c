"""`bench peers`: a Llama of transformers in a pipeline, and in `torch.distributed.pipelining`.

Both sides run in one process on each rank, in turns. Gradients are compared before anything is
measured.
"""

from __future__ import annotations

import copy
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Annotated

import numpy as np

from mpipipe import Pipeline, adapters, attention, nn, processor, schedules
from mpipipe.arrays import array_of
from mpipipe.bench.timing import Repeats, compare, on_ranks, report
from mpipipe.errors import BackendError
from mpipipe.job import Communicator, group_of, inprocess, runtime
from mpipipe.language.models import GPT
from mpipipe.options import Option
from mpipipe.planning import peak, resident
from mpipipe.text import how_to_install

try:
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
except ImportError:  # said where the command begins
    torch = dist = F = None

WARMUP = 2
NEAR = 1e-4  # relative, in the norm: the same numbers in another order of sums


@on_ranks
def peers(
    repeats: Repeats = 5,
    dim: int = 512,
    layers: int = 4,
    heads: int = 8,
    seq_len: int = 256,
    microbatches: int = 8,
    rows: Annotated[int, Option("sequences in a micro-batch")] = 4,
) -> None:
    """Compare a pipeline of modules with PyTorch's over gloo (on two ranks or more)."""
    for library in ("torch", "transformers"):
        if find_spec(library) is None:
            raise BackendError(
                f"bench peers needs {library}, which is not installed",
                remedy=how_to_install(library),
            )
    comm = runtime.world()
    if comm.size == 1:
        raise BackendError(
            "bench peers measures messages", found="1 rank", remedy="start it by mpiexec -n 2"
        )
    torch.set_num_threads(processor.chosen_threads() or 1)
    model = GPT(dim=dim, layers=layers, heads=heads, seq_len=seq_len)
    with _gloo(comm):
        _same_modules(comm, model, microbatches, rows, repeats)
    _memory(comm, model, rows)


@contextmanager
def _gloo(comm: Communicator) -> Iterator[None]:
    """Let PyTorch's ranks be those of MPI, with a store on the first of them."""
    group = group_of(comm)
    with socket.socket() as free:
        free.bind(("", 0))
        address = socket.gethostname(), free.getsockname()[1]
    everyone = group.gather("bench: the hosts", address)
    host, port = everyone[0]
    if len({name for name, _ in everyone}) == 1:
        host = "127.0.0.1"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"tcp://{host}:{port}", rank=comm.rank, world_size=comm.size
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def _check(comm: Communicator, ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    """Raise on all ranks unless both modules have the same gradients."""
    apart = 0.0
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        expected = array_of(other.grad)
        difference = np.linalg.norm(array_of(one.grad).astype(np.float64) - expected)
        apart = max(apart, float(difference / np.linalg.norm(expected)))
    with group_of(comm).raise_together("bench: both sides compute the same"):
        if not apart <= NEAR:
            raise BackendError(
                "the gradient of torch_stage differs from PyTorch's",
                found=f"{apart:.2g}",
                expected=f"at most {NEAR:g}",
            )


def _same_modules(
    comm: Communicator, model: GPT, microbatches: int, rows: int, repeats: int
) -> None:
    """Compare torch_stage with Schedule1F1B, of the blocks of a Llama."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    start, stop = schedules.partition([1] * model.layers, comm.size)[comm.rank]
    ours = _llama_blocks(model, start, stop)
    theirs = copy.deepcopy(ours)
    batch = np.random.default_rng(0).standard_normal(
        (2, microbatches * rows, model.seq_len, model.dim), dtype=np.float32
    )
    peer = Schedule1F1B(
        PipelineStage(theirs, comm.rank, comm.size, torch.device("cpu")), microbatches, F.mse_loss
    )
    inputs = targets = None
    their_inputs = []
    their_target = {}
    if comm.rank == 0:
        inputs = batch[0]
        their_inputs.append(torch.from_numpy(inputs))
    if comm.rank == comm.size - 1:
        targets = batch[1]
        their_target["target"] = torch.from_numpy(targets)

    def their_step() -> None:
        theirs.zero_grad()
        peer.step(*their_inputs, **their_target, return_outputs=False)

    stage = adapters.torch_stage(ours)
    loss = adapters.torch_loss(F.mse_loss)
    with Pipeline(
        [stage], schedules.one_f_one_b(comm.size, microbatches), comm, loss=loss
    ) as pipeline:
        step = partial(pipeline.step, inputs, targets)
        step()
        their_step()
        _check(comm, ours, theirs)
        took, other = compare(comm, [step, their_step], repeats, WARMUP)
    report(
        comm,
        f"torch_stage 1F1B, {comm.size} ranks, {microbatches} micro-batches, {model.layers} "
        "blocks of a Llama",
        f"{took:.3f} s a step, PyTorch over gloo {other:.3f} s",
        took / other,
        "at most 0.95",
    )


def _llama_blocks(model: GPT, start: int, stop: int) -> torch.nn.Module:
    """Return some blocks of a Llama as one module, (rows, seq, dim) -> the same."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaModel

    sizes = {
        "hidden_size": model.dim,
        "intermediate_size": 2 * model.dim,
        "num_attention_heads": model.heads,
    }
    torch.manual_seed(0)
    llama = LlamaModel(LlamaConfig(**sizes, vocab_size=8, num_hidden_layers=model.layers))

    class Blocks(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rotary = llama.rotary_emb
            self.blocks = llama.layers[start:stop]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            angles = self.rotary(x, torch.arange(x.shape[1])[None])
            for block in self.blocks:
                x = block(x, position_embeddings=angles)
            return x

    return Blocks()


def _memory(comm: Communicator, model: GPT, rows: int) -> None:
    """Compare the peak of resident memory of a step of a GPT on one rank."""
    from mpipipe.bench.torch_gpt import micro_batch

    tokens, targets = np.random.default_rng(0).integers(
        0, model.vocab, size=(2, rows, model.seq_len)
    )

    def ours(alone: Communicator) -> None:
        stages = [nn.Stage(model.build(attention.Local(causal=True)))]
        with Pipeline(
            stages, schedules.gpipe(1, 1), alone, loss=nn.softmax_cross_entropy, input_grads=False
        ) as pipeline:
            pipeline.step(tokens, targets)

    def theirs() -> None:
        micro_batch(model, tokens, targets)()

    peaks = []
    for work in (lambda: inprocess.run(1, ours), theirs):
        before = resident()
        work()
        peaks.append((peak() - before) / 2**20)
    report(
        comm,
        f"memory of a step of {rows} x {model.seq_len} tokens, {model.parameters:,} parameters",
        f"{peaks[0]:.0f} MiB, PyTorch {peaks[1]:.0f} MiB",
        peaks[0] / peaks[1],
        "at most 0.45",
    )
