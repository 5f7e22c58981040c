"""The user's arrays: never written to, of any subclass of ndarray, and refused where a part of them would be lost."""

from typing import NamedTuple

import numpy as np
import pytest
from support import dense

from mpipipe import Pipeline, arrays, nn
from mpipipe.errors import ArgumentError, PeerError, StageError
from mpipipe.schedules import looped_bfs, one_f_one_b

ROWS, DIM = 8, 4


def placed(comm, inputs, targets):
    return (inputs if comm.rank == 0 else None), (targets if comm.rank == comm.size - 1 else None)


def received(tree):
    """The first array in what a stage is handed."""
    return tree["x"] if isinstance(tree, dict) else tree[0] if isinstance(tree, tuple) else tree


class Multiplying:
    """y = 2 x; may write to what it is handed in micro-batch 1."""

    def __init__(self, writes, kind):
        self.writes, self.kind = writes, kind

    def forward(self, x, position):
        if self.writes == "x" and position.microbatch == 1:
            np.maximum(received(x), 0, out=received(x))
        return self.tree(2 * received(x)), position.microbatch

    def backward(self, dy, microbatch):
        if self.writes == "dy" and microbatch == 1:
            received(dy)[...] *= 2
        return self.tree(2 * received(dy))

    def tree(self, array):
        array = array.astype(self.kind[1])
        return {"array": array, "tuple": (array, array * 1), "dict": {"x": array}}[self.kind[0]]


def loss_of(output, target):
    """0, and a gradient of ones."""
    ones = np.ones_like(received(output))
    return 0.0, {dict: {"x": ones}, tuple: (ones, ones)}.get(type(output), ones)


KINDS = [("array", "f8"), ("tuple", "c8"), ("dict", arrays.dtype("bfloat16")), ("array", "f2")]


@pytest.mark.parametrize("kind, recompute", [*((kind, False) for kind in KINDS), (KINDS[0], True)], ids=str)
@pytest.mark.parametrize("writes", ["x", "dy"])
def test_a_stage_that_writes_to_what_it_is_handed_raises_and_the_users_array_stays(comm, writes, kind, recompute):
    """Whether it comes as a message or from a chunk of the same rank; the report says where."""
    schedule = looped_bfs(comm.size, 2, 2)
    for place in (0, 1) if writes == "x" else (0, schedule.stages - 2):  # what a loss returns has no other owner
        stages = [Multiplying(writes if n == place else None, kind) for n in schedule.stages_of(comm.rank)]
        x = stages[0].tree(np.ones((ROWS, DIM)))
        pipeline = Pipeline(stages, schedule, comm, loss=loss_of, recompute=recompute)
        with pytest.raises((StageError, PeerError), match="read-only") as caught:
            pipeline.step(*placed(comm, x, np.ones((ROWS, DIM))))
            pipeline.close()
        if comm.rank == schedule.placement[place]:
            assert isinstance(caught.value, StageError) and (caught.value.stage, caught.value.microbatch) == (place, 1)
            assert "copy an array that you were handed" in caught.value.remedy
        assert received(x).min() == 1 and received(x).flags.writeable


@pytest.mark.parametrize("writes", ["output", "target"])
def test_a_loss_that_writes_to_what_it_is_handed_raises_and_the_users_array_stays(comm, writes):
    """The output may be among what the last stage has saved."""

    def loss(output, target):
        written = output if writes == "output" else target
        written -= 1
        return 0.0, output

    targets = np.ones((ROWS, DIM))
    pipeline = Pipeline([Multiplying(None, KINDS[0])], one_f_one_b(comm.size, 2), comm, loss=loss)
    with pytest.raises((StageError, PeerError), match=r"the loss raised ValueError: .*read-only"):
        pipeline.step(*placed(comm, np.ones((ROWS, DIM)), targets))
        pipeline.close()
    assert targets.min() == 1 and targets.flags.writeable


def test_an_output_with_names_keeps_them_for_the_loss(comm):
    class Output(NamedTuple):
        x: np.ndarray

    class Naming(dense.Identity):
        def forward(self, x):
            return Output(x * 1.0) if comm.rank == comm.size - 1 else x * 1.0, None

        def backward(self, dy, saved):
            return dy[0] if isinstance(dy, tuple) else dy

    with Pipeline(
        [Naming()], one_f_one_b(comm.size, 2), comm, loss=lambda y, t: (float(y.x.sum()), (y.x,))
    ) as pipeline:
        assert pipeline.step(*placed(comm, np.ones((ROWS, DIM)), np.ones((ROWS, DIM)))).loss == ROWS * DIM / 2


