"""Many prompts at once: each gets the answer that it gets alone, on any ranks, whatever is in flight."""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpipipe import Mesh, nn, schedules
from mpipipe.attention import Local
from mpipipe.errors import ArgumentError, ConfigError, NonFiniteError
from mpipipe.language.inference.generation import (
    Sampling,
    SequenceCaches,
    answers,
    build_decoder,
    check_prompts,
    draw,
    forward_plan,
    generator,
)
from mpipipe.language.models import GPT
from mpipipe.planning.layer_plan import LayerPlan

OPTIONS = dict(
    positions="learned", max_positions=96, norm="layer", windows=(3, None, 48), qk_norm=True, head_dim=6,
    feed_forward="gelu", qkv_bias=True,
)  # fmt: skip
MODEL = GPT(vocab=40, dim=16, layers=3, heads=4, kv_heads=2, hidden=24, seq_len=48)
COUNT = 12


def fill(stages):
    for stage in stages:
        for name, array in stage.parameters.items():
            array += np.random.default_rng(len(name) + array.size).normal(0, 0.15, array.shape)


def prompts_of(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, MODEL.vocab, length).tolist() for length in lengths]


LENGTHS = (1, 30, 3, 2, 9, 1, 17)


def decoded(mesh, prompts, sampling, batch, microbatches, count=COUNT, model=MODEL, chunks=1):
    """{number: answer}, and why each has ended."""
    schedule = schedules.forward_only(mesh.pipe.size, chunks, microbatches)
    plan = LayerPlan(schedule, schedules.partition(model.costs(), schedule.stages), rows=1)
    found, ended = {}, {}
    capacity = max(map(len, prompts)) + count
    with build_decoder(model, plan, mesh, "float64", capacity, fill, batch=batch) as decoder:
        for answer in answers(decoder, prompts, count, sampling):
            assert answer.number == len(found)  # in the order of prompts
            found[answer.number], ended[answer.number] = answer.tokens, answer.ended
        stages = [inner for stage in decoder.pipeline.stages for inner in stage.inner_stages]
        layers = [layer for stage in stages for top in stage.layers for _, layer in top.walk("")]
        for cache in [layer.attend for layer in layers if isinstance(layer, nn.SelfAttention)]:
            assert isinstance(cache, SequenceCaches)
            if batch == len(prompts):  # no rank asked about the last token
                fed = [len(prompt) + len(found[number]) - 1 for number, prompt in enumerate(prompts)]
                assert [cache.caches[number].length for number in range(batch)] == fed
    return found, ended


def by_whole_forwards(prompts, sampling, count=COUNT, model=MODEL):
    """The same by forwards of the whole sequence on one process, without any cache."""
    return _by_whole_forwards(tuple(map(tuple, prompts)), sampling, count, model)


@cache
def _by_whole_forwards(prompts, sampling, count, model):
    model = replace(model, dropout=0.0)
    stage = nn.Stage(
        model.build(lambda window=None: Local(window=min(window or model.seq_len, model.seq_len))), "float64"
    )
    fill([stage])
    for first, *others in stage.ties.values():
        for other in others:
            stage.parameters[other][...] = stage.parameters[first]
    found = {}
    for number, prompt in enumerate(prompts):
        tokens = list(prompt)
        for position in range(count):
            logits = stage.forward(np.array([tokens]))[0][0, -1]
            tokens.append(draw(logits, sampling, generator(sampling.seed, "sample", position, number)))
            if tokens[-1] in sampling.stop:
                break
        found[number] = tokens[len(prompt) :]
    return found


WAYS = [(7, 1), (3, 4), (1, 2), (7, 8)]  # batch, micro-batches


