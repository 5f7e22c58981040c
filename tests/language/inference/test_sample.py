"""Text from a model: what the model is asked for each byte, and that caches change nothing."""

from __future__ import annotations

import numpy as np
import pytest
from support.windows import generate

from mpipipe import Mesh, Pipeline, nn, schedules
from mpipipe.attention import Local
from mpipipe.attention.cache import SlotCache
from mpipipe.errors import ArgumentError, ConfigError, NonFiniteError
from mpipipe.language.inference.generation import Sampling, build_decoder, draw, generator, readable
from mpipipe.language.models import GPT
from mpipipe.planning.layer_plan import LayerPlan

SEQ = 24  # of the training that the model might come from


class Counting:
    """Stands for a decoder whose model says that the byte after b is b + 1."""

    slots, microbatches = 1, 1

    def __init__(self, mesh):
        self.mesh, self.asked = mesh, []
        self.drawing = mesh.pipe.size - 1

    def forward(self, parts):
        ((pieces, tokens),) = parts
        self.asked.append(tokens)
        assert [(piece.rows, piece.ends) for piece in pieces] == [(len(tokens), True)]
        logits = np.zeros(256, np.float32)
        logits[(tokens[-1] + 1) % 256] = 100
        return [logits] if self.mesh.rank == self.drawing else []


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_rank_gets_the_continuation_and_each_byte_is_asked_for_once(comm, temperature):
    with Mesh(comm, pipe=comm.size) as mesh:
        decoder = Counting(mesh)
        text = generate(decoder, bytes([250, 251]), 8, temperature=temperature, seed=0)
    assert list(text) == [252, 253, 254, 255, 0, 1, 2, 3]
    assert decoder.asked == [[250, 251], [252], [253], [254], [255], [0], [1], [2]]


@pytest.mark.parametrize(("prompt", "temperature"), [(b"", 1.0), (b"a", -1.0), (b"a", float("nan")), (b"a", np.inf)])
def test_what_cannot_be_continued_is_refused(comm, prompt, temperature):
    with Mesh(comm, pipe=comm.size) as mesh, pytest.raises(ArgumentError, match=r"prompt|temperature"):
        generate(Counting(mesh), prompt, 8, temperature=temperature, seed=0)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_an_error_on_every_rank(comm, temperature, value):
    class Broken(Counting):
        def forward(self, parts):
            logits = super().forward(parts)
            if logits and len(self.asked) == 3:
                logits[0][7] = value
            return logits

    with Mesh(comm, pipe=comm.size) as mesh:
        with pytest.raises(NonFiniteError, match="logits") as caught:
            generate(Broken(mesh), b"abc", 8, temperature=temperature, seed=0)
    assert caught.value.found == "1 of 256 are not"
    assert caught.value.reported_elsewhere == (comm.rank != comm.size - 1)  # the rank that draws reports


def plan(pipe, chunks=1, microbatches=1, **sizes):
    model = GPT(**{**dict(dim=16, layers=3, heads=4, kv_heads=2, hidden=24, seq=SEQ), **sizes})
    schedule = schedules.forward_only(pipe, chunks, microbatches)
    return model, LayerPlan(schedule, schedules.partition(model.costs(), schedule.stages), rows=4)


def fill(stages):
    """Parameters that differ from the initial ones, and make some bytes much likelier than others."""
    for stage in stages:
        for name, array in stage.parameters.items():
            if name.endswith("gain"):
                array *= 1.5
            else:
                array += np.random.default_rng(len(name) + array.size).normal(0, 0.15, array.shape)


def layers_of(stages):
    return [layer for stage in stages for top in stage.layers for _, layer in top.walk("")]


def again_and_again(made, mesh, prompt, count, temperature, seed):
    """The continuation by forwards of the whole text so far, of which each layer looks back over SEQ bytes."""
    model, made = made
    layers = model.build(lambda window=None: Local(window=min(window or SEQ, SEQ)))
    parts = [made.layer_ranges[number] for number in made.schedule.stages_of(mesh.pipe.rank)]
    stages = [nn.Stage(layers[start:stop], dtype="float64", first=start) for start, stop in parts]
    fill(stages)
    text, sampling = bytearray(prompt), Sampling(temperature=temperature)
    with Pipeline(stages, made.schedule.forward_only_part(1), mesh.pipe) as pipeline:
        for index in range(count):
            inputs = np.frombuffer(bytes(text), np.uint8).astype(np.int64)[None]
            logits = pipeline.forward(inputs if mesh.pipe.rank == made.schedule.placement[0] else None)
            byte = None if logits is None else draw(logits[0, -1], sampling, generator(seed, 0, index))
            text.append(mesh.pipe.bcast(byte, made.schedule.placement[-1]))
    return bytes(text[len(prompt) :])