def memmap(array, folder):
    np.save(folder / "map.npy", array)
    return np.load(folder / "map.npy", mmap_mode="r+")


KINDS_OF_ARRAYS = {"memmap": memmap, "matrix": lambda array, _: np.asmatrix(array)}


@pytest.mark.filterwarnings("ignore:the matrix subclass")
@pytest.mark.parametrize("make", KINDS_OF_ARRAYS.values(), ids=KINDS_OF_ARRAYS)
@pytest.mark.parametrize("listed", [False, True])
def test_subclasses_of_ndarray_train_as_arrays_do(comm, tmp_path, make, listed):
    array = np.random.default_rng(0).normal(size=(ROWS, DIM))
    kinds = []

    class Looking(dense.Identity):
        def forward(self, x):
            kinds.append(type(x))
            return x * np.array(2.0), None  # a matrix has another product

        def backward(self, dy, saved):
            return dy * 2.0

    def loss(output, target):
        kinds.extend((type(output), type(target)))
        return float(((output - target) ** 2).mean()), np.asarray(2 * (output - target) / output.size)

    results = []
    with Pipeline([Looking()], one_f_one_b(comm.size, 2), comm, loss=loss) as pipeline:
        for batch in (array, make(array, tmp_path)):
            batch = [batch[:4], batch[4:]] if listed else batch
            results.append(pipeline.step(*placed(comm, batch, batch)))
    assert set(kinds) == {np.ndarray}
    assert results[0].losses == results[1].losses
    for one, other in zip(results[0].input_grads or [], results[1].input_grads or [], strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.filterwarnings("ignore:the matrix subclass")
def test_a_stage_takes_a_subclass_of_ndarray_as_an_array_and_no_masked_one():
    stage = nn.Stage([nn.Linear(DIM, DIM)], dtype="float64")
    array = np.random.default_rng(0).normal(size=(ROWS, DIM))
    found, _ = stage.forward(np.asmatrix(array))
    assert type(found) is np.ndarray
    np.testing.assert_array_equal(found, stage.forward(array)[0])
    with pytest.raises(ArgumentError, match="mask would be lost"):
        stage.forward(masked())


def masked():
    return np.ma.masked_greater(np.arange(ROWS * DIM, dtype=float).reshape(ROWS, DIM), 7)


@pytest.mark.parametrize("where", ["inputs", "targets", "list"])
def test_masked_arrays_are_refused_on_every_rank(comm, where):
    inputs = targets = np.ones((ROWS, DIM))
    if where == "targets":
        targets = masked()
    else:
        inputs = [masked()[:4], masked()[4:]] if where == "list" else masked()
    with Pipeline([dense.Identity()], one_f_one_b(comm.size, 2), comm, loss=nn.mean_squared_error) as pipeline:
        with pytest.raises(ArgumentError, match="mask would be lost") as caught:
            pipeline.step(*placed(comm, inputs, targets))
        assert "filled" in caught.value.remedy
        pipeline.step(*placed(comm, np.ones((ROWS, DIM)), np.ones((ROWS, DIM))))  # nothing is broken


@pytest.mark.mpi(min_size=2)
def test_a_masked_output_is_refused_by_the_sender_in_every_step(comm):
    class Masking(dense.Identity):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return (np.ma.masked_array(x) if comm.rank == 0 and self.calls > 2 else x * 1.0), None

    pipeline = Pipeline([Masking()], one_f_one_b(comm.size, 2), comm)
    pipeline.forward(np.ones((ROWS, DIM)) if comm.rank == 0 else None)
    with pytest.raises(Exception, match="mask would be lost"):
        pipeline.forward(np.ones((ROWS, DIM)) if comm.rank == 0 else None)


@pytest.mark.parametrize("kind", [[("a", "f4"), ("b", "i4")], "V8", "U3", "S3"])
def test_records_and_text_are_refused_by_the_sender(comm, kind):
    array = np.zeros((ROWS, DIM), kind)
    with Pipeline([dense.Identity()], one_f_one_b(comm.size, 2), comm) as pipeline:
        with pytest.raises(ArgumentError, match="dtype that cannot be sent") as caught:
            pipeline.forward(array if comm.rank == 0 else None)
    assert str(array.dtype) in caught.value.found