@pytest.mark.parametrize("pipe", [1, 2, 4])
@pytest.mark.parametrize(("batch", "microbatches"), WAYS)
def test_a_batch_gets_the_answers_of_whole_forwards(comm, pipe, batch, microbatches):
    if comm.size % pipe:
        pytest.skip(f"needs a multiple of {pipe} ranks")
    prompts, sampling = prompts_of(LENGTHS), Sampling(0.9, seed=5)
    with Mesh(comm, pipe=pipe) as mesh:
        found, ended = decoded(mesh, prompts, sampling, batch, microbatches)
    assert found == by_whole_forwards(prompts, sampling)
    assert ended == dict.fromkeys(range(len(prompts)), "count")
    assert len(set(comm.allgather(repr(found)))) == 1


@pytest.mark.parametrize(("pipe", "batch", "tied"), [(1, 7, False), (2, 3, True), (2, 7, False), (4, 2, False)])
def test_slices_of_the_head_give_the_logits_of_each_answer(comm, pipe, batch, tied):
    """On several ranks messages have room for all of a batch; what is no answer's is dropped."""
    if comm.size % pipe:
        pytest.skip(f"needs a multiple of {pipe} ranks")
    model, prompts = replace(MODEL, vocab=41, head_slices=5, tied=tied), prompts_of(LENGTHS)
    with Mesh(comm, pipe=pipe) as mesh:
        found, _ = decoded(mesh, prompts, Sampling(0), batch, 3, model=model)
    assert found == by_whole_forwards(prompts, Sampling(0), model=model)


@pytest.mark.long
@pytest.mark.parametrize("pipe", [1, 2, 4])
@pytest.mark.parametrize(("chunks", "sizes"), [(1, {}), (2, dict(tied=True, layers=4, dropout=0.3)), (1, OPTIONS)])
def test_texts_longer_than_the_sequences_of_a_training_look_back_over_their_length(comm, pipe, chunks, sizes):
    if comm.size % pipe:
        pytest.skip(f"needs a multiple of {pipe} ranks")
    model = GPT(**{**vars(MODEL), "seq_len": 24, **sizes})
    prompts, sampling = prompts_of((9, 55)), Sampling(0.7, seed=3)
    with Mesh(comm, pipe=pipe) as mesh:
        found, _ = decoded(mesh, prompts, sampling, 2, 3, model=model, chunks=chunks)
    assert found == by_whole_forwards(prompts, sampling, model=model)
    assert len(set(found[1])) > 5


def test_a_stop_token_ends_its_answer_and_no_other(comm):
    prompts, plain = prompts_of(LENGTHS), Sampling(1.0, seed=3)
    long = by_whole_forwards(prompts, plain)
    stop = (long[1][4], long[4][0])
    with Mesh(comm, pipe=comm.size) as mesh:
        found, ended = decoded(mesh, prompts, Sampling(1.0, seed=3, stop=stop), 3, 4)
    for number, answer in long.items():
        places = [place for place, token in enumerate(answer) if token in stop]
        assert found[number] == (answer[: places[0] + 1] if places else answer)
        assert ended[number] == ("stop" if places else "count")
    assert set(ended.values()) == {"stop", "count"}


@pytest.mark.parametrize(
    ("prompts", "count", "match"),
    [
        ([], 1, "no prompts"),
        ([[]], 1, "the prompt is empty"),
        ([[1], []], 1, "prompt 1 is empty"),
        ([[1]], 0, "number of tokens"),
        ([[1], [3, 40]], 1, "prompt 1 has a token"),
        ([[-1]], 1, "the prompt has a token"),
    ],
)
def test_prompts_that_no_model_can_continue_are_refused(prompts, count, match):
    with pytest.raises(ArgumentError, match=match):
        check_prompts(prompts, count, 40)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_an_error_on_every_rank(comm, temperature, value):
    def spoil(stages):
        fill(stages)
        for stage in stages:
            if "7.1.weight" in stage.parameters:
                stage.parameters["7.1.weight"][7, 0] = value

    with Mesh(comm, pipe=comm.size) as mesh, np.errstate(invalid="ignore"):
        with build_decoder(MODEL, forward_plan(MODEL, comm.size), mesh, "float64", 9, spoil) as decoder:
            with pytest.raises(NonFiniteError, match="logits") as caught:
                list(answers(decoder, [[1, 2, 3]], 6, Sampling(temperature)))
    assert caught.value.found == "1 of 40 are not"
    assert caught.value.reported_elsewhere == (comm.rank != comm.size - 1)  # the rank that draws reports


