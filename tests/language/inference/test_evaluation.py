"""The loss of a model on tokens: every window written out on one process, against any mesh."""

import math
from pathlib import Path

import numpy as np
import pytest
from support.token_files import write_tokens
from support.tolerance import close, close_norm
from support.training_tolerance import path, roundings

from mpipipe import Mesh, arrays, nn
from mpipipe.attention import Local
from mpipipe.errors import ConfigError, DataError, NonFiniteError
from mpipipe.language.data import Array
from mpipipe.language.inference.evaluation import build_evaluator, count_windows, open_tokens, perplexity
from mpipipe.language.models import GPT, weights
from mpipipe.language.models.model_folder import open_on_all

MODEL = GPT(vocab=40, dim=16, layers=3, heads=4, kv_heads=2, hidden=24, seq_len=12, tied=True)
TOKENS = np.random.default_rng(0).integers(0, MODEL.vocab, 99)


def model_folder(comm, folder):
    """Weights in a folder, and the stage that they are of."""
    with Mesh(comm, pipe=1, data=comm.size) as mesh:
        stage = nn.Stage(MODEL.build(Local()), "float64")
        for name, array in stage.parameters.items():
            array += np.random.default_rng(len(name) + array.size).normal(0, 0.15, array.shape)
        stage.parameters["7.1.weight"][...] = stage.parameters["0.weight"]
        weights.save(folder, MODEL, [stage], mesh)
    return stage


def evaluated(comm, folder, length, pipe=1, seq=1, tokens=TOKENS, **options):
    options = {"rows": 2, "dtype": "float64", "device": "cpu", **options}
    found = open_on_all(comm, str(folder))
    data = Array(tokens, nbytes=4 * len(tokens))
    with Mesh(comm, pipe=pipe, seq=seq) as mesh:
        with build_evaluator(found, mesh, length, **options) as evaluator:
            return evaluator.run(data, length, count_windows(data, length))


CUTS = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4)]  # pipe x seq; the rest are replicas


@pytest.mark.parametrize(("pipe", "seq", "length"), [(*cut, (12, 8)[at % 2]) for at, cut in enumerate(CUTS)])
def test_every_mesh_gives_the_losses_of_windows_written_out(comm, mpi_tmp_path, pipe, seq, length):
    if comm.size % (pipe * seq):
        pytest.skip(f"needs a multiple of {pipe * seq} ranks")
    stage, count = model_folder(comm, mpi_tmp_path), 98 // length * length
    windows, targets = (TOKENS[start : start + count].reshape(-1, length) for start in (0, 1))
    loss, _ = nn.softmax_cross_entropy(stage.forward(windows)[0], targets)
    found = evaluated(comm, mpi_tmp_path, length, pipe, seq)
    assert found.tokens == count
    terms = path(MODEL) + count
    close(found.loss, loss, terms, dtype=np.float64)
    close(perplexity(found.loss), math.exp(loss), terms * math.ceil(loss), dtype=np.float64)
    close(found.bits_per_byte, loss / math.log(2) / 4, terms, dtype=np.float64)
    assert len({repr(each) for each in comm.allgather(found)}) == 1


def test_windows_follow_each_other_and_the_rest_is_left_out():
    data = Array(TOKENS)
    assert (count_windows(data, 40), count_windows(data, 98)) == (2, 1)
    with pytest.raises(DataError, match="too short"):
        count_windows(data, 99)


def test_model_and_data_are_looked_for_in_the_working_folder_of_rank_0_alone(comm, mpi_tmp_path, monkeypatch):
    model_folder(comm, mpi_tmp_path)
    own = mpi_tmp_path / f"own-{comm.rank}"
    own.mkdir()
    monkeypatch.chdir(own)
    if comm.rank == 0:
        write_tokens(Path("tokens"), TOKENS, [0], [99], MODEL.vocab)
    else:
        own.rmdir()
    found = open_on_all(comm, "..")
    with Mesh(comm, pipe=comm.size) as mesh:
        tokens, unit = open_tokens(found, ["tokens"], mesh)
        for source, match in (([], "nothing to evaluate on"), ([__file__], "takes tokens, and no text")):
            with pytest.raises(ConfigError, match=match):
                open_tokens(found, source, mesh)
    assert unit == "tokens"
    np.testing.assert_array_equal(tokens.read(0, len(tokens)), TOKENS)


def test_a_window_longer_than_the_model_allows_is_refused(comm, mpi_tmp_path):
    model_folder(comm, mpi_tmp_path)
    with pytest.raises(ConfigError, match="longer than the model allows"):
        evaluated(comm, mpi_tmp_path, 13)


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
            with build_evaluator(found, mesh, 12, rows=1, dtype="float64", device="cpu") as evaluator:
                evaluator.run(data, 12, count_windows(data, 12))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gpu_gives_the_losses_of_the_host(gpu, comm, mpi_tmp_path, dtype):
    model_folder(comm, mpi_tmp_path)
    with arrays.own_stream("cuda"):
        there = evaluated(comm, mpi_tmp_path, 9, pipe=comm.size, dtype=dtype, device="cuda")
    here = evaluated(comm, mpi_tmp_path, 9, pipe=comm.size, dtype=dtype)
    count = roundings(MODEL) if dtype == "bfloat16" else path(MODEL)
    close_norm(there.loss, here.loss, count, dtype, "the loss")
    assert there.tokens == here.tokens
