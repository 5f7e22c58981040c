"""Batches that a function gives, one micro-batch at a time: the same bits as a list, nothing kept, no mistake taken."""

import weakref

import numpy as np
import pytest
from support import dense
from support.tolerance import within

from mpipipe import Mesh, Pipeline
from mpipipe.errors import ArgumentError, DataError, MpipipeError, PeerError, StageError
from mpipipe.schedules import gpipe, one_f_one_b


class Asked:
    """Gives micro-batches of a list, each as a new array, and notes what is asked and most arrays alive at once."""

    def __init__(self, pieces):
        self.pieces, self.asked, self.alive, self.most = pieces, [], 0, 0

    def __call__(self, microbatch):
        self.asked.append(microbatch)
        array = self.pieces[microbatch].copy()
        weakref.finalize(array, self.gone)
        self.alive += 1
        self.most = max(self.most, self.alive)
        return array

    def gone(self):
        self.alive -= 1


def pieces_of(schedule, rows):
    """(inputs, targets), each a list of micro-batches of so many rows."""
    inputs, targets = dense.batch(sum(rows), schedule.stages)
    edges = np.cumsum(rows)[:-1]
    return np.split(inputs, edges), np.split(targets, edges)


def asking(schedule, rank, rows):
    """(inputs, targets) of this rank as functions."""
    return dense.placed(schedule, rank, *map(Asked, pieces_of(schedule, rows)))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name, chunks", [("gpipe", 1), ("interleaved_1f1b", 2), ("zero_bubble_h1", 1)])
def test_the_bits_are_those_of_a_list_and_each_micro_batch_is_asked_for_once(comm, name, chunks, recompute):
    schedule, found = dense.build(name, comm.size, chunks, 2 * comm.size), []
    rows = [3] * schedule.microbatches
    for ask in (False, True):
        stages = dense.model(schedule, comm.rank)
        batch = dense.placed(schedule, comm.rank, *pieces_of(schedule, rows))
        with Pipeline(stages, schedule, comm, dense.mean_squared, recompute) as pipeline:
            for _ in range(2):
                batch = asking(schedule, comm.rank, rows) if ask else batch
                result = pipeline.step(*batch)
                for asked in batch if ask else ():
                    assert asked is None or sorted(asked.asked) == list(range(schedule.microbatches))
            evaluated, out = pipeline.evaluate(*batch), pipeline.forward(batch[0])
        found.append((result.losses, evaluated, [stage.gradient for stage in stages], out, result.input_grads))
    plain, asked = found
    assert plain[:2] == asked[:2]
    for before, after in zip(plain[2:], asked[2:]):
        assert (before is None) == (after is None)
        assert all(x.tobytes() == y.tobytes() for x, y in zip(before or (), after or ()))


def test_a_function_may_fill_the_same_array_for_each_micro_batch(comm):
    """Gradients are those of arrays of their own, though backwards run after the next micro-batches were asked for."""
    schedule, found = gpipe(comm.size, 4), []

    def refilled(pieces):
        array = np.empty_like(pieces[0])

        def ask(microbatch):
            array[...] = pieces[microbatch]
            return array

        return ask

    for kind in (list, refilled):
        stages = dense.model(schedule, comm.rank)
        batch = dense.placed(schedule, comm.rank, *map(kind, pieces_of(schedule, [3] * 4)))
        with Pipeline(stages, schedule, comm, dense.mean_squared) as pipeline:
            loss = pipeline.step(*batch).loss
        found.append((loss, [stage.gradient.tobytes() for stage in stages]))
    assert found[0] == found[1]


def test_no_rank_holds_a_whole_batch(comm):
    """A rank holds the inputs of activations that are alive, and one target: besides them what is asked for first."""
    schedule = one_f_one_b(comm.size, 8 * comm.size)
    batch = asking(schedule, comm.rank, [2] * schedule.microbatches)
    with Pipeline(dense.model(schedule, comm.rank), schedule, comm, dense.mean_squared) as pipeline:
        pipeline.step(*batch)
        peak = pipeline.peak_activations
    assert all(asked is None or asked.most <= peak + 1 for asked in batch)
    assert all(asked is None or asked.alive == 0 for asked in batch)


