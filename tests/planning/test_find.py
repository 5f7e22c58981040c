"""Plans from measurements: what is counted, what a training makes of them, and what is refused; no time is asserted."""

import itertools
import threading

import numpy as np
import pytest

from mpipipe import Mesh, nn
from mpipipe.cli.plan import show, write
from mpipipe.errors import ConfigError, MpipipeError
from mpipipe.files import check_new
from mpipipe.job import inprocess
from mpipipe.language.models import GPT
from mpipipe.language.models.fine_tuning import FineTuning
from mpipipe.language.task import TextTask
from mpipipe.planning import Choice, LayerCosts, Link, RankCosts, links, probe, step_memory
from mpipipe.planning.find import find_plan
from mpipipe.schedules import simulate
from mpipipe.train import TrainConfig, train
from mpipipe.train.config import read_keys
from mpipipe.train.training_plan import measured_ranks

pytestmark = pytest.mark.usefixtures("hasty")
SMALL = dict(
    dim=16, layers=2, heads=2, hidden=32, seq_len=8, batch=4, steps=2, warmup=1, eval_every=2, eval_batches=1,
    sample_bytes=0, device="cpu", plan="auto",
)  # fmt: skip


def measured_on(comm, architecture=GPT, pipe=None, **keys):
    config = TrainConfig.load(**{**SMALL, **keys})
    mesh = Mesh(comm, pipe=pipe or comm.size // config.seq, seq=config.seq)
    return measured_ranks(config, TextTask(config, architecture, tuning=FineTuning(config.freeze)), mesh)


def plans_on(ranks, architecture=GPT, pipe=None, nics=None, **keys):
    def on_each_rank(comm):
        measured = measured_on(comm, architecture, pipe, **keys)
        with measured.mesh:
            return find_plan(measured, "cpu", **(nics or {}))

    return inprocess.run(ranks, on_each_rank)


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "keys"), [(1, {}), (2, {}), (3, {"fixed": ("schedule",)}), (2, {"seq": 2}),
                                             (2, {"pipe": 1, "tied": True}), (2, {"packing": "segments"})])  # fmt: skip
