"""Check mode: planted faults are named with rank, stage, micro-batch and array; what is right keeps its bits."""

import itertools
import re
from types import SimpleNamespace

import numpy as np
import pytest
from support import dense

from mpipipe import Pipeline, arrays, nn, optim
from mpipipe.errors import ArgumentError, MpipipeError, NonFiniteError, PeerError, StageError
from mpipipe.schedules import gpipe, looped_bfs, one_f_one_b, with_frozen, zero_bubble_h1

MICROBATCHES, AT, ROWS, DIM = 4, 2, 8, 4


def write(array, value=0.0):
    """Write to an array that was handed out read-only, as code that goes round numpy's flag does."""
    array.setflags(write=True)
    array[0, 0] = value


class Mine(dense.Halves):
    """y = x * w with one factor for each column; `plant(event, micro-batch, arrays)` may do what is forbidden."""

    def __init__(self, number, plant=None, dim=DIM):
        self.parameters, self.gradients = (nn.FlatBuffer({f"{number}.w": (dim,)}, "float64") for _ in "12")
        self.w, self.g = self.parameters[f"{number}.w"], self.gradients[f"{number}.w"]
        self.w[...] = 1.5
        self.number, self.memory, self.planted = number, {}, plant

    def plant(self, event, m, **arrays):
        if self.planted is not None:
            self.planted(event, m, SimpleNamespace(memory=self.memory, g=self.g, **arrays))

    def forward(self, x, position):
        y, saved = x * self.w, [x * 1.0]
        self.plant("forward", position.microbatch, x=x, y=y, saved=saved)
        return y, (position.microbatch, saved)

    def backward_input(self, dy, kept):
        m, (x,) = kept
        dx, pending = dy * self.w, (dy * x).sum(0)
        self.plant("input", m, dy=dy, dx=dx, pending=pending)
        return dx, (m, pending)

    def backward_weight(self, kept):
        m, pending = kept
        self.g += pending
        self.plant("weight", m)


def at(event, action, microbatch=AT):
    """Plant an action where an event of this micro-batch is."""

    def plant(found, m, arrays):
        if (found, m) == (event, microbatch):
            action(arrays)

    plant.needs_forwards = False
    return plant


def later(event, name, of=0):
    """Keep an array of an event of one micro-batch, and write to it in the same event of the next one."""

    def plant(found, m, arrays):
        if found == event:
            old = arrays.memory.pop("old", None)
            if old is not None:
                old[...] = 7.0
            elif m == of:
                kept = getattr(arrays, name)
                arrays.memory["old"] = kept[0] if isinstance(kept, list) else kept

    plant.needs_forwards = event == "forward"
    return plant


def put(name, value):
    """Put a value into an array of the event."""
    return lambda arrays: getattr(arrays, name).__setitem__(0, value)


FAULTS = {  # name: (event, fault; error, micro-batch, words of it)
    "NaN in forward": (at("forward", put("y", np.nan)), NonFiniteError, AT, "forward returned .*y, float64.*NaN"),
    "NaN in dx": (at("input", put("dx", np.nan)), NonFiniteError, AT, "input gradient that is not finite.*dx"),
    "NaN in a gradient": (at("weight", put("g", np.nan)), NonFiniteError, AT, r"gradient\['1.w'\].*at \[0\]: nan"),
    "write to x": (at("forward", lambda a: write(a.x)), StageError, AT, "x was written to before its backward.*sum"),
    "write to dy": (at("input", lambda a: write(a.dy)), StageError, AT, "dy was written to before the end of .*sum"),
    "write to y after it was sent": (later("forward", "y"), StageError, 0, "y was written to before its backward"),
    "write to dx after it was sent": (later("input", "dx"), StageError, 0, "dx was written to before the end of the"),
    "write to what was saved": (later("forward", "saved"), StageError, 0, r"saved\[1\]\[0\] was written to before its"),
}  # fmt: skip
SCHEDULES = {
    "looped_bfs": lambda ranks: looped_bfs(ranks, 2, MICROBATCHES),
    "zero_bubble_h1": lambda ranks: zero_bubble_h1(ranks, MICROBATCHES),
}


def given(comm, schedule, x=None, target=None):
    """This rank's part of a batch, by default of ones and zeros."""
    x, target = np.ones((ROWS, DIM)) if x is None else x, np.zeros((ROWS, DIM)) if target is None else target
    return dense.placed(schedule, comm.rank, x, target)


