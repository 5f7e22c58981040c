"""A configuration and a number of ranks become a model, a schedule and a cut, or an error with the remedy."""

import pytest
from support.text_plan import text_plan

from mpipipe import schedules
from mpipipe.errors import ArgumentError, ConfigError
from mpipipe.language.models import GPT
from mpipipe.train import TrainConfig

SMALL = dict(dim=16, layers=3, heads=2, seq_len=8, batch=12)


def plan(pipe=1, replicas=1, **keys):
    return text_plan(TrainConfig(**{**SMALL, **keys}), pipe, replicas)[1]


def test_the_cut_is_by_cost_with_embedding_and_head_counted():
    made = plan(2, layers=2, dim=8, hidden=8, seq_len=4, microbatches=1)
    costs = GPT(layers=2, dim=8, heads=2, hidden=8, seq_len=4).costs()
    slowest = max(sum(costs[start:stop]) for start, stop in made.layer_ranges)
    assert slowest == min(max(sum(costs[:cut]), sum(costs[cut:])) for cut in range(1, len(costs)))
    assert made.layer_ranges[-1] == (5, 6)  # with a width of 8 the head of 256 bytes outweighs both blocks


@pytest.mark.parametrize(
    ("pipe", "replicas", "expected"), [(1, 1, 4), (2, 1, 8), (3, 1, 12), (4, 1, 12), (2, 4, 3), (260, 1, 12)]
)
def test_four_microbatches_a_rank_by_default_but_no_more_than_sequences(pipe, replicas, expected):
    """Four for each rank of a long pipeline would be a schedule above the limit of their forwards."""
    made = plan(pipe, replicas, layers=max(3, pipe))
    assert made.schedule.microbatches == expected
    assert made.rows == 12 // replicas


@pytest.mark.parametrize(
    ("pipe", "replicas", "keys", "error", "match"),
    [
        (1, 5, {}, ConfigError, "does not divide"),
        (1, 3, {"microbatches": 5}, ConfigError, "fewer sequences than micro-batches"),
        (2, 1, {"schedule": "forward_only"}, ConfigError, "without backward"),
        (2, 1, {"chunks": 2}, ArgumentError, "one stage per rank"),
        (1, 1, {"schedule": "1b1f"}, ArgumentError, "unknown schedule"),
        (1, 1, {"heads": 3}, ArgumentError, "heads"),
    ],
)
def test_what_does_not_fit_is_refused_here_or_in_other_rooms(pipe, replicas, keys, error, match):
    with pytest.raises(error, match=match):
        plan(pipe, replicas, **keys)


@pytest.mark.parametrize(("pipe", "layers", "chunks"), [(9, 4, 1), (12, 5, 1), (2, 4, 5)])
def test_too_few_layers_are_told_in_pieces(pipe, layers, chunks):
    """Attention and feed-forward of each, embedding, and head."""
    keys = dict(chunks=chunks, schedule="interleaved_1f1b") if chunks > 1 else {}
    assert len(plan(pipe, layers=layers, **keys).layer_ranges) == pipe * chunks
    with pytest.raises(ConfigError, match="too few pieces") as caught:
        plan(pipe, layers=layers - 1, **keys)
    assert caught.value.found == f"{2 * layers} pieces and cannot fill {pipe * chunks} stages"


def test_as_many_forwards_are_run_again_as_the_limit_needs():
    without, made = plan(4, microbatches=8), plan(4, microbatches=8, recompute_limit=2)
    assert max(schedules.peak_memory(without.schedule)) == 4 and max(schedules.peak_memory(made.schedule)) == 2
    assert 0 < len(made.schedule.recomputed) < 4 * 8
    with pytest.raises(ArgumentError, match="keeps this memory limit"):
        plan(4, schedule="zero_bubble_h1", microbatches=8, recompute_limit=3)
    with pytest.raises(ConfigError, match="both given"):
        plan(4, recompute=True, recompute_limit=2)
