"""A task that knows no text is trained, planned, saved and resumed as text is."""

import re
import threading
import time
import weakref
from dataclasses import replace
from functools import partial
from itertools import chain, count
from typing import NamedTuple

import numpy as np
import pytest
from support.small_training import metrics

from mpipipe import Branches, attention, nn, optim
from mpipipe.errors import ArgumentError, ConfigError, DataError, MismatchError
from mpipipe.exchange import HaloConv
from mpipipe.job import inprocess
from mpipipe.train import Task, TaskConfig, check_task, estimate_task, run, trainer

POINTS, WIDTH = 5, 8  # of which a rank of two has 3, and the other 2
SEEDS = count()
KEYS = dict(batch=8, steps=6, lr=0.05, warmup=0, log_every=1, eval_every=3, eval_batches=1, device="cpu")
EXACT = TaskConfig(**KEYS, dtype="float64")


class Scale(nn.Layer):
    """A layer of one's own: y = gain x."""

    def __init__(self, width):
        self.declared = {"gain": nn.Parameter((width,), lambda generator, shape: 1 + generator.standard_normal(shape))}

    def forward(self, x):
        return self.gain * x, x

    def backward_input(self, dy, saved):
        return self.gain * dy, (dy, saved)

    def backward_weight(self, pending):
        dy, x = pending
        self.gain_grad += (dy * x).reshape(-1, x.shape[-1]).sum(0)


class Field(Task):
    """Learns to move a field by a point: each point attends to all others, also to those of other ranks."""

    unit = "fields"

    def layers(self, shard):
        attend, positions = shard.attend(POINTS), shard.positions(POINTS)
        attention = nn.SelfAttention(WIDTH, 2, attend=attend, positions=positions)
        return [nn.Linear(1, WIDTH), nn.Residual(attention), lambda: Scale(WIDTH), nn.Gelu(), nn.Linear(WIDTH, 1)]

    def loss(self, output, target):
        error = output - target
        return float((error**2).mean()), 2 / error.size * error

    def batch(self, step, rows, shard):
        fields = np.random.default_rng(step).normal(size=(8, POINTS, 1))[rows.start : rows.stop]
        return shard.part(fields), shard.part(np.roll(fields, 1, axis=1))

    def validation(self, index, rows, shard):
        return self.batch(1000 + index, rows, shard)

    def metrics(self, output, target):
        return {"largest": float(np.abs(output).max()), "mse": float(((output - target) ** 2).mean())}

    def show(self, output, target, shard):
        return f"shown: {shard.whole(output).shape} of {len(target)}"


def trained(ranks, config, task=Field):
    return inprocess.run(ranks, lambda comm: run(task(), config, comm))[0]


