"""Against `transformers`: logits, gradients, greedy texts, and folders that it opens; see transformers_judge."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support import transformers_judge as judge  # noqa: E402

from mpipipe import Mesh, nn, schedules  # noqa: E402
from mpipipe.attention import Local  # noqa: E402
from mpipipe.language.inference.generation import Sampling, answers, build_decoder  # noqa: E402
from mpipipe.language.models import huggingface  # noqa: E402
from mpipipe.language.models.huggingface.names import parts_of, shape_of, view  # noqa: E402
from mpipipe.language.models.model_folder import convert, open_model  # noqa: E402
from mpipipe.planning.layer_plan import LayerPlan  # noqa: E402

pytestmark = pytest.mark.judges
LOGITS = {"float32": 1e-5, "float64": 1e-10}
GRADIENTS = 1e-9


def stage_of(folder, dtype):
    found = huggingface.open_folder(folder)
    stage = nn.Stage(found.model.build(Local()), dtype, seed=3)
    huggingface.read(found, stage.parameters)
    return found, stage


def gradients_in_their_names(found, stage):
    """Our gradients as theirs: turned, transposed, cut, and summed over a tied matrix."""
    ours = {name: np.array(gradient) for name, gradient in stage.gradients.items()}
    for names in stage.ties.values():
        ours[names[0]] += sum(ours[name] for name in names[1:])
    for part in parts_of(found.family.table, found.model):
        yield (
            part.theirs,
            np.ascontiguousarray(view(part, ours[part.ours], found.model)).reshape(
                shape_of(part, ours[part.ours].shape, found.model)
            ),
        )


def check(tmp_path, family, dtype, **options):
    """Compare logits, and in float64 the gradients, of a random model."""
    with judge.in_float64(family) if dtype == "float64" else open("/dev/null"):
        model = judge.make(family, dtype, **options)
        model.save_pretrained(tmp_path / "model")
        ids, targets = judge.tokens(), judge.tokens(seed=2)
        expected = judge.logits_of(model, ids)
        loss, gradients = judge.gradients_of(model, ids, targets)
    found, stage = stage_of(tmp_path / "model", dtype)
    logits, saved = stage.forward(ids)
    apart = abs(logits - expected).max()
    print(f"judged: {family}, {dtype} {options}: logits {apart:.2e} of {abs(expected).max():.2f}", end="")
    assert apart <= LOGITS[dtype]
    if dtype == "float64":
        value, dlogits = nn.softmax_cross_entropy(logits, targets)
        stage.backward(dlogits, saved)
        worst = {
            name: abs(gradient - gradients[name]).max() for name, gradient in gradients_in_their_names(found, stage)
        }
        print(f", gradients {max(worst.values()):.2e} of {max(abs(g).max() for g in gradients.values()):.2f}", end="")
        assert set(worst) == set(gradients)
        assert abs(value - loss) <= GRADIENTS and max(worst.values()) <= GRADIENTS, worst
    print()
    return expected


@pytest.mark.parametrize("dtype", LOGITS)
@pytest.mark.parametrize("family", judge.FAMILIES)
def test_logits_and_gradients_are_those_of_transformers(tmp_path, family, dtype):
    check(tmp_path, family, dtype)


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
OPTIONS = [
    ("Llama 2", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}}),
    ("Llama 2", {"rope_parameters": YARN}),
    ("Llama 2", {"rope_parameters": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.3}}),
    ("Llama 2", {"rms_norm_eps": 0.1}),
    ("Llama 2", {"head_dim": 14}),
    ("Llama 2", {"attention_bias": True}),
    ("Llama 2", {"mlp_bias": True}),
    ("Llama 2", {"tie_word_embeddings": True}),
    ("Mistral", {"sliding_window": 3}),
    ("Mistral", {"sliding_window": None}),
    ("Qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    ("Qwen3", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2, "attention_bias": True}),
    ("GPT-2", {"layer_norm_epsilon": 0.1, "n_inner": 50}),
    ("GPT-2", {"tie_word_embeddings": False}),
]


@pytest.mark.parametrize(("family", "options"), OPTIONS, ids=[f"{f}-{','.join(o)}" for f, o in OPTIONS])
def test_options_that_change_the_result_are_read(tmp_path, family, options):
    expected = check(tmp_path, family, "float64", **options)
    with judge.in_float64(family):
        plain = judge.make(family, "float64")
        if sum(1 for _ in plain.parameters()) == len(huggingface.open_folder(tmp_path / "model").places):
            assert abs(judge.logits_of(plain, judge.tokens()) - expected).max() > 1e-3


@pytest.mark.parametrize("family", judge.FAMILIES)
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_a_folder_that_was_written_is_opened_bit_equal(tmp_path, family, stored):
    source, target = tmp_path / "source", tmp_path / "target"
    judge.make(family).to(getattr(__import__("torch"), stored)).save_pretrained(source, max_shard_size="40KB")
    convert(source, target, stored, most=30_000)
    before, after = (transformers.AutoModelForCausalLM.from_pretrained(path) for path in (source, target))
    assert json.loads((target / "config.json").read_text())["torch_dtype"] == stored
    assert type(after) is type(before) and after.dtype == before.dtype
    one, other = before.state_dict(), after.state_dict()
    assert set(one) == set(other)
    assert all(bool((one[name] == other[name]).all()) for name in one)
    ids = judge.tokens()
    np.testing.assert_array_equal(
        judge.logits_of(before.float(), ids).view(np.int32), judge.logits_of(after.float(), ids).view(np.int32)
    )


def cuts(size):
    return [(pipe, seq) for pipe in (1, 2, 4) for seq in (1, 2, 4) if pipe * seq <= size and size % (pipe * seq) == 0]


@pytest.mark.parametrize("family", judge.FAMILIES)
def test_256_greedy_tokens_are_those_of_transformers(comm, mpi_tmp_path, family):
    folder, expected = Path(mpi_tmp_path, "model"), None
    prompt = judge.tokens(1, 12)[0].tolist()
    if comm.rank == 0:
        with judge.in_float64(family):
            model = judge.make(family, "float64", size=0.6)
            model.save_pretrained(folder)
            expected = judge.greedy(model, prompt, 256)
    expected = comm.bcast(expected)
    found = open_model(folder)
    for pipe, seq in cuts(comm.size):
        with Mesh(comm, pipe=pipe, seq=seq) as mesh:
            schedule = schedules.forward_only(pipe, 1, 1)
            plan = LayerPlan(schedule, schedules.partition(found.model.costs(), pipe), rows=1)
            load = partial(found.load, mesh=mesh)
            with build_decoder(found.model, plan, mesh, "float64", len(prompt) + 256, load) as decoder:
                (answer,) = answers(decoder, [prompt], 256, Sampling(temperature=0.0))
        assert answer.tokens == expected, f"pipe {pipe}, seq {seq}"
    assert len(set(expected)) > 10  # a text, and not one token again and again
