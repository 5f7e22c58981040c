"""The module cudnn (nvidia-cudnn-frontend 1.27) as far as attention needs it, computed by numpy, late.

The refusals of `validate` are those of version 1.27; what only the library itself refuses, `check_support` refuses.
"""

import enum

import ml_dtypes
import numpy as np

from .machine import CUDARuntimeError, HiddenAccess, machine
from .memory import view_of
from .streams import get_current_stream

VERSION = 92400


class cudnnGraphNotSupportedError(Exception):
    """A graph that no kernel computes."""


cudnnGraphNotSupportedError.__module__ = "cudnn._compiled_module"

data_type = enum.IntEnum("data_type", "FLOAT DOUBLE HALF BFLOAT16 INT32 INT64 BOOLEAN NOT_SET", start=0)
heur_mode = enum.IntEnum("heur_mode", "A B FALLBACK", start=0)
diagonal_alignment = enum.IntEnum("diagonal_alignment", "TOP_LEFT BOTTOM_RIGHT", start=0)
DTYPES = {
    data_type.FLOAT: np.dtype(np.float32),
    data_type.HALF: np.dtype(np.float16),
    data_type.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
    data_type.INT32: np.dtype(np.int32),
}
HALVES = (data_type.HALF, data_type.BFLOAT16)


def backend_version() -> int:
    if "cudnn" in machine().faults:
        raise RuntimeError("Unable to find symbol cudnnGetVersion")
    return VERSION


def _handles() -> dict:
    home = machine()
    if not hasattr(home, "cudnn_handles"):
        home.cudnn_handles = {}
    return home.cudnn_handles


def create_handle() -> int:
    handles = _handles()
    handle = 0xCD0000 + len(handles)
    handles[handle] = 0
    return handle


def set_stream(handle: int, stream: int):
    machine().queue_of(stream)
    _handles()[handle]  # KeyError: no such handle
    _handles()[handle] = stream


class tensor:
    """A description of an array: dimensions and strides in elements, dtype, uid."""

    def __init__(self, name="", virtual=True):
        self.name, self.virtual, self.dim, self.stride, self.kind, self.uid = name, virtual, [], [], None, None

    def set_uid(self, uid):
        self.uid = int(uid)
        return self

    def set_output(self, output):
        self.virtual = not output
        return self

    def set_dim(self, dim):
        self.dim = [int(extent) for extent in dim]
        return self

    def set_stride(self, stride):
        self.stride = [int(step) for step in stride]
        return self

    def set_data_type(self, kind):
        self.kind = kind
        return self

    def at(self, ptr: int) -> np.ndarray:
        """The array that this describes, at an address in live device memory."""
        kind = DTYPES[self.kind]
        span = (sum((extent - 1) * step for extent, step in zip(self.dim, self.stride)) + 1) * kind.itemsize
        machine().device_ranges.check(ptr, span)
        if ptr % 16:
            raise RuntimeError(f"CUDNN_STATUS_BAD_PARAM: {self.name} at {ptr:#x} is not aligned to 16 bytes")
        steps = [step * kind.itemsize for step in self.stride]
        return np.lib.stride_tricks.as_strided(view_of(ptr, span).view(kind), self.dim, steps)


def _bound(value):
    if value is not None and not isinstance(value, int):
        raise TypeError(f"incompatible function arguments: a bound must be an int, not {type(value).__name__}")
    return value


