"""Models of PyTorch that others wrote, tiny and with random weights, and how each is cut into a list of layers.

A function of a library gives a `Case`: the model as it is, its parts in order, and a batch. Parts hold modules of the
model itself, so parameters that it shares are shared between parts. `made` is what the loop of training.py needs.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn import functional

from mpipipe import adapters
from tests.models.training import MICROBATCHES, RATE, STEPS, Model

ROWS, WORDS, LENGTH = 2, 13, 6  # rows of a micro-batch


class Case(NamedTuple):
    model: torch.nn.Module
    run: Callable[..., Any]  # the output of the whole model, from the inputs
    parts: list[torch.nn.Module]
    draw: Callable[[np.random.Generator], tuple[Any, Any]]  # inputs and targets of one micro-batch
    loss: Callable[[Any, Any], Any]


class Part(torch.nn.Module):
    """What a function makes of modules of a model."""

    def __init__(self, function, **modules):
        super().__init__()
        self.function = function
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, *x):
        return self.function(self, *x)


def words(draw):
    return draw.integers(1, WORDS, (ROWS, LENGTH))


def likelihood(output, target):
    return functional.cross_entropy(output.flatten(0, -2), target.flatten())


def causal(x):
    return torch.full((x.shape[1], x.shape[1]), torch.finfo(x.dtype).min, dtype=x.dtype).triu(1)[None, None]


def fields(draw):
    return draw.normal(size=(2, ROWS, 1, 8, 8))


def images(draw):
    return draw.normal(size=(ROWS, 3, 32, 32)), draw.integers(0, 5, ROWS)


def fno(**options):
    models = pytest.importorskip("neuralop.models")
    model = models.FNO((4, 4), 1, 1, hidden_channels=6, n_layers=3, **options)

    def block(number):
        return Part(lambda self, x: self.blocks(x, number), blocks=model.fno_blocks)

    start = Part(lambda self, x: self.lifting(self.places(x)), places=model.positional_embedding, lifting=model.lifting)
    return Case(model, model, [start, block(0), block(1), block(2), model.projection], fields, functional.mse_loss)


def tfno():
    return fno(factorization="tucker", implementation="factorized", rank=0.5)


def resnet18():
    model = pytest.importorskip("torchvision.models").resnet18(num_classes=5)
    start = torch.nn.Sequential(model.conv1, model.bn1, model.relu, model.maxpool)
    end = torch.nn.Sequential(model.avgpool, torch.nn.Flatten(), model.fc)
    parts = [start, model.layer1, model.layer2, model.layer3, model.layer4, end]
    return Case(model, model, parts, images, functional.cross_entropy)


def vit():
    make = pytest.importorskip("timm").create_model
    model = make("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=12, depth=3, num_heads=2, num_classes=5)

    def embed(self, x):
        x = self.patches(x)
        return torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.places

    start = Part(embed, patches=model.patch_embed, first=model.cls_token, places=model.pos_embed)
    end = Part(lambda self, x: self.head(self.norm(x)[:, 0]), norm=model.norm, head=model.head)
    return Case(model, model, [start, *model.blocks, end], images, functional.cross_entropy)


def transformer(kind, config, **options):
    library = pytest.importorskip("transformers")
    settings = getattr(library, config)(vocab_size=WORDS, **options)
    settings._attn_implementation = "eager"
    return getattr(library, kind)(settings)


def llama():
    model = transformer(
        "LlamaForCausalLM", "LlamaConfig", hidden_size=12, intermediate_size=16, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    base = model.model

    def layer(self, x):
        angles = self.rotary(x, torch.arange(x.shape[1])[None])
        return self.layer(x, attention_mask=causal(x), position_embeddings=angles)

    layers = [Part(layer, layer=each, rotary=base.rotary_emb) for each in base.layers]
    parts = [base.embed_tokens, *layers, torch.nn.Sequential(base.norm, model.lm_head)]
    return Case(
        model, lambda x: model(x, use_cache=False).logits, parts, lambda draw: (words(draw), words(draw)), likelihood
    )


def gpt2():
    """The head is the embedding."""
    model = transformer(
        "GPT2LMHeadModel", "GPT2Config", n_positions=LENGTH, n_embd=12, n_layer=3, n_head=2, embd_pdrop=0,
        attn_pdrop=0, resid_pdrop=0,
    )  # fmt: skip
    base = model.transformer
    start = Part(lambda self, x: self.words(x) + self.places(torch.arange(x.shape[1])), words=base.wte, places=base.wpe)
    layers = [Part(lambda self, x: self.layer(x, attention_mask=causal(x)), layer=each) for each in base.h]
    parts = [start, *layers, torch.nn.Sequential(base.ln_f, model.lm_head)]
    return Case(
        model, lambda x: model(x, use_cache=False).logits, parts, lambda draw: (words(draw), words(draw)), likelihood
    )


def bert():
    """The decoder of the head is the embedding of words."""
    model = transformer(
        "BertForMaskedLM", "BertConfig", hidden_size=12, intermediate_size=16, num_hidden_layers=3,
        num_attention_heads=2, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    )  # fmt: skip
    parts = [model.bert.embeddings, *model.bert.encoder.layer, model.cls]
    return Case(model, lambda x: model(x).logits, parts, lambda draw: (words(draw), words(draw)), likelihood)


def t5():
    """Encoder, decoder and head have one table of words; the biases of positions go from layer to layer."""
    model = transformer(
        "T5ForConditionalGeneration", "T5Config", d_model=12, d_kv=6, d_ff=16, num_layers=2, num_heads=2,
        dropout_rate=0, tie_word_embeddings=True,
    )  # fmt: skip
    encoder, decoder = model.encoder, model.decoder

    def first(self, text, answer):
        return *self.layer(self.words(text))[:2], answer

    def second(self, x, bias, answer):
        return self.norm(self.layer(x, position_bias=bias)[0]), answer

    def third(self, x, answer):
        y = self.words(answer)
        return *self.layer(y, causal(y), encoder_hidden_states=x), x

    def fourth(self, y, bias, cross, x):
        return self.norm(self.layer(y, causal(y), bias, x, None, cross)[0]) * self.scale

    parts = [
        Part(first, words=encoder.embed_tokens, layer=encoder.block[0]),
        Part(second, layer=encoder.block[1], norm=encoder.final_layer_norm),
        Part(third, words=decoder.embed_tokens, layer=decoder.block[0]),
        Part(fourth, layer=decoder.block[1], norm=decoder.final_layer_norm),
        model.lm_head,
    ]
    parts[3].scale = model.model_dim**-0.5 if model.config.scale_decoder_outputs else 1.0

    def run(text, answer):
        return model(input_ids=text, decoder_input_ids=answer, use_cache=False).logits

    return Case(model, run, parts, lambda draw: ((words(draw), words(draw)), words(draw)), likelihood)


def unet():
    """What goes over the arms of the U is handed on, after the time, as further arrays."""
    model = pytest.importorskip("diffusers").UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(4, 8),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=2, attention_head_dim=4,
    )  # fmt: skip

    def begin(self, x, when):
        x = self.convolution(x)
        return x, self.embedding(self.waves(when).to(x.dtype)), x

    def down(self, x, time, *arms):
        x, more = self.block(x, time)
        return x, time, *arms, *more

    def middle(self, x, time, *arms):
        return self.block(x, time), time, *arms

    def up(self, x, time, *arms):
        count = len(self.block.resnets)
        return self.block(x, arms[-count:], time), time, *arms[:-count]

    def end(self, x, *_):
        return self.last(self.act(self.norm(x)))

    parts = [
        Part(begin, convolution=model.conv_in, waves=model.time_proj, embedding=model.time_embedding),
        *(Part(down, block=each) for each in model.down_blocks),
        Part(middle, block=model.mid_block),
        *(Part(up, block=each) for each in model.up_blocks),
        Part(end, norm=model.conv_norm_out, act=model.conv_act, last=model.conv_out),
    ]

    def draw(generator):
        noisy, clean = fields(generator)
        return (noisy, generator.integers(0, 1000, ROWS)), clean

    return Case(model, lambda x, when: model(x, when).sample, parts, draw, functional.mse_loss)


class Pooled(torch.nn.Module):
    """A GCN: the mean over the nodes of each graph, as the examples of torch_geometric have it."""

    def __init__(self, library):
        super().__init__()
        sizes = [3, 8, 8, 8]
        self.layers = torch.nn.ModuleList(map(library.GCNConv, sizes, sizes[1:]))
        self.pool, self.head = library.global_mean_pool, torch.nn.Linear(8, 2)

    def forward(self, nodes, edges, graphs):
        for layer in self.layers:
            nodes = layer(nodes, edges).relu()
        return self.head(self.pool(nodes, graphs))


def gcn():
    """Graphs of different sizes: no two micro-batches have the same shapes."""
    library = pytest.importorskip("torch_geometric.nn")
    data = pytest.importorskip("torch_geometric.data")
    model = Pooled(library)

    def layer(self, nodes, edges, graphs):
        return self.layer(nodes, edges).relu(), edges, graphs

    def end(self, nodes, edges, graphs):
        return self.head(model.pool(nodes, graphs))

    def draw(generator):
        graphs = []
        for _ in range(ROWS):
            count = int(generator.integers(1, 7))
            edges = torch.from_numpy(generator.integers(0, count, (2, int(generator.integers(0, 9)))))
            graphs.append(data.Data(x=torch.from_numpy(generator.normal(size=(count, 3))), edge_index=edges))
        both = data.Batch.from_data_list(graphs)
        return (both.x.numpy(), both.edge_index.numpy(), both.batch.numpy()), generator.normal(size=(ROWS, 2))

    parts = [*(Part(layer, layer=each) for each in model.layers), Part(end, head=model.head)]
    return Case(model, model, parts, draw, functional.mse_loss)


CASES = {each.__name__: each for each in (fno, tfno, resnet18, vit, llama, gpt2, bert, t5, unet, gcn)}


# -- the judge ---------------------------------------------------------------------------------------------------------


def case_of(name):
    torch.manual_seed(5)
    torch.set_default_dtype(torch.float64)
    try:
        case = CASES[name]()
    finally:
        torch.set_default_dtype(torch.float32)
    case.model.double().train()
    for each in case.model.parameters():
        if each.is_complex():
            each.data = each.data.to(torch.complex128)
    return case


def batches(case, step, replica):
    draw = np.random.default_rng([step, replica])
    return tuple(map(list, zip(*(case.draw(draw) for _ in range(MICROBATCHES)))))


def made(name):
    case = case_of(name)
    return Model(case.parts, adapters.torch_loss(case.loss), partial(batches, case), partial(judged, name))


def tensors(tree):
    return tuple(map(torch.from_numpy, tree)) if isinstance(tree, tuple) else (torch.from_numpy(tree),)


def parameters_of(case):
    return {f"{place}.{key}": each for place, part in enumerate(case.parts) for key, each in part.named_parameters()}


def buffers_of(case):
    """Those that are saved."""
    found = {}
    for place, part in enumerate(case.parts):
        parameters = dict(part.named_parameters(remove_duplicate=False))
        found |= {f"{place}.{key}": each for key, each in part.state_dict().items() if key not in parameters}
    return found


def real(tensors):
    """Arrays, in which complex numbers are pairs."""
    found = {}
    for key, tensor in tensors.items():
        array = tensor.detach().numpy()
        found[key] = np.stack([array.real, array.imag], -1) if array.dtype.kind == "c" else array.copy()
    return found


def judged(name, replicas):
    """What PyTorch makes of the whole model; each replica has state of its own, as in DistributedDataParallel."""
    first = case_of(name)
    cases = [first, *(copy.deepcopy(first) for _ in range(replicas - 1))]
    losses, gradients = [], {}
    for step in range(STEPS):
        total = 0.0
        for replica, case in enumerate(cases):
            case.model.zero_grad()
            for x, target in zip(*batches(case, step, replica)):
                value = case.loss(case.run(*tensors(x)), *tensors(target)) / (MICROBATCHES * replicas)
                value.backward()
                total += value.item()
        losses.append(total)
        with torch.no_grad():
            for several in zip(*(case.model.parameters() for case in cases)):
                sums = sum(torch.zeros_like(each) if each.grad is None else each.grad for each in several)
                for each in several:
                    each.grad = sums.clone()
            if step == 0:
                gradients = real({key: each.grad for key, each in parameters_of(first).items()})
            for case in cases:
                for each in case.model.parameters():
                    each -= RATE * each.grad
    return losses, gradients, real(parameters_of(first) | buffers_of(first))
