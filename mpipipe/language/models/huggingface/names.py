"""The tables of names: which of our parameters, or which rows of one, each of their tensors is.

    their tensor                               ours, in layer 1 + 2i or 2 + 2i of models.GPT
    model.layers.i.self_attn.q_proj.weight     rows of qkv: the first heads * head_dim, turned
    model.layers.i.self_attn.k_proj.weight     the next kv_heads * head_dim, turned
    model.layers.i.self_attn.v_proj.weight     the last kv_heads * head_dim
    model.layers.i.mlp.gate_proj.weight        the upper half of gate_up
    transformer.h.i.attn.c_attn.weight         qkv, transposed

*Turned*: a rotary position turns pairs of elements of a head. Theirs are (j, j + head_dim / 2),
halves of the head. Ours are neighbours (2j, 2j + 1). So row (half, j) of a head is our row (j,
half), for matrices, biases and gains alike.

`view` gives the part of our array in the order of their tensor, without a copy. Reading sets it,
writing copies it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from mpipipe.even_split import even_split
from mpipipe.language.models.gpt import GPT

EMBEDDING, POSITIONS, ATTENTION_NORM, ATTENTION, FEED_NORM, FEED, LAST_NORM, HEAD = range(8)


@dataclass(frozen=True)
class Tensor:
    """One line of a table: their name with {i} for the block, and what it is of ours.

    That is a layer, its parameter, `rows` as for `_rows`, and a flag of the model that has it.

    Of a slice of the head, or of an embedding that is tied with slices: its first row among theirs,
    and how many these are.
    """

    theirs: str
    place: int
    ours: str
    rows: str = "all"
    form: str = "plain"
    when: str = ""
    first: int = 0
    total: int = 0


_BLOCK = "model.layers.{i}"
LLAMA = (
    Tensor("model.embed_tokens.weight", EMBEDDING, "weight"),
    Tensor(f"{_BLOCK}.input_layernorm.weight", ATTENTION_NORM, "gain"),
    Tensor(f"{_BLOCK}.self_attn.q_proj.weight", ATTENTION, "qkv", rows="q", form="turned"),
    Tensor(f"{_BLOCK}.self_attn.k_proj.weight", ATTENTION, "qkv", rows="k", form="turned"),
    Tensor(f"{_BLOCK}.self_attn.v_proj.weight", ATTENTION, "qkv", rows="v"),
    Tensor(f"{_BLOCK}.self_attn.q_proj.bias", ATTENTION, "qkv_bias", "q", "turned", "qkv_bias"),
    Tensor(f"{_BLOCK}.self_attn.k_proj.bias", ATTENTION, "qkv_bias", "k", "turned", "qkv_bias"),
    Tensor(f"{_BLOCK}.self_attn.v_proj.bias", ATTENTION, "qkv_bias", rows="v", when="qkv_bias"),
    Tensor(f"{_BLOCK}.self_attn.q_norm.weight", ATTENTION, "q_norm", form="turned", when="qk_norm"),
    Tensor(f"{_BLOCK}.self_attn.k_norm.weight", ATTENTION, "k_norm", form="turned", when="qk_norm"),
    Tensor(f"{_BLOCK}.self_attn.o_proj.weight", ATTENTION, "out"),
    Tensor(f"{_BLOCK}.self_attn.o_proj.bias", ATTENTION, "out_bias", when="out_bias"),
    Tensor(f"{_BLOCK}.post_attention_layernorm.weight", FEED_NORM, "gain"),
    Tensor(f"{_BLOCK}.mlp.gate_proj.weight", FEED, "gate_up", rows="gate"),
    Tensor(f"{_BLOCK}.mlp.up_proj.weight", FEED, "gate_up", rows="up"),
    Tensor(f"{_BLOCK}.mlp.down_proj.weight", FEED, "down"),
    Tensor(
        f"{_BLOCK}.mlp.gate_proj.bias", FEED, "gate_up_bias", rows="gate", when="feed_forward_bias"
    ),
    Tensor(f"{_BLOCK}.mlp.up_proj.bias", FEED, "gate_up_bias", rows="up", when="feed_forward_bias"),
    Tensor(f"{_BLOCK}.mlp.down_proj.bias", FEED, "down_bias", when="feed_forward_bias"),
    Tensor("model.norm.weight", LAST_NORM, "gain"),
    Tensor("lm_head.weight", HEAD, "weight"),
)

_H = "transformer.h.{i}"
GPT2 = (
    Tensor("transformer.wte.weight", EMBEDDING, "weight"),
    Tensor("transformer.wpe.weight", POSITIONS, "weight"),
    Tensor(f"{_H}.ln_1.weight", ATTENTION_NORM, "gain"),
    Tensor(f"{_H}.ln_1.bias", ATTENTION_NORM, "bias"),
    Tensor(f"{_H}.attn.c_attn.weight", ATTENTION, "qkv", form="transposed"),
    Tensor(f"{_H}.attn.c_attn.bias", ATTENTION, "qkv_bias"),
    Tensor(f"{_H}.attn.c_proj.weight", ATTENTION, "out", form="transposed"),
    Tensor(f"{_H}.attn.c_proj.bias", ATTENTION, "out_bias"),
    Tensor(f"{_H}.ln_2.weight", FEED_NORM, "gain"),
    Tensor(f"{_H}.ln_2.bias", FEED_NORM, "bias"),
    Tensor(f"{_H}.mlp.c_fc.weight", FEED, "up", form="transposed"),
    Tensor(f"{_H}.mlp.c_fc.bias", FEED, "up_bias"),
    Tensor(f"{_H}.mlp.c_proj.weight", FEED, "down", form="transposed"),
    Tensor(f"{_H}.mlp.c_proj.bias", FEED, "down_bias"),
    Tensor("transformer.ln_f.weight", LAST_NORM, "gain"),
    Tensor("transformer.ln_f.bias", LAST_NORM, "bias"),
    Tensor("lm_head.weight", HEAD, "weight"),
)


def parts_of(table: tuple[Tensor, ...], model: GPT) -> Iterator[Tensor]:
    """Yield each of the tensors that a folder of this model has, in the order of its layers.

    Their names, and ours, are those in the folder and in the model.
    A head that is the embedding is not stored.
    """
    for in_block, tensors in groupby(table, key=lambda tensor: "{i}" in tensor.theirs):
        group = []
        for tensor in tensors:
            is_head = tensor.place == HEAD and model.tied
            if not is_head and (not tensor.when or getattr(model, tensor.when)):
                group.append(tensor)
        for block in range(model.layers if in_block else 1):
            for tensor in group:
                yield from _parts(tensor, model, block)


def _parts(tensor: Tensor, model: GPT, block: int) -> Iterator[Tensor]:
    """Yield the parts of a tensor: one, or those of the slices of the head."""
    theirs = tensor.theirs.replace("{i}", str(block))
    names = names_of(tensor.place, tensor.ours, block, model)
    if len(names) == 1:
        yield replace(tensor, theirs=theirs, ours=names[0])
        return
    for ours, rows in zip(names, even_split(model.vocab, len(names))):
        yield replace(tensor, theirs=theirs, ours=ours, first=rows.start, total=model.vocab)


def names_of(place: int, ours: str, block: int, model: GPT) -> list[str]:
    """Return the names of a parameter of `GPT.build`: of its slices, if it has some."""
    embedding = "0.0"
    if model.positions == "rotary":
        embedding = "0"
    last = 2 * model.layers + 1
    layer = {
        EMBEDDING: embedding,
        POSITIONS: "0.1",
        ATTENTION_NORM: f"{2 * block + 1}.layer.0",
        ATTENTION: f"{2 * block + 1}.layer.1",
        FEED_NORM: f"{2 * block + 2}.layer.0",
        FEED: f"{2 * block + 2}.layer.1",
        LAST_NORM: f"{last}.0",
        HEAD: f"{last}.1",
    }[place]
    name = f"{layer}.{ours}"
    slices = range(1, model.head_slices)
    if place == HEAD:
        return [name, *(f"{last + k}.{ours}" for k in slices)]
    if place == EMBEDDING and model.tied and slices:
        return [f"{name}_{k}" for k in (0, *slices)]
    return [name]


def tied_to(name: str, model: GPT) -> str:
    """Return the name in the table of a parameter: the embedding's for a tied head."""
    if not model.tied:
        return name
    heads = names_of(HEAD, "weight", 0, model)
    return dict(zip(heads, names_of(EMBEDDING, "weight", 0, model))).get(name, name)