def test_a_plan_is_made_on_any_mesh(ranks, keys):
    found = plans_on(ranks, **keys)
    first, choice = found[0], found[0].best.choice
    assert first.best == first.plans[0] and {each.best.choice for each in found} == {choice}
    pipe = keys.get("pipe", ranks // keys.get("seq", 1))
    assert first.profile.ranks == pipe and sum(choice.partition) == 6
    assert len(choice.partition) == pipe * choice.chunks
    seconds = [plan.seconds for plan in first.plans]
    assert seconds == sorted(seconds) and seconds[0] > 0
    assert not any(each.plans for each in found[1:])


@pytest.mark.parametrize(
    ("seq_len", "given", "order"),
    [
        (8, {}, "pipe,data,seq"), (256, {}, "data,pipe,seq"),
        (8, {"orders": ["data,pipe,seq"]}, "data,pipe,seq"),  # as a user has said
    ],
)  # fmt: skip
def test_plans_are_ranked_by_what_they_take_where_ranks_share_network_cards(seq_len, given, order, capsys):
    """Two pipelines of two ranks, two on a node, over a slow card: sums of gradients stay on a node, or messages."""

    nics = dict(nics_per_node=1, nic="0,1e3,2", **given)
    first, *others = plans_on(4, pipe=2, seq_len=seq_len, nics=nics)
    assert first.links.nic_ranks == 2 and {each.best.choice for each in others} == {first.plans[0].choice}
    assert order == first.plans[0].order
    seconds = [plan.seconds for plan in first.plans[:20]]
    assert seconds == sorted(seconds)
    for plan in first.plans[:20]:
        assert plan.seconds > 2 * first.profile.scale * simulate(plan.schedule, plan.costs).makespan
    show(first)
    said = capsys.readouterr().out
    assert said.split()[0] == "schedule" and len(said.splitlines()) >= 12
    assert "\nreal steps take " in said and f"--mesh-order {order}" in said


def test_layers_of_a_place_cost_what_they_cost_on_its_slowest_replica(monkeypatch):
    def costs(measured, action):
        slow = 4.0 if measured.mesh.coords[:2] == (1, 1) else 1.0
        return dict.fromkeys(measured.problem.space.sizes, RankCosts((LayerCosts(slow, slow, slow, slow, slow),) * 6))

    def on_each_rank(comm):
        with (measured := measured_on(comm, pipe=2)).mesh:
            return probe.measure(measured)

    monkeypatch.setattr(probe, "layer_costs", costs)
    for profile in inprocess.run(4, on_each_rank):
        for ranks in profile.costs.values():
            assert [rank.layers[0].forward for rank in ranks] == [1.0, 4.0]


def test_a_plan_is_made_over_mpi(comm):
    measured = measured_on(comm, fixed=("schedule", "microbatches"), microbatches=2, layers=4)
    with measured.mesh:
        found = find_plan(measured, "cpu")
    assert sum(found.best.choice.partition) == 10 and found.best.choice.schedule == "one_f_one_b"
    assert found.profile.ranks == comm.size and (comm.rank == 0) == bool(found.plans)


def test_ranks_of_a_ring_make_as_many_turns_whatever_their_clocks_say(monkeypatch):
    turns, here, real = [0, 0], threading.local(), probe._turn

    def counted(timers):
        turns[here.rank] += 1
        real(timers)

    def on_each_rank(comm):
        here.rank = comm.rank
        here.now = itertools.count(step=(1e-9, 1.0)[comm.rank])
        with (measured := measured_on(comm, seq=2)).mesh:
            probe.layer_costs(measured)

    monkeypatch.setattr(probe, "_turn", counted)
    monkeypatch.setattr(probe, "perf_counter", lambda: next(here.now))
    monkeypatch.setattr(probe, "SECONDS", 0.5)
    monkeypatch.setattr(probe, "REPEATS", (1, 4))
    inprocess.run(2, on_each_rank)
    assert turns[0] == turns[1] > 0


def test_frozen_parameters_make_another_kind_and_have_no_state():
    plain, frozen = (
        inprocess.run(1, lambda comm, freeze=freeze: measured_on(comm, freeze=freeze).problem)[0]
        for freeze in ((), ("1.*",))
    )
    assert (plain.kinds, frozen.kinds) == ((0, 1, 2, 1, 2, 3), (0, 1, 2, 3, 2, 4))
    count = plain.trained_counts[1]
    assert frozen.trained_counts[1] == 0
    assert plain.states[1] == 16 * count and frozen.states[1] == 4 * count  # parameter, gradient, two of AdamW
    assert plain.states[0] == 16 * 256 * 16


class Saves(nn.Layer):
    """Leaves `count` arrays like its input for the backward, and one more between both halves of that."""

    def __init__(self, count):
        self.count = count
        self.declared = {"gain": nn.Parameter((1,), lambda generator, shape: np.ones(shape))}

    def forward(self, x):
        return x * self.gain, [x.copy() for _ in range(self.count)]

    def backward_input(self, dy, saved):
        return dy * self.gain, (dy.copy(), saved)

    def backward_weight(self, pending):
        self.gain_grad += pending[0].sum()


def test_bytes_of_activations_are_those_of_the_arrays_that_are_kept():
    class Known(GPT):
        def build(self, attend, positions=None, labels=False):
            made = super().build(attend, positions)
            return [*made[:1], Saves(3), *made[2:]]

    (found,) = plans_on(1, Known, schedule="gpipe", microbatches=2, chunks=1)
    profile = found.profile
    sizes = profile.sizes[2]
    one = 2 * 8 * 16 * 4  # two sequences of 8 positions, 16 wide, in float32
    assert sizes[1].input == sizes[1].output == one
    assert sizes[1].saved == 3 * one
    assert sizes[1].pending == 4 * one
    assert sizes[-1].loss == 2 * 8 * 256 * 4  # of logits


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_mean_link_is_found_from_three_chains(monkeypatch, ranks):
    action, message, transfer, step = 1.0, 0.25, 3.0, 10.0

    def seconds(comm, schedule, array):
        hops = schedule.stages - 1
        more = (schedule.microbatches - 1) * 2 * (action + min(2, hops) * message)
        return step + 2 * schedule.stages * action + 2 * hops * (2 * message + transfer) + more

    monkeypatch.setattr(links, "step_seconds", seconds)
    for link in inprocess.run(ranks, lambda comm: links.measure_link(comm, 64, action)):
        assert (link.message, link.transfer) == pytest.approx((message, transfer))
    assert inprocess.run(1, lambda comm: links.measure_link(comm, 64, action)) == [Link()]


def test_a_training_takes_the_plan_and_says_so(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("one two three\n" * 200)
    keys = dict(data=[str(tmp_path / "text.txt")], schedule="gpipe", recompute=True, microbatches=2)
    config = TrainConfig.load(**{**SMALL, **keys, "out": str(tmp_path / "run"), "memory_limit": "1G"})
    assert config.fixed == ("schedule", "microbatches", "recompute")
    records = inprocess.run(2, lambda comm: train(config, GPT, comm))
    said = capsys.readouterr().out
    assert "mpipipe: plan: gpipe, 1 chunk, 2 micro-batches, layers " in said and "forwards run again: all" in said
    again = TrainConfig.load(str(tmp_path / "run" / "config.toml"))  # which has the plan, and makes no other one
    assert (again.plan, again.memory_limit, again.fixed) == ("no", None, ())
    assert f"layers {','.join(map(str, again.partition))}, " in said and again.recompute
    plain = TrainConfig.load(**{**SMALL, **keys, "out": str(tmp_path / "plain"), "plan": "no"})
    assert inprocess.run(2, lambda comm: train(plain, GPT, comm))[0].loss == pytest.approx(records[0].loss, rel=1e-5)


def test_what_is_written_is_a_configuration_with_the_choice(tmp_path, capsys):
    choice = Choice("v_half", 2, 4, (2, 1, 1, 2), recompute_limit=3)
    given = {"dim": 16, "preempt_grace": float("inf"), "data": ['a "b"\n', "c\\ü"], "plan": "auto",
             "schedule": "gpipe", "tied": True}  # fmt: skip
    write(tmp_path / "plan.toml", {**given, "pipe": 2}, choice)
    config = TrainConfig.load(str(tmp_path / "plan.toml"))
    assert (config.schedule, config.chunks, config.microbatches) == ("v_half", 2, 4)
    assert (config.partition, config.recompute_limit, config.pipe, config.plan) == ((2, 1, 1, 2), 3, 2, "no")
    assert config.data == tuple(given["data"]) and config.tied and config.preempt_grace == float("inf")
    for path in (tmp_path / "plan.toml", tmp_path / "none" / "plan.toml"):
        with pytest.raises(ConfigError, match="the plan cannot be written"):
            check_new("the plan", str(path))
    assert read_keys(tmp_path / "plan.toml")["dim"] == 16
    assert "train --config" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("keys", "place", "text"),
    [
        ({"memory_limit": "1K"}, "cpu", "no plan keeps this memory limit"),
        ({"partition": "1,2"}, "cpu", "no schedule fits"),
        ({}, "cuda", "a plan is made on the CPU only"),
    ],
)
def test_what_cannot_be_is_refused_on_all_ranks(keys, place, text):
    def on_each_rank(comm):
        measured = measured_on(comm, **keys)
        with measured.mesh, pytest.raises(ConfigError, match=text):
            find_plan(measured, place)

    inprocess.run(2, on_each_rank)


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"memory_limit": "-1"}, "memory_limit: no number of bytes"),
        ({"partition": "2,-1"}, "partition: no partition"),
        ({"fixed": ("dim",)}, "fixed names dim, which no plan decides"),
        ({"plan": "yes"}, "no or auto"),
        ({"schedule": "order.csv"}, "plan = auto and an order of a schedule"),
        ({"fixed": ("partition",)}, "fixed names partition, (.*) which has no value"),
        ({"plan": "no", "memory_limit": "1G"}, "memory_limit without plan"),
        ({"plan": "no", "fixed": ("chunks",)}, "fixed without plan"),
    ],
)
def test_wrong_options_are_refused(keys, text):
    with pytest.raises(ConfigError, match=text):
        TrainConfig.load(**{**SMALL, **keys})


@pytest.mark.parametrize("module, name", [(step_memory, "Loss"), (probe, "measure_link"), (links, "timed_steps")])
def test_a_failure_on_one_rank_while_it_measures_ends_all(monkeypatch, module, name):
    real, here = getattr(module, name), threading.local()

    def broken(*arguments, **named):
        if here.rank == 1:
            raise RuntimeError("broken on rank 1")
        return real(*arguments, **named)

    def on_each_rank(comm):
        here.rank = comm.rank
        find_plan(measured_on(comm), "cpu")

    monkeypatch.setattr(module, name, broken)

    with pytest.raises((RuntimeError, MpipipeError), match="broken on rank 1"):
        inprocess.run(2, on_each_rank)