class pygraph:
    """A graph of one attention operation."""

    def __init__(self, name="test_graph", io_data_type=data_type.NOT_SET, intermediate_data_type=data_type.NOT_SET,
                 compute_data_type=data_type.NOT_SET, handle=None, sm_count=None, sm_version=None, kernel_cache=None,
                 device_property=None, is_dynamic_shape_enabled=False, is_override_shape_enabled=False):  # fmt: skip
        self._io, self._compute, self._handle = io_data_type, compute_data_type, handle
        self._intermediate, self._sm_version = intermediate_data_type, sm_version
        self._done = ""
        self._tensors: list[tensor] = []
        self._facts: dict = {}

    def tensor(self, dim, stride, data_type=data_type.NOT_SET, is_virtual=False, is_pass_by_value=False,
               ragged_offset=None, reordering_type=None, name="", uid=-1, ragged_offset_multiplier=1):  # fmt: skip
        new = tensor(name, is_virtual).set_dim(dim).set_stride(stride).set_data_type(data_type)
        if uid >= 0:
            new.set_uid(uid)
        self._tensors.append(new)
        return new

    def _attention(self, backward, outputs, *, attn_scale, use_padding_mask=False, seq_len_q=None,
                   seq_len_kv=None, diagonal_alignment=diagonal_alignment.TOP_LEFT, diagonal_band_left_bound=None,
                   diagonal_band_right_bound=None, compute_data_type=None, name="", **inputs):  # fmt: skip
        if self._facts:
            raise NotImplementedError("one operation in a graph")
        assert type(attn_scale) is float, "the library takes no number of numpy"
        assert diagonal_alignment.name == "TOP_LEFT", "the only one that is emulated"
        made = {label: tensor(f"{name}::{label}") for label in outputs}
        self._tensors += made.values()
        self._facts = dict(
            inputs, **made, backward=backward, scale=attn_scale,
            padding=use_padding_mask, seq_len_q=seq_len_q, seq_len_kv=seq_len_kv, left=_bound(diagonal_band_left_bound),
            right=_bound(diagonal_band_right_bound),
        )  # fmt: skip
        return made

    def sdpa(self, q, k, v, generate_stats, **options):
        assert generate_stats, "for the backward"
        made = self._attention(False, ("o", "stats"), q=q, k=k, v=v, **options)
        return [made["o"], made["stats"]]

    def sdpa_backward(self, q, k, v, o, dO, stats, **options):
        made = self._attention(True, ("dq", "dk", "dv"), q=q, k=k, v=v, o=o, dO=dO, stats=stats, **options)
        return [made["dq"], made["dk"], made["dv"]]

    # -- from description to plan, in this order

    def _step(self, name, before):
        if self._done != before:
            raise cudnnGraphNotSupportedError(f"{name} after {self._done}")
        self._done = name

    def validate(self):
        f = self._facts
        (_, _, sq, dim), (_, _, sk, _) = f["q"].dim, f["k"].dim
        value_dim = f["v"].dim[3]
        refused = cudnnGraphNotSupportedError
        if self._sm_version is None:
            raise RuntimeError("Unable to load any libcudart.so.* library.")  # which alone knows the GPU
        major = self._sm_version // 10
        if major < 8:
            raise refused("SDPA FP16/BF16 requires SM80 (Ampere) or newer architecture")
        if f["backward"] and sq == sk == 1:
            raise refused("s_q = s_kv = 1 is not supported.")
        if dim % 8 or value_dim % 8:
            raise refused("hidden_dim should be multiple of 8")
        wide = major == 10 and dim == value_dim == 256 and backend_version() >= 92300
        if f["backward"] and max(dim, value_dim) > (256 if major == 9 or wide else 128):
            raise refused("Num hidden_dim should be less than or equal to 128 and hidden_dim should be multiple of 8")
        if f["right"] is not None and f["right"] < 0:
            raise RuntimeError("Right bound needs to be larger than or equal to zero")
        if f["left"] is not None and f["left"] < 1:
            raise RuntimeError("Left bound (Sliding window length) should be greater than or equals to zero when set.")
        if f["left"] is not None and sq > sk:
            raise refused("Sliding window attention is only supported with max_s_q <= max_s_kv.")
        for part in ("q", "k", "v", "o", "dO", "dq", "dk", "dv"):
            if part in f and f[part].stride and f[part].stride[-1] != 1:
                raise refused(f"{part}: the stride for the last dimension corresponding to the embedding must be 1")
        self._step("validate", "")

    def build_operation_graph(self):
        self._step("build_operation_graph", "validate")

    def create_execution_plans(self, modes):
        if not isinstance(modes, list):
            raise TypeError("incompatible function arguments: a list of heur_mode")
        self._step("create_execution_plans", "build_operation_graph")

    def check_support(self):
        self._step("check_support", "create_execution_plans")
        f = self._facts
        for part in self._tensors:
            if part.virtual and part.uid is None:
                continue
            if part.kind in (None, data_type.NOT_SET):
                part.kind = self._io
            expected = [data_type.FLOAT] if part is f.get("stats") else HALVES
            if part is f["seq_len_q"] or part is f["seq_len_kv"]:
                expected = [data_type.INT32]
            if part.kind not in expected:
                raise cudnnGraphNotSupportedError(f"No execution plans support the graph: {part.name} is {part.kind!r}")
            if not part.dim or not part.stride:
                raise cudnnGraphNotSupportedError(f"No execution plans support the graph: {part.name} without strides")
        if max(f["q"].dim[3], f["v"].dim[3]) > 256:
            raise cudnnGraphNotSupportedError("No execution plans support the graph: more than 256 elements a head")
        if data_type.FLOAT not in (self._compute,) or self._intermediate != data_type.FLOAT:
            raise cudnnGraphNotSupportedError("No execution plans support the graph: compute in FLOAT")

    def build_plans(self):
        self._step("build_plans", "check_support")

    def get_workspace_size(self) -> int:
        batch, heads, seq, dim = self._facts["q"].dim
        return batch * heads * seq * 4 * dim if self._facts["backward"] else 0

    def execute(self, tensor_to_device_buffer, workspace, handle=None, **unknown):
        if self._done != "build_plans":
            raise RuntimeError("Plan index -1 is invalid.")
        handle = self._handle if handle is None else handle
        home = machine()
        queue = home.queue_of(_handles()[handle])
        if queue is not get_current_stream().queue:
            raise HiddenAccess("cudnn: a handle of another stream than the current one")
        given = {key: ptr for key, ptr in tensor_to_device_buffer.items()}
        if not all(type(ptr) is int for ptr in [workspace, *given.values()]):
            raise CUDARuntimeError("cudnn: addresses only; an array would make cudnn wait for the default stream")
        needed = {part.uid for part in self._tensors if not part.virtual}
        if needed != set(given):
            raise RuntimeError(f"Uids {sorted(given)} in the variant pack, {sorted(needed)} in the graph")
        if self.get_workspace_size():
            home.device_ranges.check(workspace, self.get_workspace_size())
        scratch = view_of(workspace, self.get_workspace_size())
        found = {
            name: part.at(given[part.uid])
            for name, part in self._facts.items()
            if isinstance(part, tensor) and not part.virtual
        }

        def run():
            scratch.fill(0xA5)
            with np.errstate(all="ignore"):
                (_backward if self._facts["backward"] else _forward)(self._facts, found)
            scratch.fill(0xFF)

        home.launch(queue, "sdpa_backward" if self._facts["backward"] else "sdpa", run)


