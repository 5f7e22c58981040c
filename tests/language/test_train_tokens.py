"""Trainings on tokens: what is read, attention within documents, epochs, resumes, and data that do not fit."""

import math
from functools import partial
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.harness import on_rank_0
from support.small_training import config_in, records
from support.token_files import random_documents, write_tokens
from support.tolerance import close, largest
from support.training_tolerance import close_curves, path
from support.windows import training_starts

from mpipipe import nn
from mpipipe.attention import Local
from mpipipe.errors import ConfigError, DataError, MismatchError
from mpipipe.language import data
from mpipipe.language.data.windows import segments, shuffled
from mpipipe.language.models import GPT
from mpipipe.language.models.model_folder import open_model
from mpipipe.language.packing import PackedAttend, Packing
from mpipipe.train import train

pytestmark = pytest.mark.few
VOCAB = 37
SMALL = GPT(vocab=VOCAB, dim=16, layers=2, heads=2, hidden=32, seq_len=16)  # what `config` trains, with batches of 8


@pytest.fixture
def tokens(comm, mpi_tmp_path):
    """A file of tokens, in which a document is never longer than 20 tokens."""
    file = mpi_tmp_path / "tokens"
    if comm is None:
        return file
    if comm.rank == 0:
        ids, starts, nbytes = random_documents(np.random.default_rng(0), 200, VOCAB, longest=20)
        write_tokens(file, ids, starts, nbytes, VOCAB)
    comm.Barrier()
    return file


@pytest.fixture
def config(comm, tokens, mpi_tmp_path):
    """config(name, **keys): a small training in the folder `name`."""
    if comm is None:
        return None
    keys = dict(data=[str(tokens)], steps=4, eval_every=2, eval_batches=2, dtype="float64")
    return config_in(mpi_tmp_path, comm, **keys)


def loss_of(rows, pieces):
    """Mean loss of a new model over rows of 17 tokens, where each piece (start, stop) of a row goes through alone."""
    stage, total = nn.Stage(SMALL.build(Local()), dtype="float64", seed=0), 0.0
    for row, cuts in zip(rows, pieces):
        for start, stop in cuts:
            logits, _ = stage.forward(row[None, start:stop])
            value, _ = nn.softmax_cross_entropy(logits, row[None, start + 1 : stop + 1])
            total += float(value) * (stop - start)
    return total / (16 * len(rows))