def test_replicas_of_different_sizes_count_by_their_rows(comm):
    data = 2 if comm.size % 2 == 0 else 1
    schedule = gpipe(comm.size // data, 3)
    with Mesh(comm, pipe=schedule.ranks, data=data) as mesh:
        all_rows = [[2, 2, 2], [5, 5, 5]][:data]
        batches = [pieces_of(schedule, rows) for rows in all_rows]
        whole = [np.concatenate([piece for batch in batches for piece in batch[part]]) for part in (0, 1)]
        value, gradients, _, _ = dense.reference(schedule.stages, *whole)
        allowed = dense.bounds(schedule.stages, *whole)
        (stage,), place = dense.model(schedule, mesh.pipe.rank, dense.ShownStage), mesh.pipe.rank
        with Pipeline([stage], schedule, mesh.pipe, dense.mean_squared, replicas=mesh.replicas) as pipeline:
            result = pipeline.step(*asking(schedule, place, all_rows[mesh.data.rank]))
        within(result.loss, value, allowed[0], "loss")
        within(stage.gradient, gradients[place], allowed[1][place], "gradient")


def test_trees_may_be_given_and_are_handed_on_read_only(comm):
    class Tree(dense.Identity):
        def forward(self, x):
            assert not x["x"].flags.writeable
            return x, None

    def loss(output, target):
        assert not target[1].flags.writeable
        return float(output["x"].sum()), {"x": np.ones_like(output["x"])}

    schedule = one_f_one_b(comm.size, 3)
    feed, goal = (lambda m: {"x": np.full((2, 2), float(m))}), (lambda m: (np.zeros(2), np.zeros((2, 5))))
    for check in (False, True):
        with Pipeline([Tree()], schedule, comm, loss, check=check) as pipeline:
            for _ in range(2):
                assert pipeline.step(*dense.placed(schedule, comm.rank, feed, goal)).losses == [0, 4, 8]


def failing(microbatch, error):
    def give(m):
        if m == microbatch:
            raise error
        return np.ones((2, 3))

    return give


WRONG = {  # what a function gives for micro-batch 2, and what the error says of it
    "rows": (lambda: np.ones((1, 3)), "than was agreed on"),
    "dtype": (lambda: np.ones((2, 3), np.float32), "than was agreed on"),
    "structure": (lambda: (np.ones((2, 3)),), "than was agreed on"),
    "nothing": (lambda: None, "neither an array nor"),
    "order": (lambda: np.ones((3, 2)).T, "not C-contiguous"),
}


@pytest.mark.parametrize("part", ["inputs", "targets"])
@pytest.mark.parametrize("case", WRONG)
def test_a_micro_batch_that_is_not_as_agreed_is_one_error_that_says_where(comm, part, case):
    make, match = WRONG[case]
    give = lambda m: make() if m == 2 else np.ones((2, 3))  # noqa: E731
    check_failure(comm, part, give, match, ArgumentError)


@pytest.mark.parametrize("part", ["inputs", "targets"])
@pytest.mark.parametrize("error", [KeyError("gone"), DataError("the file ends early")])
def test_a_function_that_fails_is_one_error_that_says_where(comm, part, error):
    kind = DataError if isinstance(error, DataError) else StageError
    check_failure(comm, part, failing(2, error), f"{part}\\(2\\)", kind)


def check_failure(comm, part, give, match, kind):
    schedule = one_f_one_b(comm.size, 4)
    odd = schedule.placement[0 if part == "inputs" else -1]
    both = {"inputs": lambda m: np.ones((2, 3)), "targets": lambda m: np.ones((2, 3)), part: give}
    pipeline = Pipeline([dense.Identity()], schedule, comm, dense.mean_squared)
    with pytest.raises(MpipipeError, match=match) as caught:
        pipeline.step(*dense.placed(schedule, comm.rank, both["inputs"], both["targets"]))
    assert isinstance(caught.value, kind if comm.rank == odd else PeerError)
    if comm.rank == odd:
        assert (caught.value.rank, caught.value.microbatch) == (odd, 2) and part in str(caught.value)
    assert comm.allgather(caught.value.reported_elsewhere).count(False) == 1


AT_ONCE = {  # what is wrong when the first is asked for
    "an exception": (failing(0, KeyError("gone")), StageError, r"inputs\(0\) raised KeyError"),
    "no array": (lambda m: 3, ArgumentError, r"inputs\(0\): neither an array"),
    "more than targets": (lambda m: np.ones((3, 3)), ArgumentError, "different numbers of rows"),
}


@pytest.mark.parametrize("case", AT_ONCE)
def test_what_is_wrong_with_the_first_is_one_error_after_which_all_go_on(comm, case):
    give, kind, match = AT_ONCE[case]
    schedule = one_f_one_b(comm.size, 4)
    goal = lambda m: np.zeros((2, 3))  # noqa: E731
    with Pipeline([dense.Identity()], schedule, comm, dense.mean_squared) as pipeline:
        for call in (pipeline.step, pipeline.evaluate):
            with pytest.raises(kind, match=match):
                call(*dense.placed(schedule, comm.rank, give, goal))
        assert pipeline.step(*dense.placed(schedule, comm.rank, np.ones((8, 3)), goal)).loss == 1