def losses(out):
    return [[record[name] for name in ("loss", "validation", "mse") if name in record] for record in metrics(out)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    out = tmp_path_factory.mktemp("alone") / "run"
    trained(1, replace(EXACT, out=str(out)))
    return losses(out)


class Weighted(Field):
    def loss(self, output, target):
        return (*super().loss(output, target), 3 * target.size)


class OverBatch(Field):
    """A loss over all outputs of the batch: the mean of the means of its micro-batches."""

    def loss(self, output, target):
        values, gradients = zip(*map(super().loss, output, target))
        return float(np.mean(values)), [gradient / len(output) for gradient in gradients]

    loss.over_batch = True


@pytest.mark.parametrize(
    ("task", "ranks", "keys"),
    [
        (Field, 2, {}), (Field, 2, {"seq": 2}), (Field, 2, {"pipe": 1}), (Field, 4, {"pipe": 2, "seq": 2}),
        (Field, 4, {"pipe": 2, "schedule": "gpipe"}), (Weighted, 2, {"seq": 2}), (OverBatch, 2, {"schedule": "gpipe"}),
    ],
)  # fmt: skip
def test_it_learns_the_same_on_any_mesh(tmp_path, capsys, alone, task, ranks, keys):
    trained(ranks, replace(EXACT, **keys, out=str(tmp_path / "run")), task)
    for found, expected in zip(losses(tmp_path / "run"), alone):
        assert found == pytest.approx(expected, rel=1e-10)
    said = capsys.readouterr().out
    assert f"mpipipe: {task.__name__}: " in said and re.search(r"shown: \(\d, 5, 1\) of \d", said)
    assert "mpipipe: ok steps=6 loss=" in said and " fields/s=" in said and " mse=" in said
    assert alone[0][1] == pytest.approx(alone[0][0], rel=1e-10)  # a metric that is the loss


def test_a_loss_over_the_batch_is_checked_and_planned_on_paper():
    assert inprocess.run(1, lambda comm: check_task(OverBatch(), 0, comm))[0][1]
    assert estimate_task(lambda comm: (replace(EXACT, schedule="gpipe"), OverBatch()), 2).ranks


def test_layers_that_see_a_part_of_each_row_alone_are_named(tmp_path, capsys):
    class Apart(Field):
        def layers(self, shard):
            first, *_, last = super().layers(shard)
            attend, positions = shard.attend(POINTS), shard.positions(POINTS)
            whole = HaloConv(shard.comm, 1, nn.Conv(WIDTH, WIDTH, (3,), padding="periodic"))
            exchanging = [nn.SelfAttention(WIDTH, 2, attend=attend), nn.Residual(whole)]
            alone = [nn.Residual(nn.Conv(WIDTH, WIDTH, (3,), padding="same")), lambda: Scale(WIDTH)]
            alone += [nn.SelfAttention(WIDTH, 2, attend=attention.Local())] * self.mixes
            return [first, nn.LearnedPositions(POINTS, WIDTH, positions=positions), *exchanging, *alone, last]

    for mixes, seq, kinds in ((0, 1, ""), (0, 2, "Conv, Scale"), (1, 2, "Conv, Scale, SelfAttention")):
        Apart.mixes = mixes
        trained(2, replace(EXACT, seq=seq, steps=1, out=str(tmp_path / kinds / "run")), Apart)
        found = re.findall("mpipipe: note: (.*): on each rank of seq.*HaloConv.*shard.attend", capsys.readouterr().out)
        assert found == [kinds] * bool(kinds)


@pytest.mark.parametrize("ranks", [1, 2])
def test_it_is_planned(hasty, tmp_path, ranks):  # on one rank it is measured with more rows than its batches have
    trained(ranks, TaskConfig(**KEYS, plan="auto", out=str(tmp_path / "run")))
    assert 'partition = "' in (tmp_path / "run" / "config.toml").read_text()


@pytest.mark.long
def test_a_plan_is_made_of_steps_with_a_sharded_optimizer(hasty, tmp_path):
    trained(2, TaskConfig(**{**KEYS, "pipe": 1}, plan="auto", shard_optimizer=True, out=str(tmp_path / "run")))
    assert "shard_optimizer = true" in (tmp_path / "run" / "config.toml").read_text()


def test_groups_freezing_and_an_optimizer_of_its_own(tmp_path):
    class Frozen(Field):
        freeze = ("0.*",)
        groups = (optim.Group("2.*", lr=0.0),)
        stages = None

        def optimizer(self, stages, config):
            self.stages = stages
            return None

    class Slow(Frozen):
        def optimizer(self, stages, config):
            super().optimizer(stages, config)
            return optim.SGD(stages, 0.0, weight_decay=0.0, groups=[optim.Group("*", lr=0.0)])

    def parameters(task, steps, out):
        made, config = task(), replace(EXACT, steps=steps, out=str(tmp_path / out))
        inprocess.run(1, lambda comm: run(made, config, comm))
        return {name: array.copy() for stage in made.stages for name, array in stage.parameters.items()}

    drawn, moved = parameters(Slow, 1, "drawn"), parameters(Frozen, 2, "moved")
    same = {name for name in drawn if np.array_equal(drawn[name], moved[name])}
    assert same == {"0.weight", "0.bias", "2.gain"}
    with pytest.raises(ConfigError, match="a task with an optimizer of its own"):
        trained(2, replace(EXACT, pipe=1, shard_optimizer=True, out=str(tmp_path / "sharded")), Slow)
    for freeze, match, text in (
        (("0.*", "0.wieght"), "2.*", "freeze fits no parameter"),
        ((), "*.gian", r"groups fits no parameter(.|\n)*\*\.gian"),
        (("*",), "2.*", "nothing is left to train"),
    ):
        Slow.freeze, Slow.groups = freeze, (optim.Group(match, lr=0.0),)
        with pytest.raises(ConfigError, match=text):
            parameters(Slow, 3, "refused")


def test_the_bubble_counts_the_wait_for_a_batch(tmp_path, monkeypatch):
    class Late(Field):
        seconds = 0.0

        def batch(self, step, rows, shard):
            Late.seconds += 1000.0
            return super().batch(step, rows, shard)

    monkeypatch.setattr(trainer, "perf_counter", lambda: time.perf_counter() + Late.seconds)
    record = trained(1, replace(EXACT, out=str(tmp_path / "run")), Late)
    assert 0.99 < record.bubble < 1 and record.predicted < 1e-9


def test_a_validation_counts_its_batches_by_the_weights_of_the_loss(tmp_path):
    """Two batches with sums 2 and 90 of 1 and 9 tokens: the mean over tokens is 9.2, that of the means 6."""

    class Tokens(Task):
        def layers(self, shard):
            return [nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)]

        def batch(self, step, rows, shard):
            return self.validation(step, rows, shard)

        def validation(self, index, rows, shard):
            total, tokens = ((2.0, 1.0), (90.0, 9.0))[index % 2]
            return np.ones((len(rows), 1)), np.tile([[total, tokens]], (len(rows), 1))

        def loss(self, output, target):
            totals, tokens = target.sum(0)
            return totals / tokens, np.zeros_like(output), tokens

    trained(2, replace(EXACT, steps=2, eval_batches=2, out=str(tmp_path / "run")), Tokens)
    assert metrics(tmp_path / "run")[-1]["validation"] == pytest.approx(9.2)


