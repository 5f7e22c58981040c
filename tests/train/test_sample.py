"""Text from a model: what the model is asked for each byte, how a byte is drawn, and that caches change nothing."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from mpipipe import Mesh, Pipeline, nn, schedules
from mpipipe.attention import Local
from mpipipe.errors import ArgumentError, NonFiniteError
from mpipipe.models import GPT
from mpipipe.train.data import generator
from mpipipe.train.decoder import build_decoder
from mpipipe.train.sample import draw, generate, readable
from mpipipe.train.training_plan import TrainingPlan

SEQ = 24  # of the training that the model might come from


class Counting:
    """Stands for a pipeline whose model says that the byte after b is b + 1."""

    def __init__(self, mesh):
        self.mesh, self.asked = mesh, []
        self.schedule = SimpleNamespace(placement=tuple(range(mesh.pipe.size)))

    def forward(self, inputs):
        assert (inputs is None) == (self.mesh.pipe.rank != 0)
        inputs = self.mesh.pipe.bcast(inputs, 0)
        self.asked.append(inputs[0].tolist())
        logits = np.zeros((1, inputs.shape[1], 256), np.float32)
        np.put_along_axis(logits, ((inputs + 1) % 256)[..., None], 100.0, axis=2)
        return logits if self.mesh.pipe.rank == self.mesh.pipe.size - 1 else None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_rank_gets_the_continuation_and_each_byte_is_asked_for_once(comm, temperature):
    with Mesh(comm, pipe=comm.size) as mesh:
        pipeline = Counting(mesh)
        text = generate(pipeline, mesh, bytes([250, 251]), 8, temperature=temperature, seed=0)
    assert list(text) == [252, 253, 254, 255, 0, 1, 2, 3]
    assert pipeline.asked == [[250, 251], [252], [253], [254], [255], [0], [1], [2]]


@pytest.mark.parametrize(("prompt", "temperature"), [(b"", 1.0), (b"a", -1.0), (b"a", float("nan")), (b"a", np.inf)])
def test_what_cannot_be_continued_is_refused(comm, prompt, temperature):
    with Mesh(comm, pipe=comm.size) as mesh, pytest.raises(ArgumentError, match=r"prompt|temperature"):
        generate(Counting(mesh), mesh, prompt, 8, temperature=temperature, seed=0)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_an_error_on_every_rank(comm, temperature, value):
    class Broken(Counting):
        def forward(self, inputs):
            logits = super().forward(inputs)
            if logits is not None and len(self.asked) == 3:
                logits[0, -1, 7] = value
            return logits

    with Mesh(comm, pipe=comm.size) as mesh:
        with pytest.raises(NonFiniteError, match="logits") as caught:
            generate(Broken(mesh), mesh, b"abc", 8, temperature=temperature, seed=0)
    assert caught.value.found == "1 of 256 are not"
    assert caught.value.reported_elsewhere == (comm.rank != comm.size - 1)  # the rank that draws reports


def plan(pipe, chunks=1, **sizes):
    model = GPT(**{**dict(dim=16, layers=3, heads=4, kv_heads=2, hidden=24, seq=SEQ), **sizes})
    schedule = schedules.interleaved_1f1b(pipe, chunks, microbatches=4)
    return TrainingPlan(model, schedule, schedules.partition(model.costs(), schedule.stages), rows=4)


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
    layers = made.model.build(Local(window=SEQ))
    parts = [made.layer_ranges[number] for number in made.schedule.stages_of(mesh.pipe.rank)]
    stages = [nn.Stage(layers[start:stop], dtype="float64", first=start) for start, stop in parts]
    fill(stages)
    text = bytearray(prompt)
    with Pipeline(stages, made.schedule.forward_only_part(1), mesh.pipe) as pipeline:
        for index in range(count):
            inputs = np.frombuffer(bytes(text), np.uint8).astype(np.int64)[None]
            logits = pipeline.forward(inputs if mesh.pipe.rank == made.schedule.placement[0] else None)
            byte = None if logits is None else draw(logits[0, -1], temperature, generator(seed, "sample", index))
            text.append(mesh.pipe.bcast(byte, made.schedule.placement[-1]))
    return bytes(text[len(prompt) :])


CUTS = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4)]  # pipe x seq


@pytest.mark.parametrize(("pipe", "seq"), CUTS)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("options", [{}, {"chunks": 2, "tied": True, "layers": 4, "dropout": 0.3}])
def test_decoding_writes_what_forwards_of_the_whole_text_write(comm, pipe, seq, temperature, options):
    if comm.size % (pipe * seq):
        pytest.skip(f"needs a multiple of {pipe * seq} ranks")
    made, prompt, count = plan(pipe, **options), b"def main(", 2 * SEQ
    with Mesh(comm, pipe=pipe, seq=seq) as mesh:
        with build_decoder(made, mesh, "float64", len(prompt) + count, fill) as pipeline:
            answer = generate(pipeline, mesh, prompt, count, temperature=temperature, seed=3)
            caches = [layer.attend for layer in layers_of(pipeline.stages) if isinstance(layer, nn.SelfAttention)]
        for cache in caches:
            assert cache.length == cache.capacity - 1 == len(prompt) + count - 1  # nobody asked about the last byte
            assert cache.stop - cache.first <= -(-cache.capacity // seq)
        assert answer == again_and_again(made, mesh, prompt, count, temperature, seed=3)
    assert len(set(comm.allgather(answer))) == 1
    assert len(answer) == count and (temperature == 0 or len(set(answer)) > 5)


def test_a_prompt_longer_than_a_sequence_is_taken_whole(comm):
    made, prompt = plan(comm.size), bytes(range(3 * SEQ))
    with Mesh(comm, pipe=comm.size) as mesh:
        with build_decoder(made, mesh, "float64", len(prompt) + 3, fill) as pipeline:
            answer = generate(pipeline, mesh, prompt, 3, temperature=0.7, seed=0)
        assert answer == again_and_again(made, mesh, prompt, 3, 0.7, seed=0)


def test_parameters_that_cannot_be_had_on_one_rank_are_reported_on_all(comm):
    def refuse(stages):
        if comm.rank == comm.size - 1:
            raise ArgumentError("not there")

    with Mesh(comm, pipe=comm.size) as mesh, pytest.raises(ArgumentError, match="not there"):
        build_decoder(plan(comm.size), mesh, "float32", 8, refuse)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_bytes_are_drawn_from_the_softmax_of_the_scaled_logits(temperature):
    logits = np.array([0.0, 1.0, -1.0, 2.0], np.float32)
    random = np.random.default_rng(0)
    counts = np.bincount([draw(logits, temperature, random) for _ in range(20_000)], minlength=4)
    expected = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
    assert np.abs(counts / 20_000 - expected).max() < 5 * 0.5 / np.sqrt(20_000)  # five standard deviations of a share


def test_huge_logits_and_tiny_temperatures_do_not_overflow():
    logits = np.array([-3e38, 3e38, 0.0], np.float32)
    assert draw(logits, 1.0, np.random.default_rng(0)) == 1
    assert draw(np.array([0.0, 1e-3], np.float32), 1e-9, np.random.default_rng(0)) == 1
    assert draw(logits, 0.0, np.random.default_rng(0)) == 1


def test_the_last_index_can_be_drawn_and_none_beyond_it():
    almost_one = SimpleNamespace(random=lambda: np.nextafter(1.0, 0.0))
    assert draw(np.zeros(256, np.float32), 1.0, almost_one) == 255
    assert draw(np.array([0.0, -200.0]), 1.0, almost_one) == 0


def test_generated_bytes_cannot_harm_a_terminal():
    assert readable(b"a\tb\n\x1b[2J\r\x07\xff") == "a\tb\n\ufffd[2J\ufffd\ufffd\ufffd"
    assert readable("gr\u00fc\u00df".encode()) == "gr\u00fc\u00df"