@pytest.mark.parametrize("packing", ["none", "segments"])
def test_the_loss_of_packed_documents_is_that_of_each_alone(comm, config, tokens, packing):
    """In the validation of a new model; without packing, of each row as a whole."""
    chosen = config(packing=packing, steps=1)
    train(chosen, GPT, comm)
    text = data.find([tokens]).open(16).validation
    last = len(text) - 17
    starts = [number * last // 15 for number in range(16)]
    rows = [np.asarray(text.read(start, 17), np.int64) for start in starts]
    pieces = []
    for start in starts:
        inside = [] if packing == "none" else [p - start for p in text.starts(start + 1, start + 16)]
        pieces.append(list(zip([0, *inside], [*inside, 16])))
    assert packing == "none" or max(map(len, pieces)) > 2
    close(records(chosen)[0]["validation"], loss_of(rows, pieces), path(SMALL, 16 * SMALL.seq_len))


def test_packing_without_documents_is_a_warning(comm, config, capfd):
    source = data.Source.of_arrays(np.arange(1900) % VOCAB, np.arange(100) % VOCAB, VOCAB)
    train(config("plain", data=[], packing="segments", steps=1), GPT, comm, data=source)
    assert capfd.readouterr().err.count("packing = segments changes nothing") == (comm.rank == 0)
    train(config("documents", packing="segments", steps=1), GPT, comm)
    assert "changes nothing" not in capfd.readouterr().err


def test_packed_documents_keep_the_window_of_each_layer():
    model = GPT(vocab=VOCAB, dim=16, layers=3, heads=2, hidden=32, seq_len=16, windows=(3, None, 5))
    packing = Packing(microbatches=2)
    whole = nn.Stage(model.build(PackedAttend(Local(), packing)), dtype="float64")
    alone = nn.Stage(model.build(Local()), dtype="float64")
    ids = np.random.default_rng(0).integers(0, VOCAB, (4, 16))
    cuts = [[0, 7, 16], [0, 16], [0, 1, 2, 16], [0, 12, 16]]
    packing.begin(np.array([np.searchsorted(row, np.arange(16), "right") for row in cuts]))
    for microbatch in (1, 0):
        rows = slice(2 * microbatch, 2 * microbatch + 2)
        found, _ = whole.forward(ids[rows], nn.Position(microbatch=microbatch))
        for row, offsets, logits in zip(ids[rows], cuts[rows], found):
            expected = [alone.forward(row[None, start:stop])[0][0] for start, stop in pairwise(offsets)]
            close(logits, np.concatenate(expected), path(model), largest(*expected))


def test_learned_positions_are_refused_where_documents_are_packed(comm, config):
    learned = partial(GPT, positions="learned")
    with pytest.raises(ConfigError, match="learned positions"):
        train(config(packing="segments"), learned, comm)
    train(config(steps=1), learned, comm)


@pytest.mark.long
def test_packed_trainings_of_all_cuts_agree_to_rounding(comm, config):
    """1F1B has several micro-batches in flight, and recomputes; a ring shares each row."""
    cuts = [
        dict(pipe=comm.size, recompute=True, microbatches=4),
        dict(pipe=1),
        dict(pipe=comm.size, chunks=6 // comm.size, schedule="interleaved_1f1b", microbatches=4),
        dict(pipe=comm.size, schedule="zero_bubble_h1", microbatches=8),
        dict(pipe=1, seq=comm.size, microbatches=3),
        dict(pipe=1, seq=comm.size, layout="striped"),
    ]
    found = []
    for number, cut in enumerate(cuts if comm.size > 1 else cuts[:2]):
        chosen = config(str(number), packing="segments", **cut)
        train(chosen, GPT, comm)
        found.append([[line["loss"], line["grad_norm"]] for line in records(chosen)[1:]])
    for other in found[1:]:
        close_curves(other, found[0], SMALL)
    plain = config("plain")
    train(plain, GPT, comm)
    assert abs(records(plain)[1]["loss"] - found[0][0][0]) > 1e-4


@pytest.mark.parametrize("keys", [dict(packing="segments", order="epoch"), dict(order="epoch", dtype="float32")])
def test_a_training_on_tokens_goes_on_bit_by_bit(comm, config, tokens, keys):
    """Behind a checkpoint, over the end of an epoch."""
    keys = dict(keys, batch=32, pipe=comm.size, save_every=2, keep=9)
    whole = config("whole", steps=6, **keys)
    train(whole, GPT, comm)
    assert 32 * 5 > len(data.find([tokens]).open(16).train) // 16  # more than one epoch
    comm.Barrier()
    begin = str(Path(whole.out, "checkpoints", "step-00000002"))
    rest = config("rest", steps=6, resume=begin, **keys)
    train(rest, GPT, comm)
    assert records(rest) == [line for line in records(whole) if line["step"] > 2]


def test_losses_count_in_bits_per_byte_and_the_sample_in_ids(comm, config, tokens, capsys):
    chosen = config(sample_bytes=5)
    train(chosen, GPT, comm)
    source, lines = data.find([tokens]).open(16), records(chosen)
    per_byte = [len(text) / text.nbytes / math.log(2) for text in (source.train, source.validation)]
    assert "bits_per_byte" not in lines[0]
    for line in lines[1:]:
        close(line["bits_per_byte"], line["loss"] * per_byte[0], 8)
        if "validation" in line:
            close(line["validation_bits_per_byte"], line["validation"] * per_byte[1], 8)
    printed = capsys.readouterr().out
    if comm.rank == 0:
        last = printed.splitlines()
        assert last[-1].endswith(f" bits/byte={lines[-1]['validation_bits_per_byte']:.4f}")
        assert "batch 8 x 16 tokens" in printed and f"{len(source.train):,} tokens of text" in printed
        at = next(number for number, line in enumerate(last) if line.startswith("--- sample (prompt: 32 tokens"))
        shown = list(map(int, last[at + 1].split()))
        assert shown[:32] == source.validation.read(0, 32).tolist() and len(shown) == 37 and max(shown) < VOCAB


def test_a_source_of_the_users_own_gives_the_training_of_its_file(comm, config, tokens):
    train(config("file"), GPT, comm)
    source = data.find([tokens]).open(16)
    ids = [text.read(0, len(text)) for text in (source.train, source.validation)]
    train(config("own", data=[]), GPT, comm, data=data.Source.of_arrays(*ids, vocab=VOCAB))
    found, expected = records(config("own")), records(config("file"))
    for line in expected:
        line.pop("bits_per_byte", None), line.pop("validation_bits_per_byte", None)  # an array has no bytes
    assert found == expected
    with pytest.raises(ConfigError, match="given twice"):
        train(config("twice"), GPT, comm, data=source)
    if comm.size > 1:
        ids[0][0] = comm.rank
        with pytest.raises(MismatchError, match="different data"):
            train(config("other", data=[]), GPT, comm, data=data.Source.of_arrays(*ids, vocab=VOCAB))


def test_data_that_do_not_fit_are_one_error_on_all_ranks_before_anything_is_written(comm, config, mpi_tmp_path):
    on_rank_0(comm, (mpi_tmp_path / "tokenizer.json").write_text, "{}")
    for keys, error, match in [
        (dict(vocab=VOCAB - 1), DataError, "another vocabulary"),
        (dict(tokenizer=str(mpi_tmp_path)), ConfigError, "another tokenizer"),
        (dict(tokenizer=str(mpi_tmp_path), data=[]), ConfigError, "the data are bytes"),
    ]:
        chosen = config("never", **keys)
        with pytest.raises(error, match=match):
            train(chosen, GPT, comm)
        comm.Barrier()
        assert not Path(chosen.out).exists()


def test_a_model_may_have_more_ids_than_the_data(comm, config):
    train(config(vocab=64), GPT, comm)
    assert open_model(config().out).model.vocab == 64


@given(st.integers(1, 300), st.binary(min_size=16, max_size=16))
@settings(max_examples=30)
def test_every_number_comes_once_in_a_permutation(count, key):
    assert sorted(shuffled(place, count, key) for place in range(count)) == list(range(count))


def test_an_epoch_has_each_window_once_and_the_next_one_another_order():
    def starts(first, last, seed=3):
        keys = dict(seed=seed, batch=6, seq_len=7, order="epoch")
        return [
            start for step in range(first, last) for start in training_starts(211, step=step, rows=slice(0, 6), **keys)
        ]

    first, second = starts(0, 5), starts(5, 10)  # 30 windows: 210 inputs, and one more target
    assert sorted(first) == sorted(second) == list(range(0, 210, 7))
    assert first != second and first != sorted(first) and starts(0, 5, seed=4) != first
    assert starts(2, 3) == first[12:18]
    parts = [
        training_starts(211, seed=3, step=1, batch=6, rows=slice(r, r + 2), seq_len=7, order="epoch") for r in (0, 2, 4)
    ]
    assert list(chain.from_iterable(parts)) == first[6:12]


def test_segments_number_the_documents_of_each_row():
    text = data.Array(np.zeros(20, int), documents=[0, 3, 4, 9, 15])
    assert segments(text, [0, 2, 4, 8], 6).tolist() == [
        [0, 0, 0, 1, 2, 2], [0, 1, 2, 2, 2, 2], [0, 0, 0, 0, 0, 1], [0, 1, 1, 1, 1, 1],
    ]  # fmt: skip
    assert segments(data.Array(np.zeros(9, int)), [1, 2], 3).tolist() == [[0, 0, 0]] * 2
