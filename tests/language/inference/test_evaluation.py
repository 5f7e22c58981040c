"""The loss of a model on tokens: every window written out on one process, against any mesh."""

from __future__ import annotations

import math

import numpy as np
import pytest
from support.tolerance import close, close_norm
from support.training_tolerance import path, roundings

from mpipipe import Mesh, arrays, nn, schedules
from mpipipe.attention import Local
from mpipipe.errors import ConfigError, DataError, NonFiniteError
from mpipipe.language.data import Array
from mpipipe.language.inference.evaluation import Windows, build_evaluator, open_tokens, perplexity
from mpipipe.language.models import GPT, weights
from mpipipe.language.models.model_folder import open_on_all

MODEL = GPT(vocab=40, dim=16, layers=3, heads=4, kv_heads=2, hidden=24, seq=12, tied=True)
LENGTHS = (31, 1, 2, 13, 12, 40)  # of documents: 99 tokens
TOKENS = np.random.default_rng(0).integers(0, MODEL.vocab, sum(LENGTHS))
STARTS = np.cumsum([0, *LENGTHS[:-1]])


def model_folder(comm, folder):
    """Weights in a folder, and the stage that they are of."""
    with Mesh(comm, pipe=1, data=comm.size) as mesh:
        stage = nn.Stage(MODEL.build(Local()), "float64")
        for name, array in stage.parameters.items():
            array += np.random.default_rng(len(name) + array.size).normal(0, 0.15, array.shape)
        stage.parameters["7.1.weight"][...] = stage.parameters["0.weight"]
        weights.save(folder, MODEL, [stage], schedules.gpipe(1, 1), mesh)
    return stage


def written_out(stage, length, by_document):
    """{document: [losses of its tokens]} by the definition, one window after the other, in float64."""
    ends = [*STARTS[1:], len(TOKENS)] if by_document else [len(TOKENS)]
    starts = STARTS if by_document else [0]
    found = {}
    for document, (start, end) in enumerate(zip(starts, ends)):
        for first in range(start, end - 1, length):
            last = min(first + length, end - 1)
            if last - first < length and not by_document:
                continue
            logits, _ = stage.forward(TOKENS[None, first:last])
            logits = logits[0].astype(np.float64)
            top = logits.max(1)
            sums = top + np.log(np.exp(logits - top[:, None]).sum(1))
            targets = TOKENS[first + 1 : last + 1]
            found.setdefault(document, []).extend(sums - logits[np.arange(last - first), targets])
    return found


def evaluated(comm, folder, length, by_document, pipe=1, seq=1, tokens=TOKENS, **options):
    options = {"layout": "zigzag", "rows": 2, "dtype": "float64", "device": "cpu", **options}
    found = open_on_all(comm, str(folder))
    data = Array(tokens, STARTS, nbytes=4 * len(tokens))
    with Mesh(comm, pipe=pipe, seq=seq) as mesh:
        windows = Windows.of(data, length, by_document)
        with build_evaluator(found, mesh, length, **options) as evaluator:
            steps = list(evaluator.run(data, windows))
            assert steps[-1] == len(windows) and steps == sorted(set(steps))
            return evaluator.result(by_document, data.nbytes / len(data))


CUTS = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4)]  # pipe x seq; the rest are replicas


WAYS = [(12, False), (8, False), (9, True), (12, True)]