def view(tensor: Tensor, array: np.ndarray, model: GPT) -> np.ndarray:
    """Return the part of our array that a tensor is, in the order of its elements.

    It has more axes than theirs where it is turned.
    """
    first, stop = _rows(tensor.rows, model, len(array))
    part = array[first:stop]
    if tensor.form == "transposed":
        return part.T
    if tensor.form == "turned":
        return part.reshape(-1, model.head_dim // 2, 2, *part.shape[1:]).swapaxes(1, 2)
    return part


def shape_of(tensor: Tensor, ours: tuple[int, ...], model: GPT) -> tuple[int, ...]:
    """Return the shape of their tensor, for a parameter of ours with that shape."""
    if tensor.total:
        return (tensor.total, *ours[1:])
    first, stop = _rows(tensor.rows, model, ours[0])
    shape = (stop - first, *ours[1:])
    if tensor.form == "transposed":
        return shape[::-1]
    return shape


def _rows(rows: str, model: GPT, count: int) -> tuple[int, int]:
    """Return the first row, and the end, of a part of a parameter with `count` rows."""
    queries = model.heads * model.head_dim
    keys = queries + model.kv_heads * model.head_dim
    return {
        "all": (0, count),
        "q": (0, queries),
        "k": (queries, keys),
        "v": (keys, count),
        "gate": (0, count // 2),
        "up": (count // 2, count),
    }[rows]
