"""Sizes that nobody can mean are refused on every rank before anything of that size is built."""

import resource

import pytest
from support.text_plan import text_plan

from mpipipe import planning, processor
from mpipipe.errors import ConfigError, MpipipeError
from mpipipe.language.models import GPT
from mpipipe.train import TrainConfig, train
from mpipipe.train.training_plan import check_training, problem_of

ABSURD = [
    ({"chunks": 10**6, "schedule": "interleaved_1f1b"}, "the schedule is too large"),
    ({"batch": 10**9, "microbatches": 10**9}, "the schedule is too large"),
    ({"microbatches": 10**9}, "fewer sequences than micro-batches"),
    ({"layers": 10**8}, "too many layers"),
    ({"dim": 10**7}, "does not fit into memory"),
    ({"hidden": 10**11}, "does not fit into memory"),
    ({"dim": 10**7, "dtype": "bfloat16", "optimizer": "sgd"}, "does not fit into memory"),
    ({"seq_len": 10**10}, "does not fit into memory"),
    ({"batch": 10**10}, "does not fit into memory"),
    ({"steps": 10**30}, "out of range"),
]


@pytest.mark.few
@pytest.mark.parametrize(("keys", "match"), ABSURD)
def test_absurd_sizes_are_refused_with_a_remedy_before_they_take_memory(comm, mpi_tmp_path, keys, match):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(MpipipeError, match=match) as caught:
        train(TrainConfig(**{"pipe": comm.size, "device": "cpu", "out": str(mpi_tmp_path / "run"), **keys}), GPT, comm)
    assert caught.value.found and caught.value.expected
    assert caught.value.remedy or match == "out of range"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB
    assert not (mpi_tmp_path / "run").exists()


def test_a_model_that_just_fits_is_not_refused(monkeypatch):
    config = TrainConfig(dim=64, layers=2, heads=2, batch=4, microbatches=2, dtype="float64")
    task, plan = text_plan(config, 2)
    problem = problem_of(config, task, 2, 1)
    sample, message = task.sample_bytes(plan.microbatch_rows, "float64")
    counts = [planning.parameters_of([problem.layers[each] for each in plan.layers_of(rank)]) for rank in (0, 1)]
    assert sum(counts) == task.model.parameters
    for rank, count in enumerate(counts):
        layers = len(plan.layers_of(rank))
        needed = 8 * count * 4 + 16 * 4 * 128 + layers * 2 * 128 * 64 * 8
        monkeypatch.setattr(processor, "bytes_of_line", lambda _, needed=needed: needed)
        check_training(problem, plan, rank, "cpu", sample=sample, message=message)
        monkeypatch.setattr(processor, "bytes_of_line", lambda _, needed=needed: needed - 1)
        with pytest.raises(ConfigError, match=f"pipeline rank {rank}") as caught:
            check_training(problem, plan, rank, "cpu", sample=sample, message=message)
        assert f"{count:,} parameters" in caught.value.found and "adamw" in caught.value.found
        # on a GPU it is that which must hold the rest
        check_training(problem, plan, rank, "cuda", sample=sample, message=message)


def test_a_machine_that_does_not_say_how_much_memory_it_has_refuses_nothing(monkeypatch):
    assert processor.bytes_of_line("MemTotal") > 1 << 28  # this one does
    monkeypatch.setattr(processor, "bytes_of_line", lambda *_: None)
    config = TrainConfig(dim=64, layers=2, heads=2, batch=4, microbatches=2)
    task, plan = text_plan(config, 2)
    check_training(problem_of(config, task, 2, 1), plan, 0, "cpu", sample=10**18, message=1)
