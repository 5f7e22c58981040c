"""How a token is drawn: softmax with temperature, top-k and top-p, each against its plain definition."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpipipe.errors import ArgumentError
from mpipipe.language.inference.generation import Sampling, draw, generator


def shares(logits, sampling, draws=4_000):
    random = np.random.default_rng(0)
    return np.bincount([draw(logits, sampling, random) for _ in range(draws)], minlength=len(logits)) / draws


def defined(logits, temperature, top_k, top_p):
    """Probabilities by the definition, in Python's own numbers: sort, keep k, keep up to p, divide."""
    weights = [np.exp((float(x) - float(max(logits))) / temperature) for x in logits]
    order = sorted(range(len(weights)), key=lambda index: (-float(logits[index]), index))[: top_k or len(weights)]
    whole, reached, kept = sum(weights[index] for index in order), 0.0, []
    for index in order:
        kept.append(index)
        reached += weights[index]
        if reached >= top_p * whole:
            break
    total = sum(weights[index] for index in kept)
    return np.array([weights[index] / total if index in kept else 0.0 for index in range(len(weights))])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (0, 0.7), (3, 0.7), (1, 0.9), (9, 0.999)])
def test_tokens_are_drawn_with_the_probabilities_of_the_definition(temperature, top_k, top_p):
    logits = np.array([0.0, 1.0, -1.0, 2.0, 1.0, 1.0], np.float32)
    found = shares(logits, Sampling(temperature=temperature, top_k=top_k, top_p=top_p))
    expected = defined(logits, temperature, top_k, top_p)
    assert (found[expected == 0] == 0).all()
    assert np.abs(found - expected).max() < 5 * 0.5 / np.sqrt(4_000)  # five standard deviations of a share


@given(
    st.lists(st.sampled_from([-2.0, -0.5, 0.0, 0.25, 1.0, 3.0]), min_size=1, max_size=9),
    st.integers(0, 10),
    st.sampled_from([0.05, 0.3, 0.61, 0.9, 1.0]),
    st.floats(0, 1, exclude_max=True),
)
def test_each_number_gives_the_token_at_its_place_in_the_sum(logits, top_k, top_p, number):
    token = draw(np.array(logits), Sampling(1.0, top_k, top_p), SimpleNamespace(random=lambda: number))
    ends = np.cumsum(defined(logits, 1.0, top_k, top_p))
    assert ends[token - 1] - 1e-12 <= number if token else True
    assert number <= ends[token] + 1e-12 and defined(logits, 1.0, top_k, top_p)[token] > 0


def test_of_equal_logits_the_lowest_ids_count_as_likelier():
    logits = np.array([1.0, 2.0, 2.0, 2.0])
    assert draw(logits, Sampling(temperature=0), np.random.default_rng(0)) == 1
    assert (shares(logits, Sampling(1.0, top_k=2), 200) > 0).tolist() == [False, True, True, False]


def test_huge_logits_and_tiny_temperatures_do_not_overflow():
    logits = np.array([-3e38, 3e38, 0.0], np.float32)
    for temperature in (1.0, 0.0):
        assert draw(logits, Sampling(temperature), np.random.default_rng(0)) == 1
        assert draw(logits, Sampling(temperature, top_p=0.5), np.random.default_rng(0)) == 1
    assert draw(np.array([0.0, 1e-3], np.float32), Sampling(1e-9), np.random.default_rng(0)) == 1


def test_the_last_index_can_be_drawn_and_none_beyond_it():
    almost_one = SimpleNamespace(random=lambda: np.nextafter(1.0, 0.0))
    assert draw(np.zeros(256, np.float32), Sampling(1.0), almost_one) == 255
    assert draw(np.array([0.0, -200.0]), Sampling(1.0), almost_one) == 0
    assert draw(np.zeros(8), Sampling(1.0, top_k=3), almost_one) == 2


def test_random_numbers_follow_from_seed_prompt_and_position_alone():
    places = [(seed, "sample", position, prompt) for seed in (0, 1) for prompt in (0, 1, 2**40) for position in (0, 1)]
    numbers = [generator(*place).random() for place in places]
    assert len(set(numbers)) == len(numbers)
    assert numbers == [generator(*place).random() for place in reversed(places)][::-1]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": np.nan}, "temperature"),
        ({"temperature": np.inf}, "temperature"),
        ({"top_k": -1}, "top-k"),
        ({"top_p": 0.0}, "top-p"),
        ({"top_p": 1.5}, "top-p"),
        ({"top_p": np.nan}, "top-p"),
    ],
)
def test_what_is_out_of_range_is_refused(options, match):
    with pytest.raises(ArgumentError, match=match):
        Sampling(**options)