def test_a_text_longer_than_learned_positions_and_an_error_of_one_rank_are_refused_at_once(comm):
    def refuse(stages):
        if comm.rank == comm.size - 1:
            raise ArgumentError("not there")

    model = GPT(**{**vars(MODEL), "layers": 3, "positions": "learned", "max_positions": 20, "seq_len": 12})
    plan = forward_plan(model, comm.size)
    with Mesh(comm, pipe=comm.size) as mesh:
        with pytest.raises(ConfigError, match="learned positions") as caught:
            build_decoder(model, plan, mesh, "float64", 22, fill).__enter__()
        assert "at most 21" in caught.value.expected
        with pytest.raises(ArgumentError, match="not there"):
            build_decoder(model, plan, mesh, "float64", 21, refuse).__enter__()
        with build_decoder(model, plan, mesh, "float64", 21, fill) as decoder:
            (answer,) = answers(decoder, [[1] * 18], 3, Sampling(0))
            assert len(answer.tokens) == 3


# -- how a token is drawn: softmax with temperature, against its plain definition --------------------------------------


def defined(logits, temperature):
    """Probabilities by the definition, in Python's own numbers."""
    weights = [np.exp((float(x) - float(max(logits))) / temperature) for x in logits]
    return np.array(weights) / sum(weights)


@given(
    st.lists(st.sampled_from([-2.0, -0.5, 0.0, 0.25, 1.0, 3.0]), min_size=1, max_size=9),
    st.floats(0, 1, exclude_max=True),
)
def test_each_number_gives_the_token_at_its_place_in_the_sum(logits, number):
    token = draw(np.array(logits), Sampling(1.0), SimpleNamespace(random=lambda: number))
    ends = np.cumsum(defined(logits, 1.0))
    assert ends[token - 1] - 1e-12 <= number if token else True
    assert number <= ends[token] + 1e-12


def test_of_equal_logits_the_lowest_id_counts_as_likeliest():
    assert draw(np.array([1.0, 2.0, 2.0, 2.0]), Sampling(temperature=0), np.random.default_rng(0)) == 1


def test_huge_logits_and_tiny_temperatures_do_not_overflow():
    logits = np.array([-3e38, 3e38, 0.0], np.float32)
    for temperature in (1.0, 0.0):
        assert draw(logits, Sampling(temperature), np.random.default_rng(0)) == 1
    assert draw(np.array([0.0, 1e-3], np.float32), Sampling(1e-9), np.random.default_rng(0)) == 1


def test_the_last_index_can_be_drawn_and_none_beyond_it():
    almost_one = SimpleNamespace(random=lambda: np.nextafter(1.0, 0.0))
    assert draw(np.zeros(256, np.float32), Sampling(1.0), almost_one) == 255
    assert draw(np.array([0.0, -200.0]), Sampling(1.0), almost_one) == 0


def test_random_numbers_follow_from_seed_prompt_and_position_alone():
    places = [(seed, "sample", position, prompt) for seed in (0, 1) for prompt in (0, 1, 2**40) for position in (0, 1)]
    numbers = [generator(*place).random() for place in places]
    assert len(set(numbers)) == len(numbers)
    assert numbers == [generator(*place).random() for place in reversed(places)][::-1]


@pytest.mark.parametrize("temperature", [-1.0, np.nan, np.inf])
def test_what_is_out_of_range_is_refused(temperature):
    with pytest.raises(ArgumentError, match="temperature"):
        Sampling(temperature)
