"""Attention over rings within modules of PyTorch and functions of JAX: equal to dense attention of these libraries."""

import copy
import threading
from functools import partial

import numpy as np
import pytest

torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
from support import dense  # noqa: E402
from support.reference_attention import Dense, visible_pairs  # noqa: E402
from support.rings import arrays  # noqa: E402
from support.tolerance import within  # noqa: E402

from mpipipe import Mesh, Pipeline, adapters, nn  # noqa: E402
from mpipipe.attention import Layout, Local, Ring, Ulysses  # noqa: E402
from mpipipe.errors import ArgumentError, MismatchError  # noqa: E402
from mpipipe.job import inprocess  # noqa: E402
from mpipipe.nn import Position  # noqa: E402

jax.config.update("jax_enable_x64", True)
pytestmark = pytest.mark.judges
ENOUGH = 1e-12  # of numbers about 1 in float64, by sums of some tens of terms
WIDTH, HEADS, KV_HEADS, SEQ = 16, 4, 2, 21


def torch_dense(q, k, v, mask):
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    found = torch.nn.functional.scaled_dot_product_attention(q, k, v, torch.from_numpy(mask), enable_gqa=True)
    return found.transpose(1, 2)


def jax_dense(q, k, v, mask):
    k, v = (jax.numpy.repeat(each, q.shape[2] // k.shape[2], 2) for each in (k, v))
    scores = jax.numpy.einsum("bihd,bjhd->bhij", q, k) * q.shape[3] ** -0.5
    return jax.numpy.einsum("bhij,bjhd->bihd", jax.nn.softmax(jax.numpy.where(mask, scores, -jax.numpy.inf)), v)


def through_torch(function, q, k, v, dout):
    """(out, dq, dk, dv)"""
    inputs = [torch.from_numpy(each.copy()).requires_grad_() for each in (q, k, v)]
    out = function(*inputs)
    out.backward(torch.from_numpy(dout))
    return [out.detach().numpy(), *(each.grad.numpy() for each in inputs)]


def through_jax(function, q, k, v, dout):
    def both(q, k, v, dout):
        out, pull = jax.vjp(function, q, k, v)
        return out, *pull(dout)

    return [np.asarray(each) for each in jax.block_until_ready(jax.jit(both)(q, k, v, dout))]


THROUGH = {"torch": through_torch, "jax": through_jax}
ATTEND = {"torch": adapters.torch_attend, "jax": adapters.jax_attend}
DENSE = {"torch": torch_dense, "jax": jax_dense}
each_library = pytest.mark.parametrize("library", THROUGH)


@each_library
@pytest.mark.parametrize(
    "kind, options", [("zigzag", {}), ("zigzag", {"causal": False}), ("striped", {}), ("contiguous", {"window": 4})]
)
def test_a_ring_is_dense_attention(comm, library, kind, options):
    layout = Layout(kind, comm.size, SEQ)
    whole = arrays(SEQ, heads=HEADS, kv_heads=KV_HEADS, value_dim=6)
    shards = [layout.shard(each, comm.rank) for each in whole]
    attend = ATTEND[library](Ring(comm, layout=layout, **options))
    expected = THROUGH[library](partial(DENSE[library], mask=visible_pairs(SEQ, SEQ, **options)), *whole)
    for _ in range(2):
        found = THROUGH[library](attend, *shards)
        for parts, right in zip(zip(*comm.allgather(found)), expected):
            assert np.abs(layout.unshard(parts) - right).max() <= ENOUGH


@each_library
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_on_one_rank_in_other_dtypes(library, dtype):
    q, k, v, dout = whole = arrays(SEQ, dtype=np.float32)
    attend = ATTEND[library](Local())
    if library == "torch":
        kind = getattr(torch, dtype)
        inputs = [torch.from_numpy(each).to(kind).requires_grad_() for each in (q, k, v)]
        out = attend(*inputs)
        out.backward(torch.from_numpy(dout).to(kind))
        given, found = [each.detach().float().numpy() for each in inputs], [out, *(each.grad for each in inputs)]
        assert {each.dtype for each in found} == {kind}
        rounded, found = torch.from_numpy(dout).to(kind).float().numpy(), [x.detach().float().numpy() for x in found]
    else:
        *given, rounded = (jax.numpy.asarray(each, dtype) for each in whole)
        found = through_jax(attend, *given, rounded)
        assert {each.dtype.name for each in found} == {dtype}
    expected = Dense(*given, rounded, visible_pairs(SEQ, SEQ))
    import ml_dtypes

    bounds = expected.bounds(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)
    for one, place in zip(found, (0, 2, 3, 4)):
        within(np.asarray(one, np.float64), expected[place], bounds[place])


# -- Modules and functions of one's own, in pipelines whose stages share a sequence -----------------------------------


class Block(torch.nn.Module):
    def __init__(self, attend, parameters):
        super().__init__()
        self.attend = attend
        for name, value in parameters.items():
            self.register_parameter(name, torch.nn.Parameter(torch.from_numpy(value.copy())))

    def forward(self, x):
        return block(self.attend, {"qkv": self.qkv, "out": self.out}, x)


def block(attend, parameters, x):
    heads = (x @ parameters["qkv"]).reshape(*x.shape[:2], HEADS + 2 * KV_HEADS, -1)
    q, k, v = heads[:, :, :HEADS], heads[:, :, HEADS:-KV_HEADS], heads[:, :, -KV_HEADS:]
    return x + attend(q, k, v).reshape(x.shape) @ parameters["out"]


def values(number):
    random, columns = np.random.default_rng(number), (HEADS + 2 * KV_HEADS) * WIDTH // HEADS
    return {"qkv": random.normal(size=(WIDTH, columns)) / 3, "out": random.normal(size=(WIDTH, WIDTH)) / 3}


def stage_of(library, attend, number):
    if library == "torch":
        return adapters.torch_stage(Block(attend, values(number)), prefix=f"{number}.")
    return adapters.jax_stage(partial(block, attend), values(number), prefix=f"{number}.")


@each_library
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["one_f_one_b", "zero_bubble_h1"])
def test_pipelines_whose_stages_share_a_sequence_equal_one_process(comm, library, name, recompute):
    """pipe x seq = 1 x 1, 1 x 2, 2 x 2: losses and gradients of uneven shards."""
    if comm.size not in (1, 2, 4):
        pytest.skip("for 1, 2 or 4 ranks")
    pipe = 2 if comm.size == 4 else 1
    x, target = np.random.default_rng(0).normal(size=(2, 4, SEQ, WIDTH))
    mask = partial(DENSE[library], mask=visible_pairs(SEQ, SEQ))
    whole, kept, y = [stage_of(library, mask, number) for number in range(pipe)], [], x
    for stage in whole:
        y, saved = stage.forward(y)
        kept.append(saved)
    loss, dy = nn.mean_squared_error(np.asarray(y), target)
    for stage, saved in zip(whole[::-1], kept[::-1]):
        dy = stage.backward(dy, saved)
    with Mesh(comm, pipe=pipe, seq=comm.size // pipe) as mesh:
        layout = Layout("zigzag", mesh.seq.size, SEQ)
        stage = stage_of(library, ATTEND[library](Ring(mesh.seq, layout=layout)), mesh.pipe.rank)
        weight = layout.weight(mesh.seq.rank)
        schedule = dense.build(name, pipe, 1, 2)
        mine = dense.placed(schedule, mesh.pipe.rank, *(layout.shard(each, mesh.seq.rank) for each in (x, target)))
        mean = lambda y, t: (*nn.mean_squared_error(np.asarray(y), t), weight)  # noqa: E731
        with Pipeline([stage], schedule, mesh.pipe, mean, replicas=mesh.replicas, recompute=recompute) as pipeline:
            for _ in range(2):
                found = pipeline.step(*mine).loss
        assert abs(found - loss) <= ENOUGH
        for key, right in whole[mesh.pipe.rank].gradients.items():
            assert np.abs(stage.gradients[key] - right).max() <= ENOUGH, key


@each_library
def test_branches_of_a_module_go_around_the_ring_in_one_order(comm, library):
    layout, whole = Layout("zigzag", comm.size, SEQ), arrays(SEQ)

    def branches(attend, q, k, v):
        return attend(q, k, v) - 2 * attend(q, v, k) * attend(2 * q, k, v)

    attend = ATTEND[library](Ring(comm, layout=layout))
    found = THROUGH[library](partial(branches, attend), *(layout.shard(each, comm.rank) for each in whole))
    alone = partial(branches, partial(DENSE[library], mask=visible_pairs(SEQ, SEQ)))
    for parts, right in zip(zip(*comm.allgather(found)), THROUGH[library](alone, *whole)):
        assert np.abs(layout.unshard(parts) - right).max() <= 10 * ENOUGH


@each_library
def test_ranks_that_differ_raise_one_error(pair, library):
    """The error of a ring itself comes out of a stage."""
    stage = stage_of(library, ATTEND[library](Ring(pair)), 0)
    with pytest.raises(MismatchError, match="ranks differ in batch"):
        stage.forward(np.ones((1 + pair.rank, 3, WIDTH)))


# -- What PyTorch and JAX do and do not do with it -------------------------------------------------------------------


class Watched(Local):
    """Notes the arrays that it is given, and its threads."""

    def forward(self, q, k, v):
        self.given, self.thread = (q, k, v), threading.get_ident()
        return super().forward(q, k, v)

    def backward(self, dout, saved):
        self.backward_thread = threading.get_ident()
        return super().backward(dout, saved)


def tensors(dtype=torch.float64):
    return [torch.from_numpy(each).to(dtype).requires_grad_() for each in arrays(SEQ)[:3]]


def test_tensors_are_not_copied_and_the_backward_is_in_the_thread_that_asks_for_it():
    inner = Watched()
    attend = adapters.torch_attend(inner)
    heads = torch.randn(2, 5, 8, 3, dtype=torch.float64, requires_grad=True)
    given = heads[:, :, :4], heads[:, :, 4:6], heads[:, :, 6:]
    out = attend(*given)
    for array, tensor in zip(inner.given, given):
        assert np.shares_memory(array, tensor.detach().numpy())
    out.sum().backward()
    assert inner.thread == inner.backward_thread == threading.get_ident()
    assert copy.deepcopy(torch.nn.Sequential(attend))[0].attend is inner


def test_what_is_written_to_before_the_backward_is_seen():
    attend = adapters.torch_attend(Local())
    for place in range(4):
        inputs = [each * 1 for each in tensors()]
        out = attend(*inputs)
        [*inputs, out][place].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_pytorch_refuses(monkeypatch):
    attend = adapters.torch_attend(Local())
    q, k, v = tensors()
    with pytest.raises(ArgumentError, match="cannot be differentiated again"):
        torch.autograd.grad(attend(q, k, v).sum(), q, create_graph=True)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(ArgumentError, match=r"within torch\.compile"):
        attend(q, k, v)
    with pytest.raises(ArgumentError, match="an object that attends"):
        adapters.torch_attend(torch.nn.Linear(2, 2))


def test_messages_move_while_a_module_attends():
    class Attends(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attend = adapters.torch_attend(Local())

        def forward(self, x):
            return self.attend(x, x, x)

    stage, polls = adapters.torch_stage(Attends()), []
    x = np.ones((1, SEQ, 2, 4))
    stage.forward(x)  # without a pipeline
    stage.poll = lambda: polls.append(threading.get_ident())
    y, saved = stage.forward(x)
    before = len(polls)
    stage.backward(np.ones_like(y), saved)
    assert 0 < before < len(polls)


def test_jax_refuses():
    attend = adapters.jax_attend(Local())
    q, k, v = (jax.numpy.asarray(each) for each in arrays(SEQ)[:3])

    def total(q):
        return (attend(q, k, v) ** 2).sum()

    for again in (jax.hessian(total), jax.jit(jax.grad(lambda q: jax.grad(total)(q).sum()))):
        with pytest.raises(ValueError, match="do not support JVP"):
            again(q)
    with pytest.raises(ValueError, match="Cannot `vmap` ordered IO callback"):
        jax.vmap(attend)(q[None], k[None], v[None])
    with pytest.raises(NotImplementedError, match="Effects not supported"):
        jax.grad(lambda q: jax.checkpoint(attend)(q, k, v).sum())(q)
    with pytest.raises(ArgumentError, match="do not fit together"):
        jax.jit(attend)(q[0], k, v)
    with pytest.raises(ArgumentError, match="jax_attend"):
        inprocess.run(1, lambda comm: adapters.jax_attend(Ulysses(comm)))
    with pytest.raises(ArgumentError, match="a ring of threads within JAX"):
        inprocess.run(2, lambda comm: adapters.jax_attend(Ring(comm)))


def test_a_backward_of_jax_that_never_comes_leaves_nothing():
    """As the first forward of a recomputation: what it has saved is with JAX."""
    attend = adapters.jax_attend(Local())
    host = attend.__wrapped__.__closure__[0].cell_contents.__closure__
    (kept,) = (cell.cell_contents._saved for cell in host if hasattr(cell.cell_contents, "_saved"))
    stage = stage_of("jax", attend, 0)
    for _ in range(3):
        stage.forward(np.ones((1, SEQ, WIDTH)), Position())
    assert len(kept) == 1 and all(each.q is each.out is each.lse is None for each in kept.values())


def test_calls_after_a_function_of_jax_that_runs_ahead_come_after_it(pair):
    """JAX returns before it has computed on rank 0, and later than that on rank 1: the ring is still in one order."""
    ring, layout = Ring(pair), Layout("contiguous", 2, SEQ)
    whole = arrays(SEQ, heads=2)
    q, k, v, _ = (layout.shard(each, pair.rank) for each in whole)
    attend = adapters.jax_attend(ring)
    compiled = jax.jit(lambda late, factor: attend(q + 0 * late[0, 0] * factor, k, v))
    square = jax.numpy.ones((1200, 1200))
    compiled(square, 1.0).block_until_ready()
    for _ in range(2 if pair.rank == 0 else 0):
        square = jax.numpy.tanh(square @ square)
    first = compiled(square, 1.0)
    second, _ = ring.forward(q, 3 * k, v)
    for factor, found in ((1, np.asarray(first)), (3, second)):
        right = through_torch(
            partial(torch_dense, mask=visible_pairs(SEQ, SEQ)), whole[0], factor * whole[1], *whole[2:]
        )[0]
        assert np.abs(layout.unshard(pair.allgather(found)) - right).max() <= ENOUGH


ONE_CORE = """
import os
os.sched_setaffinity(0, {next(iter(os.sched_getaffinity(0)))})
os.environ.pop("NPROC", None)
import jax
import numpy as np
from mpipipe import adapters, attention
from mpipipe.errors import ArgumentError

if BEGUN:
    jax.numpy.ones(3).block_until_ready()
    try:
        adapters.jax_attend(attention.Local())
    except ArgumentError as error:
        print(error.message)
    raise SystemExit
attend = adapters.jax_attend(attention.Local())
stage = adapters.jax_stage(lambda _, x: attend(x @ np.eye(16), x, x), {})
x = np.ones((2, 1024, 4, 16), np.float32)
for _ in range(5):
    stage.backward(*stage.forward(x))
print("went on")
"""


@pytest.mark.parametrize("begun", [False, True])
def test_a_rank_on_one_core_does_not_wait_for_a_thread_that_jax_has_not(launch, begun):
    job = launch(1, f"BEGUN = {begun}\n{ONE_CORE}", timeout=60)
    assert job.returncode == 0, job.stderr
    assert ("JAX has begun, with one thread" if begun else "went on") in job.stdout


SCRIPT = """
import {library}
import numpy as np
from mpipipe import adapters, attention
from mpipipe.job import runtime

comm = runtime.world()
attend = adapters.{library}_attend(attention.Ring(comm))
if comm.rank == 1:
    attention.Ring.backward = None
x = np.ones((1, 4, 2, 8), np.float32)
{train}
"""
TRAIN = {
    "jax": "stage = adapters.jax_stage(lambda _, x: attend(x, x, x), {})\nstage.backward(*stage.forward(x))",
    "jax, compiled": "print(jax.jit(jax.grad(lambda x: attend(x, x, x).sum()))(x))",
}


@pytest.mark.parametrize("case", TRAIN)
def test_a_rank_that_raises_within_attention_ends_the_job(launch, tmp_path, case):
    """JAX makes an error of its own of that which rank 0 has of the end of rank 1, and logs both."""
    library, script = case.split(",")[0], tmp_path / "job.py"
    script.write_text(SCRIPT.format(library=library, train=TRAIN[case]))
    job = launch(2, ["-m", "mpipipe", "run", str(script)], timeout=100)
    assert job.returncode != 0
    assert "TypeError: 'NoneType' object is not callable" in job.stderr
    assert ("job ended by rank 1" in job.stderr) == (case != "jax, compiled")
