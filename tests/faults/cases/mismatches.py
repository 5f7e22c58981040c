"""Ranks that disagree, and arguments that are wrong: every rank raises the same, and one reports it."""

from __future__ import annotations

from faults.blocks import RUN, on, refused

RING = "q = np.ones((1, 512, 4, 32), np.float32)\nattention.ring_attention(q, q, q, comm{})"


def _differs(name, odd, *says, rest="train()", **options):
    return refused(f"{name} differs", "mismatch", on("last", odd or "pass") + rest, *says, **options)


def _misuse(name, body, *says, **options):
    return refused(name, "misuse", body, *says, **{"ranks": (1, 2, 4), **options})


def _mismatch(name, body, *says, **options):
    return refused(name, "mismatch", body, *says, **options)


FAULTS = (
    _mismatch(
        "micro-batches of rank 1",
        "if rank == 1: schedule = schedules.one_f_one_b(size, 5)\ntrain()",
        "MismatchError: rank 1",
        ranks=(2, 4),
        quick=(4, RUN),
    ),
    _misuse(
        "missing targets", "targets = None\ntrain()", "ArgumentError: rank {last}: targets are missing", quick=(4, RUN)
    ),
    _misuse(
        "wrong dtype of the inputs",
        "if rank == 0: inputs = inputs.astype(float)\ntrain()",
        "rank 0, stage 0, micro-batch 0: the input of a stage",
        code=(1, 2),
        quick=(4, RUN),
    ),
    _misuse(
        "a loss that is not a number",
        "if rank == last: targets[700] = np.nan\ntrain()",
        "NonFiniteError: rank {last}, stage {last}, micro-batch 1",
        code=(1, 2),
        quick=(4, RUN),
    ),
    _differs("width of a stage", "stages = [nn.Stage([nn.Linear(32, 64)], first=rank)]", "micro-batch 0", code=(1, 2)),
    _differs(
        "what is called",
        "",
        "MismatchError",
        rest="""
with build() as pipeline:
    pipeline.forward(inputs) if rank == last else pipeline.step(inputs, targets)
""",
    ),
    _differs("number of steps", "", "MismatchError", "close", rest="train(3 if rank == last else 4)", never=()),
    _differs(
        "shape in a ring",
        "",
        "Error",
        rest="""
q = np.ones((1, 512, 4, 64 if rank == last else 32), np.float32)
attention.ring_attention(q, q, q, comm)
""",
    ),
    _mismatch(
        "ranks step different pipelines",
        "a, b = build(), build()\n(a if rank == last else b).step(inputs, targets)",
        "MismatchError",
        code=(1, 2),
        ranks=(2, 4),
        quick=(2, RUN),
    ),
    _misuse("an unknown layout", RING.format(", layout='diagonal'"), "layout", ranks=(1, 2)),
    _misuse("a stage without methods", on("last", "stages = [object()]") + "train()", "ArgumentError", code=(1, 2)),
    _misuse(
        "a step after close", "p = build()\np.close()\np.step(inputs, targets)", "Error", code=(1, 2), ranks=(1, 2)
    ),
    _misuse(
        "a stage that calls its own pipeline",
        """
pipeline = build()
if rank == last: breaks('forward', lambda: pipeline.evaluate(inputs, targets))
pipeline.step(inputs, targets)
""",
        "ArgumentError",
        code=(1, 2),
        quick=(2, RUN),
    ),
)
