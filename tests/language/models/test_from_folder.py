"""Trainings that begin from a model folder, what they leave, and the folder that `convert` makes of it."""

import json
from pathlib import Path

import numpy as np
import pytest
from support import huggingface_reference as theirs
from support.harness import on_rank_0
from support.small_training import metrics
from support.tolerance import close
from support.training_tolerance import path
from support.windows import validation_batch

from mpipipe import nn
from mpipipe.attention import Local
from mpipipe.errors import ArgumentError, ConfigError
from mpipipe.language import data
from mpipipe.language.models import GPT, huggingface
from mpipipe.language.models.model_folder import convert, open_model
from mpipipe.train import TrainConfig, train

pytestmark = pytest.mark.few
FAMILIES = {
    "llama": {"tie_word_embeddings": True, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "qwen2": {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    "gpt2": {},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_training_begins_with_the_model_of_the_folder_and_leaves_one_with_the_loss_that_it_reports(
    comm, folder, chosen, source, family
):
    place, config = folder(family, **FAMILIES[family], bos_token_id=11)
    on_rank_0(comm, (place / "tokenizer_config.json").write_text, '{"eos_token": null}')
    run = chosen(from_=str(place))
    record = train(run, GPT, comm, data=source)
    if comm.rank:
        return
    inputs, targets = validation_batch(source.validation, index=0, batches=1, batch=4, rows=slice(0, 4), seq_len=8)
    before, _ = nn.softmax_cross_entropy(theirs.logits(config, theirs.tensors_of(config), inputs), targets)
    close(metrics(run)[0]["validation"], before, path(open_model(place).model), dtype="float64")
    left = Path(run.out, "folder")
    convert(run.out, left)
    assert (left / "tokenizer_config.json").exists()
    after = json.loads((left / "config.json").read_text())
    assert (after["model_type"], after["bos_token_id"]) == (family, 11)
    longest = {"gpt2": "n_positions"}.get(family, "max_position_embeddings")
    assert after[longest] == config[longest]  # not the shorter sequences of the training
    found = open_model(left)
    assert (found.kind, found.dtype) == ("huggingface", "float64")
    stage = nn.Stage(found.model.build(Local()), "float64")
    huggingface.read(found.folder, stage.parameters)
    loss, _ = nn.softmax_cross_entropy(stage.forward(inputs)[0], targets)
    close(loss, record.validation, path(found.model), dtype="float64")
    assert loss != before


def test_an_answer_of_a_trained_model_ends_where_it_did_before(comm, folder, chosen, source):
    place, _ = folder(eos_token_id=7)
    if comm.rank == 0:
        (place / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 40, 4000]}))
    train(chosen(from_=str(place)), GPT, comm, data=source)
    assert open_model(place).ends == open_model(chosen().out).ends == (5, 40)
    comm.Barrier()  # all have looked
    if comm.rank == 0:
        Path(chosen().out, "weights", "step-00000002", "generation_config.json").unlink()
        assert open_model(chosen().out).ends == (7,)


def test_the_sample_of_a_training_is_no_longer_than_learned_positions(comm, folder, chosen, source, capsys):
    place, config = folder("gpt2")
    train(chosen(from_=str(place), sample_bytes=200), GPT, comm, data=source)
    room = config["n_positions"] + 1
    if comm.rank == 0:
        prompt = min(32, room // 2)
        assert f"--- sample (prompt: {prompt} tokens of validation text):" in capsys.readouterr().out


REFUSED = [
    (dict(dim=24), "dim contradicts the model to begin from"),
    (dict(vocab=50), "vocab contradicts the model to begin from"),
    (dict(rope_base=3.0), "rope_base contradicts"),
    (dict(seq_len=65), "max_positions of a GPT"),
    (dict(from_="nothing"), "no model is here"),
]


@pytest.mark.parametrize(("keys", "match"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_contradicts_the_folder_is_refused_before_anything_is_written(comm, folder, chosen, source, keys, match):
    place, _ = folder("gpt2")
    with pytest.raises(ArgumentError, match=match):
        train(chosen(**{"from_": str(place), **keys}), GPT, comm, data=source)
    assert not Path(chosen().out).exists()


def test_sizes_beside_a_folder_are_refused_even_where_they_are_the_defaults(tmp_path):
    with pytest.raises(ConfigError, match="dim and from are both given"):
        TrainConfig.load(dim=128, **{"from": "folder"})
    (tmp_path / "job.toml").write_text('from = "folder"\nlayers = 4\n')
    with pytest.raises(ConfigError, match="layers and from are both given"):
        TrainConfig.load(str(tmp_path / "job.toml"))
    assert TrainConfig.load(**{"from": "folder"}).from_ == "folder"


def test_data_of_more_token_ids_than_the_model_are_refused(comm, folder, chosen):
    place, _ = folder()
    tokens = np.arange(1000) % 49
    with pytest.raises(ConfigError, match="more token ids than the model"):
        train(chosen(from_=str(place)), GPT, comm, data=data.Source.of_arrays(tokens, tokens, vocab=49))


def test_bytes_are_no_tokens_of_a_model_with_a_tokenizer(comm, mpi_tmp_path, folder, chosen):
    place, _ = folder("llama", vocab_size=300)
    text = Path(mpi_tmp_path, "text.txt")
    if comm.rank == 0:
        (place / "tokenizer.json").write_text("{}")
        text.write_text("some text " * 100)
    comm.Barrier()
    with pytest.raises(ConfigError, match="the data are bytes, and the model has a tokenizer"):
        train(chosen(from_=str(place), data=[str(text)]), GPT, comm)
    assert not Path(chosen().out).exists()


def test_the_tokenizer_in_a_folder_is_opened_and_goes_along(comm, mpi_tmp_path, folder, chosen):
    library = pytest.importorskip("tokenizers")
    place, _ = folder()
    if comm.rank == 0:
        made = library.Tokenizer(library.models.WordLevel({"one": 5, "two": 6, "?": 7}, unk_token="?"))
        made.pre_tokenizer = library.pre_tokenizers.Whitespace()
        made.save(str(place / "tokenizer.json"))
    comm.Barrier()
    assert open_model(place).tokenizer().encode("two one") == [6, 5]
    tokens = np.random.default_rng(0).integers(5, 8, 3000)
    given = data.Source.of_arrays(tokens[:2500], tokens[2500:], vocab=8)
    train(chosen(from_=str(place)), GPT, comm, data=given)
    assert open_model(chosen().out).tokenizer().decode([5, 6]) == "one two"
