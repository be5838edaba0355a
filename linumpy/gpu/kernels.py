"""Compile CUDA sources, once for each device and set of definitions, never for a shape.

In: a :class:`KernelSpec`, made without a GPU. Out: a ``cupy.RawKernel``. CuPy caches compiled kernels on disk, for
other processes.
"""

from __future__ import annotations

import functools
import importlib.resources
import re
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from linumpy.arrays import Array, is_device_array

_STANDARD = "-std=c++17"
_INCLUDE = re.compile(r'^#include "(\w+\.cuh)"$', re.MULTILINE)
#: Package of the headers that kernels of several packages include.
SHARED = "linumpy.gpu.cuda"


@dataclass(frozen=True)
class KernelSpec:
    """A kernel and its definitions.

    `source`: file name of the source, without ``.cu``. `name`: the ``extern "C"`` kernel. `defines` (str, str):
    preprocessor definitions: types, rank, mode; never a shape. `package`: package that contains the source.
    """

    source: str
    name: str
    defines: tuple[tuple[str, str], ...]
    package: str = SHARED
    flags: tuple[str, ...] = ()

    @property
    def options(self) -> tuple[str, ...]:
        """Options of the compiler."""
        return (_STANDARD, *self.flags)

    @property
    def code(self) -> str:
        """The source, after its definitions.

        CuPy compiles an empty file for each new set of options, in every process: so definitions are no options.
        Precompiled headers (:mod:`linumpy.kernel_cache`) would cost time, since the headers are part of the source.
        """
        defines = "".join(f"#define {key} {value}\n" for key, value in self.defines)
        return f"#pragma nv_no_pch\n{defines}{source_text(self.source, self.package)}"

    @property
    def module(self) -> tuple[object, ...]:
        """What determines the module that the kernel is compiled in, with others of its source."""
        return self.source, self.package, self.flags, self.defines


@functools.cache
def source_text(source: str, package: str = SHARED) -> str:
    """Read a CUDA source of a package, and insert the headers that it includes, from that package or :data:`SHARED`.

    CuPy's cache on disk is keyed by the text of the source alone, so it would not notice a changed header.
    """
    folder = importlib.resources.files(package)
    return _with_headers((folder / f"{source}.cu").read_text(encoding="utf-8"), package)


def _with_headers(text: str, package: str) -> str:
    included: set[str] = set()

    def header(include: re.Match[str]) -> str:
        name = include[1]
        if name in included:
            return ""
        included.add(name)
        file = importlib.resources.files(package) / name
        if not file.is_file():
            file = importlib.resources.files(SHARED) / name
        return _INCLUDE.sub(header, file.read_text(encoding="utf-8"))

    return _INCLUDE.sub(header, text)


#: A lock for each module, so that a thread waits for a module that another thread compiles.
_compile_locks: dict[tuple[object, ...], threading.Lock] = {}


@functools.lru_cache(maxsize=512)
def _load(spec: KernelSpec, device_id: int) -> Any:
    import cupy

    with _compile_locks.setdefault((spec.module, device_id), threading.Lock()):
        module = cupy.RawModule(code=spec.code, options=spec.options)
        return module.get_function(spec.name)


def load(spec: KernelSpec) -> Any:
    """Return the kernel, compiled for CuPy's current device by the first call."""
    import cupy

    return _load(spec, cupy.cuda.runtime.getDevice())


def prepare(specs: Iterable[KernelSpec]) -> None:
    """Compile kernels in parallel, for CuPy's current device; :func:`load` then returns them at once.

    `specs`: kernels that will be used; kernels of one source with the same definitions are compiled together.
    """
    import cupy

    _prepare(tuple(specs), cupy.cuda.runtime.getDevice())


def prepare_beside(specs: Iterable[KernelSpec]) -> Future[None]:
    """As :func:`prepare`, but in a thread: the result is there when the kernels are.

    At the end of the process Python waits for the thread, since NVRTC must not be interrupted.
    """
    import cupy

    return _prepare_beside(tuple(specs), cupy.cuda.runtime.getDevice())


_beside: dict[tuple[tuple[KernelSpec, ...], int], Future[None]] = {}
_beside_lock = threading.Lock()


def _prepare_beside(specs: tuple[KernelSpec, ...], device_id: int) -> Future[None]:
    with _beside_lock:
        future = _beside.get((specs, device_id))
        if future is None or (future.done() and future.exception() is not None):  # what failed is tried again
            thread = ThreadPoolExecutor(1, thread_name_prefix="linumpy-compile")
            future = _beside[specs, device_id] = thread.submit(_prepare, specs, device_id)
            thread.shutdown(wait=False)
        return future