@pytest.mark.parametrize(
    ("pipe", "seq", "length", "by_document"), [(*cut, *way) for at, cut in enumerate(CUTS) for way in WAYS[at % 2 :: 2]]
)
def test_every_mesh_gives_the_losses_of_windows_written_out(comm, mpi_tmp_path, pipe, seq, length, by_document):
    if comm.size % (pipe * seq):
        pytest.skip(f"needs a multiple of {pipe * seq} ranks")
    expected = written_out(model_folder(comm, mpi_tmp_path), length, by_document)
    found = evaluated(comm, mpi_tmp_path, length, by_document, pipe, seq)
    losses = [loss for each in expected.values() for loss in each]
    assert found.tokens == len(losses) == (99 - len(LENGTHS) if by_document else 98 // length * length)
    terms = path(MODEL) + len(losses)
    close(found.loss, np.mean(losses), terms, dtype=np.float64)
    close(perplexity(found.loss), math.exp(np.mean(losses)), terms * math.ceil(np.mean(losses)), dtype=np.float64)
    close(found.bits_per_byte, np.mean(losses) / math.log(2) / 4, terms, dtype=np.float64)
    assert list(found.documents) == (list(expected) if by_document else [])
    for document, each in found.documents.items():
        assert each.tokens == len(expected[document])
        close(each.nats, np.sum(expected[document]), terms, dtype=np.float64)
    assert len({repr(each) for each in comm.allgather(found)}) == 1


@pytest.mark.parametrize("layout", ["contiguous", "striped"])
def test_short_windows_in_other_layouts(comm, mpi_tmp_path, layout):
    expected = written_out(model_folder(comm, mpi_tmp_path), 12, True)
    found = evaluated(comm, mpi_tmp_path, 12, True, seq=comm.size, layout=layout)
    for document, each in found.documents.items():
        close(each.nats, np.sum(expected[document]), path(MODEL) + 40, dtype=np.float64)


def test_documents_may_be_unknown():
    class Plain(Array):
        def starts(self, start, stop):
            return None

    assert len(Windows.of(Plain(TOKENS), 12, False)) == 8
    with pytest.raises(DataError, match="do not say where documents begin"):
        Windows.of(Plain(TOKENS), 12, True)


def test_windows_follow_each_other():
    data = Array(TOKENS, STARTS)
    assert list(Windows.of(data, 40, False)) == [(0, 40, 0), (40, 40, 0)]
    assert list(Windows.of(data, 20, True)) == [
        (0, 20, 0), (20, 10, 0), (32, 1, 2), (34, 12, 3), (47, 11, 4), (59, 20, 5), (79, 19, 5),
    ]  # fmt: skip
    assert len(Windows.of(data, 98, False)) == 1
    with pytest.raises(DataError, match="too short"):
        Windows.of(data, 99, False)
    with pytest.raises(DataError, match="too short"):
        Windows.of(Array([1, 2], [0, 1]), 5, True)


def test_data_are_looked_for_in_the_working_folder_of_rank_0_alone(comm, mpi_tmp_path, monkeypatch):
    model_folder(comm, mpi_tmp_path)
    own = mpi_tmp_path / f"own-{comm.rank}"
    own.mkdir()
    monkeypatch.chdir(own)
    if comm.rank == 0:
        np.save("tokens.npy", TOKENS)
    else:
        own.rmdir()
    found = open_on_all(comm, str(mpi_tmp_path))
    with Mesh(comm, pipe=comm.size) as mesh:
        tokens, unit = open_tokens(found, ["tokens.npy"], mesh)
    assert unit == "tokens"
    np.testing.assert_array_equal(tokens.read(0, len(tokens)), TOKENS)


def test_a_window_longer_than_the_model_allows_is_refused(comm, mpi_tmp_path):
    model_folder(comm, mpi_tmp_path)
    with pytest.raises(ConfigError, match="longer than the model allows"):
        evaluated(comm, mpi_tmp_path, 13, False)


@pytest.mark.parametrize("token", [40, -1])
def test_a_token_that_the_model_does_not_know_is_refused_by_its_place(comm, mpi_tmp_path, token):
    model_folder(comm, mpi_tmp_path)
    tokens = TOKENS.copy()
    tokens[50] = token
    with pytest.raises(DataError, match="out of range") as caught:
        evaluated(comm, mpi_tmp_path, 12, False, pipe=comm.size, tokens=tokens)
    assert f"id {token} at position 50" in str(caught.value)


def test_a_loss_that_is_not_finite_is_an_error_on_every_rank(comm, mpi_tmp_path):
    model_folder(comm, mpi_tmp_path)
    found = open_on_all(comm, str(mpi_tmp_path))

    def spoil(stages, mesh):
        for stage in stages:
            stage.parameters.flat[...] = np.nan

    object.__setattr__(found, "load", spoil)
    data = Array(TOKENS)
    with Mesh(comm, pipe=comm.size) as mesh, np.errstate(all="ignore"):
        with pytest.raises(NonFiniteError):
            with build_evaluator(found, mesh, 12, layout="zigzag", rows=1, dtype="float64", device="cpu") as evaluator:
                for _ in evaluator.run(data, Windows.of(data, 12, False)):
                    pass
                evaluator.result(False, None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gpu_gives_the_losses_of_the_host(gpu, comm, mpi_tmp_path, dtype):
    model_folder(comm, mpi_tmp_path)
    with arrays.own_stream("cuda"):
        there = evaluated(comm, mpi_tmp_path, 9, True, pipe=comm.size, dtype=dtype, device="cuda")
    here = evaluated(comm, mpi_tmp_path, 9, True, pipe=comm.size, dtype=dtype)
    count = roundings(MODEL) if dtype == "bfloat16" else path(MODEL)
    close_norm(there.loss, here.loss, count, dtype, "the loss")
    assert there.tokens == here.tokens and list(there.documents) == list(here.documents)
