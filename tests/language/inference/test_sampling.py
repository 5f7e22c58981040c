"""How a token is drawn: softmax with temperature, against its plain definition."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpipipe.errors import ArgumentError
from mpipipe.language.inference.generation import Sampling, draw, generator


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