@functools.lru_cache(maxsize=512)
def _prepare(specs: tuple[KernelSpec, ...], device_id: int) -> None:
    import cupy

    specs_of_module: dict[tuple[object, ...], list[KernelSpec]] = {}
    for spec in specs:
        specs_of_module.setdefault(spec.module, []).append(spec)

    def compile_all(specs: list[KernelSpec]) -> None:
        with cupy.cuda.Device(device_id):
            for spec in specs:
                _load(spec, device_id)

    if len(specs_of_module) == 1:
        compile_all(list(specs))
    elif specs_of_module:
        with ThreadPoolExecutor(len(specs_of_module), thread_name_prefix="linumpy-compile") as threads:
            list(threads.map(compile_all, specs_of_module.values()))


@dataclass(frozen=True)
class Uploaded:
    """A value that stays on a device between calls, such as tables.

    `value`: arrays on the device, or in tests on the host. `event`: recorded after the upload; None on the host.
    """

    value: Any
    event: Any

    def get(self) -> Any:
        """Return the value, ordered before all later work on CuPy's current stream."""
        if self.event is not None:
            import cupy

            cupy.cuda.get_current_stream().wait_event(self.event)
        return self.value


def uploaded(value: Any) -> Uploaded:
    """Return a value that was uploaded on CuPy's current stream, with an event recorded after the upload."""
    import cupy

    return Uploaded(value, cupy.cuda.get_current_stream().record(cupy.cuda.Event(disable_timing=True)))


def current_queue() -> tuple[int, int, int]:
    """Return a key of CuPy's current queue of work: device, stream, and thread (each may have its own default stream).

    Cached values belong to one queue: CuPy gives freed memory to later work on the same stream, while another queue
    could still read it. A new stream may have the pointer of a destroyed stream without being ordered after its
    uploads; :class:`Uploaded` waits for them.
    """
    import cupy

    return int(cupy.cuda.runtime.getDevice()), int(cupy.cuda.get_current_stream().ptr), threading.get_ident()


#: Alignment of a table in bytes, so that a thread may load a row of weights at once.
_ALIGNED = 64

#: The queue of work that a table belongs to, a key of :func:`current_queue`; None on the host.
Queue = tuple[int, int, int] | None


def queue_of(array: Array) -> Queue:
    """Return the current queue of work for an array; None on the host."""
    return current_queue() if is_device_array(array) else None


def upload(tables: Sequence[np.ndarray], queue: Queue) -> Uploaded:
    """Upload tables; return each as an array of uint8 that begins at, and is padded to, a multiple of 64 bytes."""
    sizes = [-(-table.nbytes // _ALIGNED) * _ALIGNED for table in tables]
    ends = np.cumsum(sizes)
    packed: Array = np.zeros(int(ends[-1]), np.uint8)
    for table, size, end in zip(tables, sizes, ends, strict=True):
        packed[end - size : end - size + table.nbytes] = table.reshape(-1).view(np.uint8)
    if queue is not None:
        import cupy

        packed = cupy.asarray(packed)
    parts = tuple(packed[end - size : end] for size, end in zip(sizes, ends, strict=True))
    return Uploaded(parts, None) if queue is None else uploaded(parts)


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

#: Unsigned integers by their size in bytes, for kernels that copy elements without computing.
UNSIGNED_TYPES = {itemsize: CUDA_TYPES[f"u{itemsize}"] for itemsize in (1, 2, 4, 8)}
#: The types of numbers that float32 holds without loss; kernels compute in double precision for all others. Callers
#: view booleans as u1.
IN_FLOAT32 = ("u1", "i1", "u2", "i2", "f2", "f4")
#: Sizes from this on need 64-bit indices; a block computes some indices beyond the last element.
_INT_LIMIT = 2**31 - 2**20


def needs_float64(*dtypes: np.dtype) -> bool:
    """Say whether kernels compute in double precision: float32 does not hold all numbers of the dtypes."""
    return any(dtype.str[1:] not in IN_FLOAT32 for dtype in dtypes)


def computed_in(*dtypes: np.dtype) -> np.dtype:
    """Choose the dtype of sums: float32 if all dtypes are in :data:`IN_FLOAT32`, else float64."""
    return np.dtype(np.float64 if needs_float64(*dtypes) else np.float32)


def index_type(size: int) -> str:
    """Return the type of an index into `size` elements."""
    return "int64" if size >= _INT_LIMIT else "int"


def address_of(array: Any) -> int:
    """Return the address of an array's first element, on a device or, in tests, in host memory."""
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)


def memory_order(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Return the axes in memory order, the contiguous one last; axes of one voxel (with arbitrary strides) first."""
    return tuple(sorted(range(len(shape)), key=lambda axis: (shape[axis] > 1, -abs(strides[axis]) * (shape[axis] > 1))))


def int32(*values: int) -> tuple[np.int32, ...]:
    """Convert integers to arguments of a kernel."""
    return tuple(np.int32(value) for value in values)


def uint32(*values: int) -> tuple[np.uint32, ...]:
    """Convert integers to arguments of a kernel."""
    return tuple(np.uint32(value) for value in values)


def int64(*values: int) -> tuple[np.int64, ...]:
    """Convert integers to arguments of a kernel."""
    return tuple(np.int64(value) for value in values)