# -- mistakes of a user's: one error on all ranks, before anything is written ------------------------------------------


def wrong(name, **changed):
    """A Field of which some methods do something else; each gets what Field's own returns, before its arguments."""

    def method(name, change):
        own = getattr(Field, name)
        return lambda self, *given: change(own(self, *given), *given)

    return type(name, (Field,), {name: method(name, change) for name, change in changed.items()})


def holes(made, *_):
    made[0][2, 0] = np.nan
    return made


class Twofold(Field):
    def loss(self, output, target):
        return (*super().loss(output, target), target.size)

    loss.mean_over_entries = False


class Counted(Field):
    def loss(self, output, target):
        return super().loss(output, target[0])

    def batch(self, step, rows, shard):
        inputs, targets = super().batch(step, rows, shard)
        return inputs, (targets, np.zeros((len(rows), 10)))

    metrics, show = Task.metrics, Task.show


class Twice(Field):
    def layers(self, shard):
        one = Scale(WIDTH)
        return [nn.Linear(1, WIDTH), lambda: one, lambda: one, nn.Linear(WIDTH, 1)]


OTHER = wrong("Other", layers=lambda made, *_: [*made[:4], nn.Linear(WIDTH, 1 + next(SEEDS))])
UNSEEDED = wrong("Unseeded", batch=lambda made, step, *rest: Field().batch(next(SEEDS), *rest))
RAGGED = wrong("Ragged", batch=lambda made, *_: (made[0][1:], made[1]))
BARE = wrong("Bare", loss=lambda made, output, target: float(output.sum()))
ACCURATE = wrong("Accurate", loss=lambda made, output, target: (*made, float((np.abs(output - target) < 1).mean())))
THIN = wrong("Thin", loss=lambda made, *_: (made[0], made[1][:, :1]))
LONGER = wrong("Longer", validation=lambda made, *_: tuple(np.tile(array, 2) for array in made))
UNFIXED = wrong("Unfixed", validation=lambda made, index, *rest: Field().validation(next(SEEDS), *rest))
# each rank has drawn data of its own
ELSEWHERE = wrong("Elsewhere", batch=lambda made, step, *rest: Field().batch(threading.get_ident() % 1000003, *rest))
SUMMED = wrong("Summed", loss=lambda made, output, target: (made[0] * len(target), made[1] * len(target)))
UNDIVIDED = wrong("Undivided", loss=lambda made, output, target: (made[0], made[1] * len(target)))
HITS = wrong("Hits", metrics=lambda _, output, target: {"hits": float((np.abs(output - target) < 1).sum())})
SHADOW = wrong("Shadow", metrics=lambda *_: {"bias": 0.1, "loss": 3.0})
MISFIT = wrong("Misfit", layers=lambda *_: [nn.Linear(1, WIDTH), nn.Linear(WIDTH + 1, WIDTH), nn.Linear(WIDTH, 1)])


class Pair(NamedTuple):
    first: object
    second: object


class Halves(nn.Layer):
    def forward(self, x):
        return Pair(x[:, :2].copy(), x[:, 2:].copy()), None

    def backward_input(self, dy, saved):
        return np.concatenate(dy, axis=1), None


