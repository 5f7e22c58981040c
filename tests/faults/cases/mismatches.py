"""Ranks that disagree, and arguments that are wrong: every rank raises the same, and one reports it."""

from __future__ import annotations

from faults.blocks import RUN, on, refused

MESH = "mpipipe.Mesh(comm, pipe={})"
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
    _mismatch(
        "schedule of rank 3",
        "if rank == 3: schedule = schedules.gpipe(size, 4)\ntrain()",
        "MismatchError: rank 3",
        ranks=(4,),
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
    _differs("number of stages", "stages = stages * 2", "wrong number of stages"),
    _differs("recomputation", "", "MismatchError", rest="train(recompute=rank == last)", ranks=(2,)),
    _differs("width of a stage", "stages = [nn.Stage([nn.Linear(32, 64)], first=rank)]", "micro-batch 0", code=(1, 2)),
    _differs("batch of the targets", "targets = targets[:-512]", "targets", code=(1, 2)),
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
    _differs("extent of a mesh", "", "Error", rest="mpipipe.Mesh(comm, pipe=size if rank == last else 1)"),
    _differs(
        "shape in a ring",
        "",
        "Error",
        rest="""
q = np.ones((1, 512, 4, 64 if rank == last else 32), np.float32)
attention.ring_attention(q, q, q, comm)
""",
    ),
    _differs("causality of a ring", "", "Error", rest=RING.format(", causal=rank == last")),
    _differs("layout of a ring", "", "Error", rest=RING.format(", layout='striped' if rank == last else 'zigzag'")),
    _mismatch(
        "ranks step different pipelines",
        "a, b = build(), build()\n(a if rank == last else b).step(inputs, targets)",
        "MismatchError",
        code=(1, 2),
        ranks=(2, 4),
        quick=(2, RUN),
    ),
    _mismatch(
        "pipelines are built in another order",
        """
def other():
    return mpipipe.Pipeline(stages, schedules.gpipe(size, 8), comm, loss=loss)
first, second = (other(), build()) if rank == last else (build(), other())
""",
        "MismatchError",
        code=(1, 2),
    ),
    _misuse("a mesh that does not fill the communicator", MESH.format("size + 1"), "mesh", ranks=(1, 2)),
    _misuse("no schedule", "schedule = None\ntrain()", "ArgumentError"),
    _misuse(
        "a schedule of more ranks", "schedule = schedules.gpipe(size + 1, 4)\ntrain()", "ArgumentError", ranks=(1, 2)
    ),
    _misuse("missing inputs", "inputs = None\ntrain()", "inputs are missing"),
    _misuse(
        "inputs that are a list",
        "inputs = 'text' if rank == 0 else None\ntrain()",
        "ArgumentError",
        code=(1, 2),
        ranks=(1, 2),
    ),
    _misuse("an unknown layout", RING.format(", layout='diagonal'"), "layout", ranks=(1, 2)),
    _misuse("a scale that is not a number", RING.format(", scale=float('nan')"), "scale", ranks=(1, 2)),
    _misuse("a norm below 0", "optim.clip_by_global_norm(stages, -1.0, comm)", "max_norm", ranks=(1, 2)),
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
