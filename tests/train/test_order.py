"""What a configuration plans; an order of the user's own trains as a schedule with a name, and a resume finds it."""

from dataclasses import replace
from pathlib import Path

import pytest
from support.small_training import config_in, records
from support.text_plan import text_plan

from mpipipe import checkpoint, schedules
from mpipipe.errors import ArgumentError, ConfigError, ScheduleError
from mpipipe.job import inprocess
from mpipipe.language.models import GPT
from mpipipe.train import TrainConfig, train
from mpipipe.train.config import toml_line

RANKS, CHUNKS, MICROBATCHES = 2, 2, 3
SMALL = dict(layers=4, batch=6, steps=4, eval_every=2, save_every=2, pipe=RANKS, chunks=CHUNKS, microbatches=None)


@pytest.fixture
def config(tmp_path):
    """config(name, **keys): a small training on two ranks with two stages each."""
    return config_in(tmp_path, **SMALL)


@pytest.fixture
def order(tmp_path):
    """The path of an order on a V with split backwards, which no schedule of the package has."""
    made = schedules.with_recompute(schedules.v_min(RANKS, MICROBATCHES))
    path = tmp_path / "order.csv"
    path.write_text(made.to_csv())
    return path


def run(config):
    return inprocess.run(RANKS, lambda comm: train(config, GPT, comm))


def test_an_order_trains_to_the_same_bits_as_a_schedule_with_a_name(config, order, capsys):
    by_name = config("named", schedule="zero_bubble_v", microbatches=MICROBATCHES)
    of_file = config(schedule=str(order))
    run(by_name)
    capsys.readouterr()
    run(of_file)
    assert "; order " in capsys.readouterr().out.splitlines()[0]
    assert records(of_file) == records(by_name)
    saved = checkpoint.read(of_file.out).state["configuration"]["schedule"]
    assert saved == order.read_text()


def test_a_resume_takes_the_order_that_the_file_has_then(config, order):
    first = config(schedule=str(order), steps=2)
    run(first)
    other = schedules.zero_bubble_v(RANKS, MICROBATCHES).to_csv()
    order.write_text(other)
    run(replace(first, resume="auto", steps=4))
    assert checkpoint.read(first.out).state["configuration"]["schedule"] == other
    order.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        run(replace(first, resume="auto", steps=5))


def plan(table, **keys):
    keys = {**SMALL, "schedule": table, **keys}
    return text_plan(TrainConfig(**keys), keys["pipe"])[1]


def test_the_plan_takes_the_placement_and_the_microbatches_of_the_order():
    table = schedules.v_half(RANKS, MICROBATCHES).to_csv()
    made = plan(table).schedule
    assert (made.placement, made.microbatches, made.to_csv()) == ((0, 1, 1, 0), MICROBATCHES, table)
    assert plan("0F0,2F0,2B0,0B0\n1F0,1B0\n").schedule.placement == (0, 1, 0)  # one stage on the second rank
    other = plan(schedules.v_min(RANKS, MICROBATCHES).to_csv()).schedule
    assert made.name.startswith("order ") and made.name != other.name


@pytest.mark.parametrize(
    "keys, match",
    [
        (dict(pipe=4), "not of pipe = 4"),
        (dict(chunks=1), "not of chunks = 1"),
        (dict(microbatches=6), "not of microbatches = 6"),
        (dict(batch=2), "fewer sequences than micro-batches"),
    ],
)
def test_an_order_of_other_sizes_is_refused(keys, match):
    with pytest.raises(ConfigError, match=match) as refusal:
        plan(schedules.v_half(RANKS, MICROBATCHES).to_csv(), **keys)
    assert str(MICROBATCHES) in refusal.value.found or "2 sequences" in refusal.value.found


@pytest.mark.parametrize(
    "table, error, match",
    [
        ("0F0,1F0\n1B0,0B0\n", ScheduleError, "is on another rank"),
        ("0F0,3F0,0B0,3B0\n1F0,2F0,2B0,1B0\n", ScheduleError, "wait|before"),
        ("0F0,3F0\n1F0,2F0\n", ConfigError, "without backward passes"),
    ],
)
def test_an_order_that_cannot_train_is_refused_before_anything_is_written(config, order, table, error, match):
    order.write_text(table)
    chosen = config(schedule=str(order))
    with pytest.raises(error, match=match):
        run(chosen)
    assert not Path(chosen.out).exists()


def test_an_order_of_many_micro_batches_is_read_back_from_a_configuration(tmp_path):
    table = schedules.gpipe(1, 20_000).to_csv()
    (tmp_path / "config.toml").write_text(toml_line("schedule", table))
    assert TrainConfig.load(str(tmp_path / "config.toml")).schedule == table


# -- a configuration and a number of ranks become a schedule and a cut, or an error with the remedy --------------------


TEXT = dict(dim=16, layers=3, heads=2, seq_len=8, batch=12)


def plan_of(pipe=1, replicas=1, **keys):
    return text_plan(TrainConfig(**{**TEXT, **keys}), pipe, replicas)[1]


def test_the_cut_is_by_cost_with_embedding_and_head_counted():
    made = plan_of(2, layers=2, dim=8, hidden=8, seq_len=4, microbatches=1)
    costs = GPT(layers=2, dim=8, heads=2, hidden=8, seq_len=4).costs()
    slowest = max(sum(costs[start:stop]) for start, stop in made.layer_ranges)
    assert slowest == min(max(sum(costs[:cut]), sum(costs[cut:])) for cut in range(1, len(costs)))
    assert made.layer_ranges[-1] == (5, 6)  # with a width of 8 the head of 256 bytes outweighs both blocks


@pytest.mark.parametrize(
    ("pipe", "replicas", "expected"), [(1, 1, 4), (2, 1, 8), (3, 1, 12), (4, 1, 12), (2, 4, 3), (260, 1, 12)]
)
def test_four_microbatches_a_rank_by_default_but_no_more_than_sequences(pipe, replicas, expected):
    """Four for each rank of a long pipeline would be a schedule above the limit of their forwards."""
    made = plan_of(pipe, replicas, layers=max(3, pipe))
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
        plan_of(pipe, replicas, **keys)


@pytest.mark.parametrize(("pipe", "layers", "chunks"), [(9, 4, 1), (12, 5, 1), (2, 4, 5)])
def test_too_few_layers_are_told_in_pieces(pipe, layers, chunks):
    """Attention and feed-forward of each, embedding, and head."""
    keys = dict(chunks=chunks, schedule="interleaved_1f1b") if chunks > 1 else {}
    assert len(plan_of(pipe, layers=layers, **keys).layer_ranges) == pipe * chunks
    with pytest.raises(ConfigError, match="too few pieces") as caught:
        plan_of(pipe, layers=layers - 1, **keys)
    assert caught.value.found == f"{2 * layers} pieces and cannot fill {pipe * chunks} stages"


def test_as_many_forwards_are_run_again_as_the_limit_needs():
    without, made = plan_of(4, microbatches=8), plan_of(4, microbatches=8, recompute_limit=2)
    assert max(schedules.peak_memory(without.schedule)) == 4 and max(schedules.peak_memory(made.schedule)) == 2
    assert 0 < len(made.schedule.recomputed) < 4 * 8
    with pytest.raises(ArgumentError, match="keeps this memory limit"):
        plan_of(4, schedule="zero_bubble_h1", microbatches=8, recompute_limit=3)
    with pytest.raises(ConfigError, match="both given"):
        plan_of(4, recompute=True, recompute_limit=2)