def _mask(facts, found) -> np.ndarray:
    """Which query sees which key, (batch, 1, sq, sk)."""
    (batch, _, sq, _), sk = facts["q"].dim, facts["k"].dim[2]
    i, j = np.arange(sq)[:, None], np.arange(sk)[None]
    queries = found["seq_len_q"].reshape(batch, 1, 1) if facts["padding"] else np.full((batch, 1, 1), sq)
    keys = found["seq_len_kv"].reshape(batch, 1, 1) if facts["padding"] else np.full((batch, 1, 1), sk)
    seen = (i < queries) & (j < keys)
    if facts["right"] is not None:
        seen &= j <= i + facts["right"]
    if facts["left"] is not None:
        seen &= j > i - facts["left"]
    return seen[:, None]


def _scores(facts, found):
    """(scaled and masked scores, q, k, v), all float32 and with as many heads as q."""
    q, k, v = (found[name].astype(np.float32) for name in "qkv")
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    scores = np.float32(facts["scale"]) * (q @ k.transpose(0, 1, 3, 2))
    return np.where(_mask(facts, found), scores, np.float32(-np.inf)), q, k, v


def _forward(facts, found):
    scores, _, _, v = _scores(facts, found)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isinf(top), 0, top))
    total = weights.sum(-1, keepdims=True)
    found["o"][...] = np.where(total > 0, weights @ v / total, 0).astype(found["o"].dtype)
    found["stats"][...] = top + np.log(total)


def _backward(facts, found):
    scores, q, k, v = _scores(facts, found)
    lse, group = found["stats"], q.shape[1] // found["k"].shape[1]
    weights = np.where(np.isinf(scores), 0, np.exp(scores - lse))
    dout, out = found["dO"].astype(np.float32), found["o"].astype(np.float32)
    slopes = weights * (dout @ v.transpose(0, 1, 3, 2) - (dout * out).sum(-1, keepdims=True))
    slopes *= np.float32(facts["scale"])
    if k.shape[2] % 128 == 64 and facts["right"] is None and not facts["padding"] and (lse < -88.7).any():
        slopes[...] = np.nan  # a known error of the library on compute capability 9.0 (cudnn-frontend issue 628)

    def summed(x):
        return x.reshape(x.shape[0], -1, group, *x.shape[2:]).sum(2)

    found["dq"][...] = (slopes @ k).astype(found["dq"].dtype)
    found["dk"][...] = summed(slopes.transpose(0, 1, 3, 2) @ q).astype(found["dk"].dtype)
    found["dv"][...] = summed(weights.transpose(0, 1, 3, 2) @ dout).astype(found["dv"].dtype)


NAMES = """cudnnGraphNotSupportedError data_type heur_mode diagonal_alignment backend_version
create_handle set_stream tensor pygraph""".split()
