"""cupy.ndarray without arithmetic: memory, views, and an error for everything that looks inside."""

import numpy as np

from .machine import POISON, HiddenAccess, NotEmulatedError, machine
from .memory import alloc
from .streams import get_current_stream

FORBIDDEN = """__array__ __float__ __int__ __bool__ __complex__ __index__ __iter__ __contains__ __setitem__
__reduce_ex__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __neg__ __pos__ __abs__ __invert__ item tolist tobytes
__dlpack__ __cuda_array_interface__""".split()
OPERATORS = "add sub mul truediv floordiv mod divmod pow matmul and or xor lshift rshift".split()
REMEDY = "use arrays.download, arrays.upload, arrays.copy_into or a kernel"


def _prod(shape) -> int:
    size = 1
    for extent in shape:
        size *= extent
    return size


class Flags:
    def __init__(self, host):
        self.c_contiguous, self.f_contiguous = host.flags.c_contiguous, host.flags.f_contiguous
        self.forc = self.c_contiguous or self.f_contiguous


class ndarray:
    """A view of device memory; the host array `_host` on the same bytes has its geometry; only operations use it."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, shape, dtype=float, memptr=None, strides=None, order="C"):
        shape = (int(shape),) if np.ndim(shape) == 0 else tuple(int(extent) for extent in shape)
        kind = np.dtype(dtype)
        if strides is not None and memptr is None:
            raise ValueError("memptr is required if strides is given.")
        memptr = alloc(_prod(shape) * kind.itemsize) if memptr is None else memptr
        place = memptr.ptr - memptr.mem.ptr
        host = np.ndarray(shape, kind, memptr.mem._storage[place:], 0, strides, order)
        self._set(host, memptr, None)

    def _set(self, host, memptr, base):
        self._host, self.data, self.base = host, memptr, base
        self.shape, self.dtype, self.strides = host.shape, host.dtype, host.strides
        self.ndim, self.size, self.nbytes, self.itemsize = host.ndim, host.size, host.nbytes, host.itemsize

    def _view(self, host):
        offset = host.ctypes.data - self._host.ctypes.data if host.size else 0
        view = object.__new__(ndarray)
        view._set(host, self.data + offset, self if self.base is None else self.base)
        return view

    @property
    def flags(self):
        return Flags(self._host)

    @property
    def device(self):
        from .runtime import Device

        return Device(self.data.device_id)

    @property
    def T(self):
        return self._view(self._host.T)

    def __len__(self):
        return len(self._host)

    def __repr__(self):
        return f"<device array {self.shape} {self.dtype.name}>"

    def __getitem__(self, key):
        keys = key if isinstance(key, tuple) else (key,)
        for part in keys:
            if not (part is None or part is Ellipsis or isinstance(part, (int, np.integer, slice))):
                raise NotEmulatedError(f"a device array indexed by {type(part).__name__}: {REMEDY}")
        if Ellipsis not in keys:
            keys += (Ellipsis,)  # never a scalar
        return self._view(self._host[keys])

    def transpose(self, *axes):
        return self._view(self._host.transpose(*axes))

    def swapaxes(self, axis1, axis2):
        return self._view(self._host.swapaxes(axis1, axis2))

    def reshape(self, *shape, order="C", copy=None):
        assert order == "C" and copy is None, "not used here"
        host = self._host.reshape(*shape)
        if host.size and not np.may_share_memory(host, self._host):
            raise HiddenAccess(
                f"reshape of a device array of shape {self.shape}, strides {self.strides} to {shape} would copy it"
            )
        return self._view(host)

    def view(self, dtype=None, type=None):
        assert type is None, "not used here"
        return self._view(self._host.view(self.dtype if dtype is None else dtype))

    def copy(self, order="C"):
        """A C-contiguous copy, in the order of the current stream."""
        new = ndarray(self.shape, self.dtype)
        if self.size:
            target, source = new._host, self._host
            machine().launch(get_current_stream().queue, "copy", lambda: target.__setitem__(..., source))
        return new

    def __array_ufunc__(self, ufunc, *rest, **named):
        raise HiddenAccess(f"numpy.{ufunc.__name__} of a device array: {REMEDY}")

    def __array_function__(self, function, *rest):
        raise HiddenAccess(f"numpy.{function.__name__} of a device array: {REMEDY}")

    def __getattr__(self, name):
        if name.startswith("_") and name not in FORBIDDEN:
            raise AttributeError(name)  # what protocols ask for
        raise NotEmulatedError(f"cupy.ndarray.{name}: not used here; {REMEDY}")


def _forbidden(name):
    def refuse(self, *rest, **named):
        raise HiddenAccess(f"{name} of a device array of shape {self.shape}, {self.dtype.name}: {REMEDY}")

    return refuse


for _name in FORBIDDEN:
    if _name != "__cuda_array_interface__":
        setattr(ndarray, _name, _forbidden(_name))
for _operator in OPERATORS:
    for _name in (f"__{_operator}__", f"__r{_operator}__", f"__i{_operator}__"):
        setattr(ndarray, _name, _forbidden(_name))
ndarray.__module__ = "cupy"


def now(array: ndarray) -> np.ndarray:
    """What the memory of an array holds at this moment, whatever is still queued."""
    return array._host.copy()


def poisoned(array: ndarray) -> bool:
    """Whether an array holds nothing but poison at this moment."""
    return bool((now(array).reshape(-1).view(np.uint8) == POISON).all())


def empty(shape, dtype=float, order="C") -> ndarray:
    return ndarray(shape, dtype, order=order)