def raised(comm, schedule, plant=None, stage=1, call="step", build=Mine, loss=None, batch=(), prepare=id, **options):
    """The error of a step on the rank that has the cause; the others were told, and one alone reports."""
    stages = [build(number, plant if number == stage else None) for number in schedule.stages_of(comm.rank)]
    pipeline = Pipeline(stages, schedule, comm, **{"loss": loss or nn.mean_squared_error, "check": True, **options})
    prepare(pipeline)
    with pytest.raises(MpipipeError) as caught:
        getattr(pipeline, call)(*given(comm, schedule, *batch))
        pipeline.close()  # where a rank was done before another one failed
    errors = comm.allgather((str(caught.value), type(caught.value), caught.value.reported_elsewhere))
    ((text, kind, _),) = [error for error in errors if not error[2]]
    assert all(issubclass(kind, PeerError) for _, kind, elsewhere in errors if elsewhere)
    return text, kind


def names(found, kind, rank, stage, microbatch, match):
    text, raised_kind = found
    assert raised_kind is kind, text
    assert text.startswith(f"rank {rank}, stage {stage}, micro-batch {microbatch}: "), text
    assert re.search(match, " ".join(text.split())), text
    assert "remedy: " in text


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_planted_fault_is_named(comm, kind, name):
    schedule = SCHEDULES[kind](comm.size)
    stage = min(1, schedule.stages - 1)
    plant, error, microbatch, match = FAULTS[name]
    if kind == "zero_bubble_h1" and plant.needs_forwards:
        pytest.skip("the backward may come before the next forward")
    found = raised(comm, schedule, plant, stage)
    names(found, error, schedule.placement[stage], stage, microbatch, match.replace("1.w", f"{stage}.w"))


def two_chunks(comm):
    return looped_bfs(comm.size, 2, MICROBATCHES)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("direction, name", [(0, "x"), (1, "dy")])
def test_a_message_that_was_changed_on_its_way(comm, direction, name):
    schedule = two_chunks(comm)
    edge, rank = (1, 1) if direction == 0 else (1, 0)

    def prepare(pipeline):
        mailbox = pipeline.executor.messages.mailbox
        take = mailbox.take

        def tampered():
            envelope = mailbox.posted[0][2]
            slot = take()
            if envelope.name == (edge, AT, direction):
                slot.buffer[1, 3] = np.nan
            return slot

        mailbox.take = tampered

    found = raised(comm, schedule, prepare=prepare)
    match = f"is not finite, and it was when it was sent .*{name}, .*at .1, 3.: nan"
    names(found, NonFiniteError, rank, rank, AT, match)


def last(schedule):
    return schedule.placement[-1], schedule.stages - 1


def third(loss):
    """A loss that does something in its third call."""
    calls = itertools.count()
    return lambda output, target: (loss if next(calls) == AT else nn.mean_squared_error)(output, target)


def nan_gradient(output, target):
    gradient = np.zeros_like(output)
    gradient[1, 1] = np.nan
    return 0.0, gradient


