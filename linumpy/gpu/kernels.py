"""Compile CUDA sources, once a device and never for a shape.

In: a :class:`KernelSpec`, made without a GPU. Out: a ``cupy.RawKernel``. CuPy keeps what it compiled on disk, so a
second process finds it there.
"""

from __future__ import annotations

import functools
import importlib.resources
import re
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

_STANDARD = "-std=c++17"
_INCLUDE = re.compile(r'^#include "(\w+\.cuh)"$', re.MULTILINE)
#: Package of the headers that kernels of several packages include.
SHARED = "linumpy.gpu.cuda"


@dataclass(frozen=True)
class KernelSpec:
    """A kernel and what it is compiled for.

    Attributes
    ----------
    source : str
        File name of the source, without ``.cu``.
    name : str
        The ``extern "C"`` kernel.
    defines : tuple of (str, str)
        Preprocessor definitions: types, rank, mode; never a shape.
    package : str
        Package that the source is data of.
    flags : tuple of str
        Further options of NVRTC.
    """

    source: str
    name: str
    defines: tuple[tuple[str, str], ...]
    package: str = SHARED
    flags: tuple[str, ...] = ()

    @property
    def options(self) -> tuple[str, ...]:
        """Options of the compiler."""
        return (_STANDARD, *self.flags, *(f"-D{key}={value}" for key, value in self.defines))


@functools.cache
def source_text(source: str, package: str = SHARED) -> str:
    """Read a CUDA source of a package, with the headers it includes, of that package or shared, inserted once each.

    CuPy looks for what it compiled by the text of the source alone: a header that changed would not be noticed.
    """
    folder = importlib.resources.files(package)
    return _with_headers((folder / f"{source}.cu").read_text(encoding="utf-8"), package)


def _with_headers(text: str, package: str) -> str:
    included: set[str] = set()

    def header(found: re.Match[str]) -> str:
        name = found[1]
        if name in included:
            return ""
        included.add(name)
        own = importlib.resources.files(package) / name
        file = own if own.is_file() else importlib.resources.files(SHARED) / name
        return _INCLUDE.sub(header, file.read_text(encoding="utf-8"))

    return _INCLUDE.sub(header, text)


#: A thread that needs a module which another one compiles waits for it.
_compiling: dict[tuple[str, str, tuple[str, ...], int], threading.Lock] = {}


@functools.lru_cache(maxsize=512)
def _load(spec: KernelSpec, device_id: int) -> Any:
    import cupy

    with _compiling.setdefault((spec.source, spec.package, spec.options, device_id), threading.Lock()):
        module = cupy.RawModule(code=source_text(spec.source, spec.package), options=spec.options)
        return module.get_function(spec.name)


def load(spec: KernelSpec) -> Any:
    """Return the kernel, compiled for CuPy's current device."""
    import cupy

    return _load(spec, cupy.cuda.runtime.getDevice())


def prepare(specs: Iterable[KernelSpec]) -> None:
    """Compile kernels side by side, for CuPy's current device; :func:`load` then returns them at once.

    One that is compiled already costs nothing.

    Parameters
    ----------
    specs : iterable of KernelSpec
        Kernels that are about to be used; those of one source and the same definitions are compiled together.
    """
    import cupy

    _prepare(tuple(specs), cupy.cuda.runtime.getDevice())


@functools.lru_cache(maxsize=512)
def _prepare(specs: tuple[KernelSpec, ...], device_id: int) -> None:
    import cupy

    together: dict[tuple[str, str, tuple[str, ...]], list[KernelSpec]] = {}
    for spec in specs:
        together.setdefault((spec.source, spec.package, spec.options), []).append(spec)

    def compile_all(of_one_source: list[KernelSpec]) -> None:
        with cupy.cuda.Device(device_id):
            for spec in of_one_source:
                _load(spec, device_id)

    if len(together) == 1:
        compile_all(list(specs))
    elif together:
        with ThreadPoolExecutor(len(together), thread_name_prefix="linumpy-compile") as threads:
            list(threads.map(compile_all, together.values()))


@dataclass(frozen=True)
class Uploaded:
    """What is kept on a device from one call to the next, such as tables.

    Attributes
    ----------
    value : object
        Arrays on the device, or in tests on the host.
    event : cupy.cuda.Event or None
        Recorded behind the upload; None on the host.
    """

    value: Any
    event: Any

    def get(self) -> Any:
        """Return the value, good for what is queued on CuPy's current stream from now on."""
        if self.event is not None:
            import cupy

            cupy.cuda.get_current_stream().wait_event(self.event)
        return self.value


def uploaded(value: Any) -> Uploaded:
    """Note that a value has just been uploaded on CuPy's current stream."""
    import cupy

    return Uploaded(value, cupy.cuda.get_current_stream().record(cupy.cuda.Event(disable_timing=True)))


def current_queue() -> tuple[int, int, int]:
    """Name CuPy's current queue of work: device, stream, and thread, since each thread may have its own default stream.

    What is kept is kept for a queue: let go of, its memory is given to later work of the same queue, while another one
    could still read it. The number of a stream that is gone may be given to a new one, which has not waited for
    uploads on the old one; :class:`Uploaded` does.
    """
    import cupy

    return int(cupy.cuda.runtime.getDevice()), int(cupy.cuda.get_current_stream().ptr), threading.get_ident()


#: Types of real numbers, by NumPy's name without the byte order, as number.cuh reads them.
CUDA_TYPES = {
    "b1": "unsigned char",
    "i1": "signed char",
    "i2": "short",
    "i4": "int",
    "i8": "long long",
    "u1": "unsigned char",
    "u2": "unsigned short",
    "u4": "unsigned",
    "u8": "unsigned long long",
    "f2": "half_bits",
    "f4": "float",
    "f8": "double",
}

#: Of these, what float32 holds without a loss; kernels compute in double precision for the others.
IN_FLOAT32 = ("u1", "i1", "u2", "i2", "f2", "f4")
#: Elements from which on their numbers take 64 bits; a block numbers some elements beyond the last.
_INT_LIMIT = 2**31 - 2**20


def index_type(size: int) -> str:
    """Name the type that numbers so many elements."""
    return "int64" if size >= _INT_LIMIT else "int"


def address_of(array: Any) -> int:
    """Where the first element of an array lies, on a device or, in tests, in host memory."""
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)


def memory_order(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Order axes as memory has them, the contiguous one last; those of one voxel, whose strides say nothing, first."""
    return tuple(sorted(range(len(shape)), key=lambda axis: (shape[axis] > 1, -abs(strides[axis]) * (shape[axis] > 1))))


def int32(*values: int) -> tuple[np.int32, ...]:
    """Give arguments of a kernel their type."""
    return tuple(np.int32(value) for value in values)


def uint32(*values: int) -> tuple[np.uint32, ...]:
    """Give arguments of a kernel their type."""
    return tuple(np.uint32(value) for value in values)


def int64(*values: int) -> tuple[np.int64, ...]:
    """Give arguments of a kernel their type."""
    return tuple(np.int64(value) for value in values)