class Known(Field):
    """The loss knows its output by names, and computes in float32."""

    def layers(self, shard):
        return [*super().layers(shard), Halves()]

    def loss(self, output, target):
        whole = np.concatenate([output.first, output.second], axis=1)
        value, gradient = super().loss(whole.astype(np.float32), target.astype(np.float32))
        gradient = gradient.astype(whole.dtype)
        return value, (gradient[:, :2].copy(), gradient[:, 2:].copy())

    metrics, show = Task.metrics, Task.show


class Sparse(Field):
    """No value of the first rows is valid, so nothing counts in the first micro-batches."""

    def batch(self, step, rows, shard):
        inputs, targets = super().batch(step, rows, shard)
        mask = np.repeat(np.arange(8) >= 5, POINTS).reshape(8, POINTS, 1)
        return inputs, (targets, mask[rows.start : rows.stop])

    def loss(self, output, target):
        error, count = (output - target[0]) * target[1], target[1].sum()
        with np.errstate(invalid="ignore", divide="ignore"):
            return float((error**2).sum() / count), 2 / count * error, float(count)

    def metrics(self, output, target):
        return {"mse": self.loss(output, target)[0]}

    show = Task.show


class Levels(Field):
    """The loss draws its noise out of a few levels, and its weight; at first those of the same rows are the same."""

    def __init__(self):
        once = [1.0, 1.0, 0.5, 1.0, 1.0]
        self.levels = chain(once, once, iter(partial(np.random.default_rng(0).choice, [1.0, 0.5, 2.0]), None))

    def loss(self, output, target):
        level = next(self.levels)
        error = level * (output - target)
        return float((error**2).mean()), 2 * level / error.size * error, float(level * error.size)

    metrics, show = Task.metrics, Task.show


class Narrow(Field):
    """In float16 gradients of a mean over so many entries are rounded coarsely."""

    def layers(self, shard):
        return [nn.Linear(1, 1 << 15)]

    def loss(self, output, target):
        error = output.astype(np.float32) - target
        return float((error**2).mean()), (2 / error.size * error).astype(output.dtype)

    metrics, show = Task.metrics, Task.show


class Undone(Sparse):
    """The first micro-batch that has a weight is judged."""

    def loss(self, output, target):
        value, gradient, count = super().loss(output, target)
        return value, count * gradient, count


@pytest.mark.parametrize("task", [Known, Sparse, Levels, Narrow])
def test_what_is_right_is_trained(tmp_path, task):
    keys = {"dtype": "float16", "microbatches": 1, "steps": 1} if task is Narrow else {"microbatches": 8}
    config = replace(EXACT, **keys, out=str(tmp_path / "run"))
    assert trained(1, config, task).step == config.steps
    assert all(loss > 0 for found in losses(tmp_path / "run") for loss in found)  # no NaN


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (
            OSError,
            r"step 4 of 6: Late.batch\(step=3, rows=0..7\) raised OSError: the tape ends(.|\n)*of .*test_task.py",
        ),
        (SystemExit, r"step 4 of 6: Late.batch\(step=3, rows=0..7\) raised SystemExit: the tape ends"),
        (None, r"step 4 of 6: layer 0 \(Linear\)(.|\n)*\(1, 5, 2\)"),
    ],
)
def test_a_reader_that_fails_later_says_in_which_step(tmp_path, kind, text):
    class Late(Field):
        def batch(self, step, rows, shard):
            if step == 3 and kind is not None:
                raise kind("the tape ends")
            inputs, targets = super().batch(step, rows, shard)
            return (np.tile(inputs, 2) if step == 3 else inputs), targets

    with pytest.raises(ArgumentError, match=text):
        trained(2, replace(EXACT, out=str(tmp_path / "run")), Late)


class Buffer(Field):
    """Its rows lie in one array, which each call fills again, or in copies of it."""

    copies, read_ahead = False, True

    def __init__(self):
        self.rows = np.zeros((8, POINTS, 1))

    def batch(self, step, rows, shard):
        self.rows[rows] = super().batch(step, rows, shard)[0]
        own = self.rows[rows.start : rows.stop]
        return (own.copy(), own.copy()) if self.copies else (own, own)