OPTIONS = dict(
    positions="learned", max_positions=8 * SEQ, norm="layer", windows=(3, None, 2 * SEQ), qk_norm=True, head_dim=6,
    feed_forward="gelu", qkv_bias=True,
)  # fmt: skip
CUTS = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4)]  # pipe x seq


@pytest.mark.long
@pytest.mark.parametrize(("pipe", "seq"), CUTS)
@pytest.mark.parametrize(
    ("options", "temperature"),
    [({}, 0.0), ({"chunks": 2, "tied": True, "layers": 4, "dropout": 0.3, "microbatches": 3}, 0.7), (OPTIONS, 0.7)],
)
def test_decoding_writes_what_forwards_of_the_whole_text_write(comm, pipe, seq, temperature, options):
    if comm.size % (pipe * seq):
        pytest.skip(f"needs a multiple of {pipe * seq} ranks")
    made, prompt, count = plan(pipe, **options), b"def main(", 2 * SEQ
    with Mesh(comm, pipe=pipe, seq=seq) as mesh:
        with build_decoder(*made, mesh, "float64", len(prompt) + count, fill) as decoder:
            answer = generate(decoder, prompt, count, temperature=temperature, seed=3)
            stages = [inner for stage in decoder.pipeline.stages for inner in stage.inner_stages]
        caches = [layer.attend for layer in layers_of(stages) if isinstance(layer, nn.SelfAttention)]
        assert all(isinstance(cache, SlotCache) for cache in caches)
        for cache in caches:
            assert cache.pieces.positions.tolist() == [len(prompt) + count - 2]  # nobody asked about the last byte
            assert cache.rows == -(-(len(prompt) + count) // seq)
        assert answer == again_and_again(made, mesh, prompt, count, temperature, seed=3)
    assert len(set(comm.allgather(answer))) == 1
    assert len(answer) == count and (temperature == 0 or len(set(answer)) > 5)


def test_a_text_longer_than_learned_positions_is_refused_at_once(comm):
    made = plan(comm.size, positions="learned", max_positions=20, seq=12)
    with Mesh(comm, pipe=comm.size) as mesh:
        with pytest.raises(ConfigError, match="learned positions") as caught:
            build_decoder(*made, mesh, "float64", 22, fill)
        assert "at most 21" in caught.value.expected
        with build_decoder(*made, mesh, "float64", 21, fill) as pipeline:
            assert len(generate(pipeline, b"a" * 18, 3, temperature=0.0, seed=0)) == 3


def test_a_prompt_longer_than_a_sequence_is_taken_whole(comm):
    made, prompt = plan(comm.size), bytes(range(3 * SEQ))
    with Mesh(comm, pipe=comm.size) as mesh:
        with build_decoder(*made, mesh, "float64", len(prompt) + 3, fill) as decoder:
            answer = generate(decoder, prompt, 3, temperature=0.7, seed=0)
        assert answer == again_and_again(made, mesh, prompt, 3, 0.7, seed=0)


def test_parameters_that_cannot_be_had_on_one_rank_are_reported_on_all(comm):
    def refuse(stages):
        if comm.rank == comm.size - 1:
            raise ArgumentError("not there")

    with Mesh(comm, pipe=comm.size) as mesh, pytest.raises(ArgumentError, match="not there"):
        build_decoder(*plan(comm.size), mesh, "float32", 8, refuse)


def test_generated_bytes_cannot_harm_a_terminal():
    assert readable(b"a\tb\n\x1b[2J\r\x07\xff") == "a\tb\n\ufffd[2J\ufffd\ufffd\ufffd"
    assert readable("gr\u00fc\u00df".encode()) == "gr\u00fc\u00df"
