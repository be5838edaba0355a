"""A CuPy whose arrays lie in host memory and, as on a device, do not mix with NumPy's.

NumPy's functions refuse its arrays, its functions refuse NumPy's (but those that copy to a device), reductions give
arrays of rank 0, and new memory is not zero. Everything runs at once: for streams see ``fake_cupy.py``.
"""

import importlib.machinery
import sys
import types

import numpy as np
from scipy import ndimage

from linumpy import device
from linumpy.gpu.ndimage import correlate
from linumpy.write import device_chunks
from tests.support.gpu.emulator import emulated

_UPLOADS = ("array", "asarray", "ascontiguousarray")
_ARITHMETIC = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow")
_OPERATORS = (*_ARITHMETIC, "and", "or", "xor", "lshift", "rshift")
_COMPARISONS = ["lt", "le", "eq", "ne", "gt", "ge", "neg", "pos", "abs", "invert"]
_GARBAGE = 0xA5
_FREE_NBYTES = 2**34


class Array:
    """``cupy.ndarray``: NumPy's methods on `host`, without NumPy's conversions."""

    __array_ufunc__ = None  # NumPy's own functions and operators refuse it
    __hash__ = None

    def __init__(self, host):
        self.host = host

    def __array__(self, *_, **__):
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()`")

    def __getattr__(self, name):
        if name.startswith("__"):  # NumPy's protocols, by which it would be taken for an array on the host
            raise AttributeError(name)
        found = getattr(self.host, name)
        if name == "flags" or not callable(found):
            return wrapped(found) if isinstance(found, np.ndarray) else found

        def method(*arguments, **options):
            made = found(*map(unwrapped, arguments), **{key: unwrapped(one) for key, one in options.items()})
            return made if name in ("tolist", "item") else wrapped(made)

        return method

    @property
    def data(self):
        whole = self.host
        while isinstance(whole.base, np.ndarray):
            whole = whole.base
        memory = types.SimpleNamespace(ptr=whole.ctypes.data)
        return types.SimpleNamespace(ptr=self.host.ctypes.data, mem=memory)

    @property
    def device(self):
        return _Device()

    def get(self, stream=None, out=None, blocking=True):
        out = np.empty_like(self.host) if out is None else out
        out[...] = self.host
        return out

    def __len__(self):
        return len(self.host)

    def __iter__(self):
        return map(wrapped, self.host)

    def __getitem__(self, key):
        return wrapped(self.host[unwrapped(key)])

    def __setitem__(self, key, value):
        self.host[unwrapped(key)] = unwrapped(value)

    def __bool__(self):
        return bool(self.host)

    def __int__(self):
        return int(self.host)

    def __float__(self):
        return float(self.host)

    def __index__(self):
        return self.host.__index__()


def _forward(name):
    def method(self, *others):
        return wrapped(getattr(self.host, name)(*map(unwrapped, others)))

    setattr(Array, name, method)


for _one in _OPERATORS:
    for _kind in ("", "r"):
        _forward(f"__{_kind}{_one}__")
for _one in _COMPARISONS:
    _forward(f"__{_one}__")


def _in_place(name):
    def method(self, other):
        getattr(self.host, name)(unwrapped(other))
        return self

    setattr(Array, name, method)


for _one in _OPERATORS:
    _in_place(f"__i{_one}__")


def wrapped(value):
    """What CuPy returns for what NumPy returned."""
    if isinstance(value, np.ndarray | np.generic):
        return Array(np.asarray(value))
    if isinstance(value, tuple | list):
        return type(value)(map(wrapped, value))
    return value


def unwrapped(value):
    """What NumPy takes for what CuPy takes; arrays on the host are refused."""
    if isinstance(value, Array):
        return value.host
    if isinstance(value, np.ndarray):
        raise TypeError(f"Unsupported type {type(value)}")
    if isinstance(value, tuple | list):
        return type(value)(map(unwrapped, value))
    return value


def _uploading(name):
    def function(values, *arguments, **options):
        if hasattr(values, "__cuda_array_interface__") or type(values).__module__.startswith("warp"):
            values = values.numpy()
        if name == "asarray" and isinstance(values, Array) and not arguments and not options:
            return values
        host = values.host if isinstance(values, Array) else values
        made = getattr(np, name)(host, *arguments, **options)
        return Array(made if isinstance(values, Array) else made.copy())

    return function


def _calling(function):
    def call(*arguments, **options):
        made = function(*map(unwrapped, arguments), **{key: unwrapped(one) for key, one in options.items()})
        out = options.get("out")
        return out if out is not None else wrapped(made)

    return call


class _Device:
    id = 0

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


class _Stream(_Device):
    ptr = 0

    def __init__(self, event):
        self.event = event

    def synchronize(self):
        pass

    def record(self, event=None):
        return self.event

    def wait_event(self, event):
        pass


class _Module(types.ModuleType):
    """Functions of a module of NumPy or SciPy, for arrays on the device alone."""

    def __init__(self, name, functions):
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)
        self._functions = functions

    def __getattr__(self, name):
        found = getattr(self._functions, name)
        return _calling(found) if callable(found) and not isinstance(found, type) else found


def _empty(shape, dtype=float, order="C"):
    made = np.empty(shape, dtype, order)
    made.reshape(-1, order="A").view(np.uint8)[:] = _GARBAGE
    return Array(made)


def modules():
    """Make ``cupy`` and ``cupyx.scipy.ndimage`` under their names."""
    cupy = _Module("cupy", np)
    cupy.ndarray, cupy.empty = Array, _empty
    cupy.empty_like = lambda array: _empty(array.shape, array.dtype)
    cupy.asnumpy = lambda array: array.get() if isinstance(array, Array) else np.asarray(array)
    for name in _UPLOADS:
        setattr(cupy, name, _uploading(name))
    event = types.SimpleNamespace(synchronize=lambda: None, record=lambda _stream=None: None)
    stream = _Stream(event)
    runtime = types.SimpleNamespace(
        getDeviceCount=lambda: 1, getDevice=lambda: 0, memGetInfo=lambda: (_FREE_NBYTES, _FREE_NBYTES)
    )
    pool = types.SimpleNamespace(free_bytes=lambda: 0, get_limit=lambda: 0)
    cupy.get_default_memory_pool = lambda: pool
    cupy.cuda = types.SimpleNamespace(
        Device=lambda *_: _Device(),
        get_current_stream=lambda: stream,
        Stream=lambda **_: stream,
        runtime=runtime,
        alloc_pinned_memory=bytearray,
        Event=lambda **_: event,
    )
    cupyx, scipy = types.ModuleType("cupyx"), types.ModuleType("cupyx.scipy")
    scipy.ndimage = _Module("cupyx.scipy.ndimage", ndimage)
    return {"cupy": cupy, "cupyx": cupyx, "cupyx.scipy": scipy, "cupyx.scipy.ndimage": scipy.ndimage}


def load(spec):
    """Stand in for :func:`linumpy.gpu.kernels.load`: the kernel in the emulator, for arrays of this module."""
    kernel = emulated(spec)

    def run(grid, block, arguments):
        kernel(grid, block, [one.host if isinstance(one, Array) else one for one in arguments])

    return run


def install(patch):
    """Put the modules where imports find them, and return ``cupy``; `patch` takes all of it back."""
    made = modules()
    patch.setattr(device, "_cuda_started", device._cuda_started)  # a look for devices would set it for good
    patch.setattr(device_chunks, "kvikio_mode", lambda: ("none", "not on this memory"))
    patch.setattr(correlate, "load", load)
    for name, module in made.items():
        patch.setitem(sys.modules, name, module)
    return made["cupy"]