def test_a_task_may_fill_the_same_arrays_for_each_batch(tmp_path):
    for copies in (False, True):
        task = type("Own", (Buffer,), {"copies": copies})
        trained(2, replace(EXACT, out=str(tmp_path / str(copies))), task)
    assert losses(tmp_path / "False") == losses(tmp_path / "True")


def one_at_a_time(name):
    """A method of Field that notes its thread, and fails where another thread runs one."""

    def run_alone(self, *arguments):
        thread, before = threading.current_thread(), self.running
        assert before in (None, thread), f"{name} in {thread} while {before} runs another method"
        self.running = thread
        self.threads.add((name, thread.name == "mpipipe batches"))
        time.sleep(2e-3)
        try:
            return getattr(Field, name)(self, *arguments)
        finally:
            self.running = before

    return run_alone


@pytest.mark.parametrize("ahead", [False, True])
def test_one_thread_at_a_time_runs_the_methods_of_a_task(tmp_path, ahead):
    methods = {
        name: one_at_a_time(name) for name in ("batch", "validation", "loss", "metrics", "show", "begin", "rate_at")
    }
    methods["batch"] = lambda self, *rest, run=methods["batch"]: (*run(self, *rest), "what comes with it")
    task = type("Alone", (Field,), {**methods, "read_ahead": ahead, "running": None, "threads": set()})
    trained(1, replace(EXACT, out=str(tmp_path / "run")), task)
    assert (("batch", True) in task.threads) == ahead and ("begin", False) in task.threads


@pytest.mark.parametrize("rate", [np.nan, np.inf, -0.1, "high"])
def test_a_rate_that_cannot_be_meant_is_refused_before_its_step_on_all_ranks(tmp_path, rate):
    class Rated(Field):
        def rate_at(self, step, config):
            return rate if step == 3 else 0.1

    text = rf"step 4 of 6: Rated.rate_at\(step=3\) (returns no learning rate(.|\n)*{rate}|raised ValueError)"
    with pytest.raises(ConfigError, match=text):
        trained(2, replace(EXACT, out=str(tmp_path / "run")), Rated)
    assert len(losses(tmp_path / "run")) == 4  # of the start, and three steps


def test_rates_that_differ_between_ranks_are_refused_at_the_first_record(tmp_path):
    class Rated(Field):
        def __init__(self):
            self.own = 0.01 * (1 + next(SEEDS))

        def rate_at(self, step, config):
            return self.own

    with pytest.raises(MismatchError, match=r"step 1 of 6(.|\n)*different learning rates(.|\n)*rate_at"):
        trained(2, replace(EXACT, pipe=1, out=str(tmp_path / "run")), Rated)


class Trees(Field):
    """Its targets are a dict of arrays."""

    def loss(self, output, target):
        return super().loss(output, target["field"])

    def batch(self, step, rows, shard):
        inputs, targets = super().batch(step, rows, shard)
        return inputs, {"field": targets}

    metrics, show = Task.metrics, Task.show


def test_memory_on_paper_counts_trees_and_the_next_batch(monkeypatch):
    monkeypatch.setattr("mpipipe.planning.step_memory.taking", lambda: lambda: 0)  # arrays that are kept, alone
    plain, trees = (estimate_task(lambda comm, task=task: (EXACT, task()), 2).ranks for task in (Field, Trees))
    assert [rank.batch for rank in trees] == [rank.batch for rank in plain]
    assert sum(rank.batch for rank in plain) == 2 * (2 * 8 * POINTS * 8) * 2  # both ranks count inputs and targets
    assert [rank.activations for rank in trees] == [rank.activations for rank in plain]


class Lead(Field):
    """Fields move by a lead time, which the norms of two stages know; what is kept is taken in its entry and later."""

    def layers(self, shard):
        return [
            lambda: nn.Linear(1, WIDTH),
            nn.Sequential([nn.Keep("arm"), nn.Linear(WIDTH, WIDTH), nn.Join("arm", None)]),
            nn.Residual(nn.Recompute(nn.Sequential([nn.AdaptiveNorm(WIDTH, 2, "lead"), nn.Linear(WIDTH, WIDTH)]))),
            nn.AdaptiveNorm(WIDTH, 2, "lead"),
            nn.Join("arm"),
            lambda: nn.Linear(2 * WIDTH, 1),
        ]

    def batch(self, step, rows, shard):
        fields, targets = super().batch(step, rows, shard)
        lead = np.random.default_rng(step).uniform(size=(8, 2))[rows.start : rows.stop]
        return Branches(fields, lead=lead), targets * (1 + lead[:, :1, None])