LOSSES = {
    "NaN in its gradient": (nan_gradient, NonFiniteError, r"loss returned a gradient .*doutput, .*at \[1, 1\]"),
    "NaN": (lambda y, t: (np.nan, y * 1.0), NonFiniteError, "the loss is not finite found: value.*: nan"),
    "write to y": (lambda y, t: write(y) or (0.0, y * 1.0), StageError, "y was written to before its backward"),
    "write to targets": (
        lambda y, t: write(t, 3.0) or (0.0, y * 1.0),
        StageError,
        "target was written to before the end",
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_fault_in_the_loss(comm, name):
    loss, kind, match = LOSSES[name]
    schedule = two_chunks(comm)
    names(raised(comm, schedule, loss=third(loss)), kind, *last(schedule), AT, match)


def test_what_is_wrong_with_the_batch_is_called_the_users(comm):
    """NaN in it, and a write to it, also after its forward; not NaN that no stage lets through."""
    schedule = two_chunks(comm)
    x, target = np.ones((ROWS, DIM)), np.zeros((ROWS, DIM))
    x[5, 1] = np.nan
    found = raised(comm, schedule, batch=(x, target))
    names(found, NonFiniteError, 0, 0, AT, "y, .*before that: the input of this call, .*at .1, 1.: nan.*named last")
    x[5, 1], target[4, 0] = 1, np.inf
    found = raised(comm, schedule, batch=(x, target))
    names(found, NonFiniteError, *last(schedule), AT, "the loss is not finite.*before that: the targets of this call")
    target[4, 0] = 0
    found = raised(comm, schedule, at("weight", lambda a: write(x, 5.0), 1), stage=0, batch=(x, target))
    names(found, StageError, 0, 0, 0, "input was written to before the end of the call found: input, float64")

    stages = [Mine(number) for number in schedule.stages_of(comm.rank)]
    for stage in stages:
        stage.forward = lambda x, position, forward=stage.forward: forward(np.nan_to_num(x), position)
    with Pipeline(stages, schedule, comm, loss=nn.mean_squared_error, check=True) as pipeline:
        assert pipeline.step(*given(comm, schedule, x * np.nan)).loss == 0


def test_a_parameter_that_is_not_finite_is_named(comm):
    schedule = two_chunks(comm)
    found = raised(comm, schedule, at("forward", lambda a: a.y.fill(np.nan), 0))
    assert "before that" not in found[0]

    def build(number, plant):
        stage = Mine(number)
        stage.w[3] = np.nan if number == 1 else 1
        return stage

    found = raised(comm, schedule, build=build)
    names(found, NonFiniteError, 1 % comm.size, 1, 0, r"y, .*before that: parameter\['1.w'\], .*at \[3\]: nan")


def across(event, m, arrays):
    """Write in the second forward to what the first one was handed."""
    if event == "forward" and "old" in arrays.memory:
        write(arrays.memory.pop("old"))
    elif event == "forward" and m == 0:
        arrays.memory["old"] = arrays.x


def heavy(output, target):
    """A loss whose gradient is finite, and is not with the share that its weight gives it."""
    return 1.0, np.full_like(output, 1e300), 1e20


WRITES = {  # what is named: ranks that it needs, schedule, stage, micro-batch, what is planted, options
    "pending[1] was written to before its weight gradient": (
        2, lambda p: zero_bubble_h1(p, MICROBATCHES), -1, 0, later("input", "pending"), {},
    ),
    "x was written to before its forward ran again": (
        1, lambda p: looped_bfs(p, 2, MICROBATCHES), 1, 0, across, dict(recompute=True),
    ),
    "x was written to before the end of its forward": (
        2, lambda p: looped_bfs(p, 2, MICROBATCHES), 1, AT, at("forward", lambda a: write(a.x)), dict(call="evaluate"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRITES)
def test_a_write_is_named_whenever_it_comes(comm, what):
    """Between the halves of a backward, before a recomputation, and where no backward follows."""
    least, make, stage, microbatch, plant, options = WRITES[what]
    if comm.size < least:
        pytest.skip(f"needs {least} ranks")
    schedule = make(comm.size)
    stage %= schedule.stages
    found = raised(comm, schedule, plant, stage, **options)
    names(found, StageError, schedule.placement[stage], stage, microbatch, re.escape(what))


def test_the_argument_wins_over_the_environment(comm, monkeypatch):
    schedule = one_f_one_b(comm.size, MICROBATCHES)
    for text, check, on in (("1", None, True), ("1", False, False), ("0", True, True), ("", None, False)):
        monkeypatch.setenv("MPIPIPE_CHECK", text)
        with Pipeline([Mine(comm.rank)], schedule, comm, check=check) as pipeline:
            (stage,) = pipeline.executor.stages
            assert (pipeline.executor.checks is not None) is (stage.runner is not stage.stage) is on
    monkeypatch.setenv("MPIPIPE_CHECK", "yes")
    with pytest.raises(ArgumentError, match="MPIPIPE_CHECK"):
        Pipeline([Mine(comm.rank)], schedule, comm)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", SCHEDULES)
def test_what_is_right_has_the_same_bits(comm, kind, recompute):
    schedule = SCHEDULES[kind](comm.size)
    x, target = (np.random.default_rng(i).normal(size=(ROWS, DIM)) for i in range(2))
    results = []
    for check in (False, True):
        stages = [
            nn.Stage([nn.Sequential([nn.Linear(DIM, DIM), nn.Dropout(0.2), nn.Gelu()])], "float64", first=number)
            if number % 2
            else Mine(number)
            for number in schedule.stages_of(comm.rank)
        ]
        optimizer = optim.AdamW(stages, lr=0.01)
        mine = given(comm, schedule, x, target)
        with Pipeline(stages, schedule, comm, nn.mean_squared_error, recompute, check=check) as pipeline:
            losses = []
            for _ in range(2):
                losses.append(pipeline.step(*mine).loss)
                optimizer.step()
            rest = pipeline.evaluate(*mine), pipeline.forward(mine[0]), pipeline.peak_activations
        results.append([losses, [stage.gradients.flat for stage in stages], *rest])
    for one, other in zip(*results):
        for a, b in zip(one, other) if isinstance(one, list) else [(one, other)]:
            np.testing.assert_array_equal(a, b)


def test_gradients_may_overflow_where_a_scale_is_given(comm):
    """A LossScaler finds that, and lowers the scale. Outputs are finite all the same."""
    schedule = two_chunks(comm)

    def with_scale(pipeline):
        step = pipeline.step
        pipeline.step = lambda *batch: step(*batch, scale=4.0)

    stages = [Mine(n, at("input", put("dx", np.inf)) if n == 1 else None) for n in schedule.stages_of(comm.rank)]
    with Pipeline(stages, schedule, comm, loss=nn.mean_squared_error, check=True) as pipeline:
        x, target = given(comm, schedule)
        assert np.isfinite(pipeline.step(x, target, scale=4.0).loss)
        pipeline.backward(pipeline.forward_train(x), scale=4.0)
        y = pipeline.forward_train(x)
        with pytest.raises((NonFiniteError, PeerError), match="the gradient of the loss"):
            pipeline.backward(None if y is None else y * np.nan)
    found = raised(comm, schedule, at("forward", put("y", np.nan)), prepare=with_scale)
    names(found, NonFiniteError, 1 % comm.size, 1, AT, "forward returned")


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "complex64"])
def test_numbers_of_all_kinds(kind):
    """Seen where they are, in arrays of any strides; integers have no NaN."""
    from mpipipe.pipeline.check import non_finite, watched

    array = np.ones((4, 6), arrays.dtype(kind))
    part = {"a": np.ones(3, int), "b": (array[:, ::2], None)}
    assert non_finite(part, "x") is None
    before = watched(0, 0, part, "x")
    array[2, 4] = np.nan
    assert non_finite(part, "x").startswith(f"x['b'][0], {kind}[4, 3]: 1 of 12 numbers not finite (1 NaN, 0 infinite)")
    assert "at [2, 2]" in non_finite(part, "x")
    pairs = zip(before, watched(0, 0, part, "x"), strict=True)
    assert [one.name for one, now in pairs if one.checksum != now.checksum] == ["x['b'][0]"]
    assert [one.name for one in watched(0, 0, part, "x", without=array)] == ["x['a']"]


@pytest.mark.mpi(min_size=2)
def test_a_sum_over_replicas_that_overflows(comm):
    if comm.size % 2:
        pytest.skip("pairs of replicas")
    pipe, replicas = comm.Split(comm.rank), comm.Split(comm.rank // 2)
    stage = Mine(0, at("weight", lambda a: a.g.fill(1e308), MICROBATCHES - 1))
    x = np.ones((ROWS, DIM))
    options = dict(loss=nn.mean_squared_error, replicas=replicas, check=True)
    pipeline = Pipeline([stage], one_f_one_b(1, MICROBATCHES), pipe, **options)
    with pytest.raises((NonFiniteError, PeerError), match="the sum of a gradient over replicas"):
        pipeline.step(x, x)
    pipe.Free()
    replicas.Free()


@pytest.mark.parametrize("fault", ["NaN", "write"])
def test_device_arrays_are_looked_at_by_checksums(gpu, comm, fault):
    """On a device nothing protects what a stage is handed."""

    class OnDevice:
        device = "cuda"

        def __init__(self, number, plant):
            self.number = number

        def forward(self, x, position):
            y = arrays.copy(x if arrays.is_device(x) else arrays.upload(x))
            if (self.number, position.microbatch) == (1, AT):
                array, value = (y, np.nan) if fault == "NaN" else (x, 2.0)
                arrays.copy_into(array[:1], arrays.upload(np.full((1, DIM), value)))
            return y, None

        def backward(self, dy, saved):
            return arrays.copy(dy)

    found = raised(comm, two_chunks(comm), build=OnDevice, loss=lambda y, t: (0.0, arrays.zeros_like(y)))
    if fault == "NaN":
        names(found, NonFiniteError, 1 % comm.size, 1, AT, r"y, float64.*4 NaN.*at \[0, 0\]: nan")
    else:
        names(found, StageError, 1 % comm.size, 1, AT, "x was written to before its backward")


@pytest.mark.mpi(min_size=2)
def test_an_output_that_no_backward_looks_at_is_watched_to_the_end_of_the_call(comm):
    """A message may still read it: here the eleventh forward of a frozen stage writes to the output of the first."""

    class InTurn(Mine):
        def __init__(self, number, plant):
            super().__init__(number)
            self.ring = [np.empty((2, DIM)) for _ in range(10)]
            if number == 0:
                self.parameters = self.gradients = None

        def forward(self, x, position):
            y, saved = super().forward(x, position)
            self.ring[position.microbatch % 10][...] = y
            return self.ring[position.microbatch % 10] if self.number == 0 else y, saved

    schedule = with_frozen(gpipe(comm.size, 16), [0])
    batch = np.random.default_rng(0).normal(size=(2, 32, DIM))
    found = raised(comm, schedule, build=InTurn, batch=batch)
    assert "y was written to before the end of the call" in " ".join(found[0].split())


def test_a_gradient_of_the_loss_that_its_weight_makes_too_large_is_found(comm):
    found = raised(comm, two_chunks(comm), loss=heavy)
    names(found, NonFiniteError, *last(two_chunks(comm)), 0, "gradient of the loss, times the share")