class Lacking(Lead):
    def batch(self, step, rows, shard):
        inputs, targets = super().batch(step, rows, shard)
        return Branches(inputs.main, led=inputs["lead"]), targets


@pytest.mark.long
def test_side_inputs_and_skips_are_trained_on_any_mesh(tmp_path):
    trained(1, replace(EXACT, out=str(tmp_path / "alone")), Lead)
    for number, (ranks, keys) in enumerate([(2, {}), (4, {"pipe": 2, "chunks": 2, "schedule": "interleaved_1f1b"})]):
        trained(ranks, replace(EXACT, **keys, out=str(tmp_path / f"{number}")), Lead)
        for found, expected in zip(losses(tmp_path / f"{number}"), losses(tmp_path / "alone"), strict=True):
            assert found == pytest.approx(expected, rel=1e-10)


def test_side_inputs_and_skips_are_checked_planned_and_counted(hasty, tmp_path):
    lines, right = inprocess.run(1, lambda comm: check_task(Lead(), 0, comm))[0]
    assert right, lines
    trained(2, TaskConfig(**KEYS, plan="auto", out=str(tmp_path / "planned")), Lead)
    ranks = estimate_task(lambda comm: (EXACT, Lead()), 2).ranks
    assert all(rank.activations > 0 and rank.messages > 0 for rank in ranks)


def test_check_knows_lower_precision_and_names_of_outputs():
    lines, right = inprocess.run(1, lambda comm: check_task(Known(), 0, comm))[0]
    assert right and re.match(r"loss: right to \de-0[3-6]", lines[-1]), lines


class Mixed(nn.Gelu):
    """Takes the mean over rows away."""

    def forward(self, x):
        return super().forward(x - x.mean(0, keepdims=True))

    def backward_input(self, dy, saved):
        dx, pending = super().backward_input(dy, saved)
        return dx - dx.mean(0, keepdims=True), pending


class Mixing(Field):
    def layers(self, shard):
        return [nn.Linear(1, WIDTH), nn.Gelu(), Mixed(), nn.Linear(WIDTH, 1)]


class Relative(Field):
    """A ratio of sums over the micro-batch, and with `weight` one that says so."""

    weight = False

    def loss(self, output, target):
        error, size = output - target, float((target**2).sum())
        result = float((error**2).sum()) / size, 2 / size * error
        return (*result, size) if self.weight else result


class WeightedRatio(Relative):
    weight = True


class Masked(Field):
    """Row 1 has nothing that counts, and then no gradient."""

    def batch(self, step, rows, shard):
        fields, targets = super().batch(step, rows, shard)
        return fields, (targets, np.array([row % 2 == 0 for row in rows], float))

    def loss(self, output, target):
        counts = target[1][:, None, None]
        if not counts.any():
            return 0.0, None, 0.0
        error = (output - target[0]) * counts
        return float((error**2).sum() / counts.sum()), 2 / counts.sum() * error, float(counts.sum())

    metrics = Task.metrics


class Noise(nn.Layer):
    """Draws numbers, the same for the same shape, in evaluations, too."""

    def forward(self, x):
        return x + np.random.default_rng(x.shape[1]).standard_normal(x.shape), None

    def backward_input(self, dy, saved):
        return dy, None


class Noisy(Field):
    def layers(self, shard):
        return [nn.Linear(1, WIDTH), Noise(), nn.Linear(WIDTH, WIDTH), nn.Gelu(), nn.Linear(WIDTH, 1)]


@pytest.mark.parametrize(
    ("task", "text"),
    [
        (Mixing, r"layers\[2\] Mixed: gives other rows for a batch than for each row alone, .* --microbatches"),
        (
            Relative,
            r"loss: Relative.loss returns a value that is no mean over the rows; .* --microbatches: .* third value",
        ),
        (WeightedRatio, None),
        (Masked, None),
        (Noisy, r"layers\[1\] Noise: gives other rows"),
    ],
)
def test_check_names_what_depends_on_the_number_of_micro_batches(task, text):
    lines, right = inprocess.run(1, lambda comm: check_task(task(), 0, comm))[0]
    assert right == (text is None), lines
    assert [bool(re.match(text or "loss: right", line)) for line in lines].count(True) == 1, lines
    assert sum("--microbatches" in line for line in lines) == (text is not None)


RENUMBERED = wrong("Renumbered", validation=lambda made, index, rows, _: Field().validation(index, range(len(rows)), _))
# rows come in pairs
COUPLED = wrong(
    "Coupled",
    batch=lambda made, step, rows, _: Field().batch(step, range(rows.start & ~1, rows.stop + rows.stop % 2), _),
)


@pytest.mark.parametrize(
    ("task", "text"),
    [
        (UNSEEDED, r"Unseeded.batch gives other inputs of row 1 (.|\n)*when that is asked for alone(.|\n)* and "),
        (RENUMBERED, r"Renumbered.validation gives other inputs of row 1"),
        (COUPLED, r"Coupled.batch gives other inputs of row 1 "),
    ],
)
def test_check_names_rows_that_depend_on_what_is_asked_for_with_them(task, text):
    with pytest.raises(DataError, match=text):
        inprocess.run(1, lambda comm: check_task(task(), 0, comm))


def test_entries_of_layers_are_let_go_before_the_optimizer_is_made(tmp_path):
    """They may hold whole models, which a rank has parts of."""
    alive, seen = [], []

    class Held(Field):
        def layers(self, shard):
            entries = [partial(nn.Linear, 1, 1), partial(nn.Linear, 1, 1)]
            alive.extend(map(weakref.ref, entries))
            return entries

        def optimizer(self, stages, config):
            seen.append([entry() for entry in alive])

    trained(1, replace(EXACT, steps=1, out=str(tmp_path / "run")), Held)
    assert seen and not any(seen[0])


@pytest.mark.parametrize(
    ("task", "kind", "text"),
    [
        (RAGGED, DataError, r"the inputs of Ragged.batch\(step=0, rows=0..7\) have another number of rows(.|\n)*8"),
        (wrong("Holes", batch=holes), DataError, r"the inputs of Holes.batch\(.*\) are not finite(.|\n)*in row 2"),
        (OTHER, MismatchError, r"different layers from Other.layers"),
        (BARE, Exception, r"Bare.loss: a loss returns (.|\n)*float"),
        (wrong("Word", loss=lambda made, output, _: ("low", output)), Exception, r"Word.loss: the value of (.|\n)*str"),
        (ACCURATE, Exception, r"Accurate.loss: the third value (.|\n)*with each row twice"),
        (Twofold, Exception, r"Twofold.loss: the third value (.|\n)*mean_over_entries, too"),
        (THIN, Exception, r"Thin.loss: the gradient of the loss does not match"),
        (LONGER, Exception, r"Longer.layers in the validation: layer 0 \(Linear\)"),
        (Counted, ConfigError, r"targets of several arrays.* by other numbers(.|\n)*6, 20 and 4, 20 entries"),
        (UNSEEDED, DataError, r"Unseeded.batch gives other inputs of row 0 on other ranks(.|\n)* and (.|\n)*seed, too"),
        (UNFIXED, DataError, r"Unfixed.validation gives other inputs of row 0 on other ranks"),
        (ELSEWHERE, DataError, r"Elsewhere.batch gives other inputs of row 0"),
        (SUMMED, Exception, r"Summed.loss returns a value that is no mean(.|\n)*with each row twice"),
        (UNDIVIDED, Exception, r"Undivided.loss returns a gradient that is not that of a mean"),
        (HITS, Exception, r"Hits.metrics returns a sum over the rows(.|\n)*hits"),
        (SHADOW, Exception, r"Shadow.metrics: the name of a metric cannot be written, or a record has it(.|\n)*loss"),
        (Undone, Exception, r"Undone.loss returns a gradient that is not that of a mean"),
        (Lacking, Exception, r"take other names than it is handed"),
        (Twice, ArgumentError, r"one Scale is layer 1 and layer 2"),
        (MISFIT, Exception, r"stage 0(.|\n)*Misfit.layers in the batch: layer 1 "),
        (wrong("Empty", layers=lambda *_: []), ConfigError, r"Empty.layers returns no list of layers"),
        (wrong("Tall", layers=lambda *_: [nn.Linear(1, 1), "a layer"]), ArgumentError, r"layers\[1\] is not a layer"),
    ],
)
def test_mistakes_are_one_error_before_anything_is_written(tmp_path, task, kind, text):
    with pytest.raises(kind, match=text):
        trained(2, replace(EXACT, seq=1 + (task is Counted), out=str(tmp_path / "run")), task)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
